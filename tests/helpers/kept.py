"""Rounds of samples at hand, as whoever keeps a part of them for looking at takes them."""

from __future__ import annotations

from collections.abc import Sequence

from vime.observability.samples import RoundGroup
from vime.types import Sample


def round_groups(groups: Sequence[Sequence[Sample]]) -> list[RoundGroup]:
    return [RoundGroup.of(samples) for samples in groups]
