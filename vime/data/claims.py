"""What a run says of itself, which its audit compares with what lies on disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vime.types import Version


@dataclass(frozen=True, slots=True, kw_only=True)
class RunClaims:
    """What metrics and events of a run say, for its audit: by round the receipts that were named and (samples,
    trainable tokens) of its steps, by version the content hashes that engines confirmed."""

    receipts: Mapping[int, set[str]]
    sizes: Mapping[int, tuple[int, int]]
    hashes: Mapping[Version, set[str]]
