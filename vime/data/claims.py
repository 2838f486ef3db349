"""What a run's metrics and events claim; its audit compares it with the files."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass

from vime.types import Version


@dataclass(frozen=True, slots=True, kw_only=True)
class RunClaims:
    """The claims of a run for its audit: by round the receipts that were named and (rows, trainable tokens) of its
    steps, by version the content hashes that engines confirmed. `trained`: rounds that were trained, by a version of
    Vime that wrote a receipt of each. `has_unique_groups`: whether no two rounds of the run have a group of one
    index."""

    receipts: Mapping[int, set[str]]
    sizes: Mapping[int, tuple[int, int]]
    hashes: Mapping[Version, set[str]]
    trained: Set[int] = frozenset()
    has_unique_groups: bool = False
