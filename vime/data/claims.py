"""What a run's metrics and events claim; its audit compares it with the files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vime.types import Version


@dataclass(frozen=True, slots=True, kw_only=True)
class RunClaims:
    """The claims of a run for its audit: by round the receipts that were named and (rows, trainable tokens) of its
    steps, by version the content hashes that engines confirmed."""

    receipts: Mapping[int, set[str]]
    sizes: Mapping[int, tuple[int, int]]
    hashes: Mapping[Version, set[str]]
