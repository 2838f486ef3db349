"""The losses of a plan: computed padding, and time in which ranks wait for the one with the most work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vime.batching.pack import pack_layout
from vime.types import RoundPlan

PADDING_WASTE = "perf/padding_waste"
IMBALANCE = "perf/dp_imbalance_"


def plan_metrics(
    plan: RoundPlan,
    total_lengths: Sequence[int],
    loads: Mapping[str, Sequence[int]],
    *,
    pack_multiple: int,
    sequence_multiple: int,
) -> dict[str, float]:
    """Return `perf/padding_waste` and, per entry of `loads` (the cost of each row), `perf/dp_imbalance_<name>`.

    Waste: the share of all positions computed in the round that are padding, empty micro-batches included. Imbalance:
    ranks meet at the end of each optimizer step, so it is the sum over steps of the heaviest rank's load, over the sum
    of the mean loads, minus 1: how long the mean rank waits for each unit of its work, if time goes with load. 0 with
    one rank.
    Example: steps with loads (3, 1) and (2, 2): (3 + 2) / (2 + 2) - 1 = 0.25.
    """
    computed = sum(
        pack_layout([total_lengths[row] for row in batch], pack_multiple, sequence_multiple)[1]
        for step in plan.steps
        for rank in step.micro_batches
        for batch in rank
    )
    return {
        PADDING_WASTE: 1 - sum(total_lengths) / computed,
        **{IMBALANCE + name: _imbalance(plan, load) for name, load in loads.items()},
    }


def _imbalance(plan: RoundPlan, load: Sequence[int]) -> float:
    per_step = [
        [sum(load[row] for batch in rank for row in batch) for rank in step.micro_batches] for step in plan.steps
    ]
    mean = sum(sum(ranks) / len(ranks) for ranks in per_step)
    return sum(map(max, per_step)) / mean - 1 if mean else 0.0
