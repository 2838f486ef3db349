"""Padding and imbalance of a plan, by hand."""

import pytest

from vime.batching.measure import plan_metrics
from vime.types import RoundPlan, StepPlan


def make_plan(*steps: tuple[tuple[tuple[int, ...], ...], ...]) -> RoundPlan:
    return RoundPlan(
        rollout_id=0, steps=tuple(StepPlan(micro_batches=step, num_samples=2, num_tokens=2) for step in steps)
    )


def metrics_of(plan: RoundPlan, lengths: list[int], *, pack: int = 1, sequence: int = 1) -> dict[str, float]:
    return plan_metrics(plan, lengths, {"tokens": lengths}, pack_multiple=pack, sequence_multiple=sequence)


def test_packs_of_whole_sequences_waste_nothing() -> None:
    assert metrics_of(make_plan((((0, 1),), ((2,),))), [5, 3, 8])["perf/padding_waste"] == 0


def test_padding_of_sequences_packs_and_empty_micro_batches_is_counted() -> None:
    # two context-parallel ranks: sequences to a multiple of 4; two tensor-parallel ranks: packs to one of 8
    # (5, 3) -> 8 + 4 = 12 -> 16; (8,) -> 8; an empty one -> 2 dummy tokens -> 8: 16 real of 32
    plan = make_plan((((0, 1), ()), ((2,), ())))
    waste = metrics_of(plan, [5, 3, 8], pack=8, sequence=4)["perf/padding_waste"]
    assert waste == pytest.approx(1 - 16 / (16 + 8 + 8 + 8))


def test_imbalance_adds_up_the_heaviest_rank_of_each_step() -> None:
    # steps with rank loads (3, 1) and (2, 2): (3 + 2) / (2 + 2) - 1
    plan = make_plan((((0,),), ((1,),)), (((2,),), ((3,),)))
    assert metrics_of(plan, [3, 1, 2, 2])["perf/dp_imbalance_tokens"] == pytest.approx(0.25)


def test_one_rank_is_never_out_of_balance() -> None:
    assert metrics_of(make_plan((((0,), (1,)),)), [9, 1])["perf/dp_imbalance_tokens"] == 0
