"""A round as trainer ranks get it, and what they say about it when they have trained it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vime.handoff.receipts import SteppedGroup

if TYPE_CHECKING:
    from vime.handoff.ticket import RoundTicket
    from vime.training.columns import ArrayColumns
    from vime.types import Version


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundToTrain:
    """What each rank of the policy gets for a round, the same for all of them."""

    rollout_id: int
    ticket: RoundTicket
    version: Version  # of the weights before it
    given: ArrayColumns  # of roles that other ranks play
    is_judged: bool  # whether trainer and engine may be too far apart to train it
    num_begun: int  # early batches of the round, which `ticket` does not hold


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRound:
    """What one rank of the policy says about a round that it trained."""

    metrics: dict[str, float]  # the same on every rank but for memory
    staleness: list[int]  # of each row that trained here
    fetch_s: float  # until the rows were here
    taught: ArrayColumns  # what a critic on other ranks learns from
    stepped: list[SteppedGroup]  # on a rank that reads the rows of a replica: what its optimizer steps named


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedRound:
    """What all ranks say about a round that they trained."""

    metrics: dict[str, float]
    stepped: list[SteppedGroup]


def merged_columns(results: Sequence[ArrayColumns]) -> ArrayColumns:
    """Merge the columns of all replicas, each of which returned its own rows."""
    merged: ArrayColumns = {}
    for result in results:
        for name, column in result.items():
            merged.setdefault(name, {}).update(column)
    return merged
