"""Columns that the trainer adds before the first step, by hand, in a world of one rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.helpers.rows import make_row
from vime.config.training import AlgoConfig
from vime.training.columns import (
    ADVANTAGE,
    OLD_LOGP,
    REF_LOGP,
    RETURN,
    STALENESS,
    TEACHER_LOGP,
    VALUE,
    Columns,
    advantage_columns,
    needs_old_log_prob,
    staleness_columns,
)
from vime.types import RankPlace, RoundPlan, StepPlan, VersionSpan

ALONE = RankPlace(rank=0, world_size=1, dp_rank=0, dp_size=1, source_rank=0, holds_tokens=True, speaks=True)
# rewards 1 and 3; of the first row the second token does not train
ROWS = {0: make_row(response=[1, 2], loss_mask=[1, 0], reward=1.0), 1: make_row(response=[1], reward=3.0)}
PLAN = RoundPlan(rollout_id=0, steps=(StepPlan(micro_batches=(((0, 1),),), num_samples=2, num_tokens=2),))
COLUMNS = {
    OLD_LOGP: {0: [-1.0, -2.0], 1: [-1.0]},
    REF_LOGP: {0: [-1.5, -1.0], 1: [-1.0]},
    TEACHER_LOGP: {0: [-0.5, -2.0], 1: [-3.0]},
    VALUE: {0: [0.25, 9.0], 1: [1.0]},
}


@pytest.fixture(autouse=True, scope="module")
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def made(*names: str, **algo: Any) -> dict[str, list[list[float]]]:
    """The columns made of those named, row by row."""
    given: Columns = {name: {row: torch.tensor(values) for row, values in COLUMNS[name].items()} for name in names}
    config = AlgoConfig(**{"normalize_advantages": False, **algo})
    found = advantage_columns(PLAN, ROWS, given, algo=config, place=ALONE, device=torch.device("cpu"))
    return {name: [column[row].tolist() for row in ROWS] for name, column in found.items()}


def test_without_anything_that_differs_by_token_no_column_is_made() -> None:
    assert made(OLD_LOGP) == {}


def test_the_penalty_is_what_the_policy_finds_likelier_than_the_reference() -> None:
    # k1 = old - ref: .5, -1 | 0; at 0.1 off the group's advantage
    found = made(OLD_LOGP, REF_LOGP, advantage_estimator="reinforce_plus_plus_baseline", kl_coef=0.1)
    assert found[ADVANTAGE] == [pytest.approx([0.95, 1.1]), pytest.approx([3.0])]


def test_the_teacher_pulls_towards_what_it_finds_likelier() -> None:
    # old - teacher: -.5, 0 | 2
    found = made(OLD_LOGP, TEACHER_LOGP, use_opd=True, opd_kl_coef=0.5)
    assert found[ADVANTAGE] == [pytest.approx([1.25, 1.0]), pytest.approx([2.0])]


def test_advantages_are_whitened_over_trainable_tokens_alone() -> None:
    # trainable 1 and 3: mean 2, variance 1; the masked token is moved along and not counted
    found = made(normalize_advantages=True)
    assert found[ADVANTAGE] == [pytest.approx([-1.0, -1.0]), pytest.approx([1.0])]


def test_a_critic_makes_advantages_and_returns_of_its_values() -> None:
    # one trainable token each: advantage = reward - value, return = reward; the masked token has neither
    found = made(VALUE, advantage_estimator="ppo")
    assert found == {
        ADVANTAGE: [pytest.approx([0.75, 0.0]), pytest.approx([2.0])],
        RETURN: [pytest.approx([1.0, 0.0]), pytest.approx([3.0])],
    }


def test_staleness_counts_from_the_oldest_trainable_token_and_is_never_negative() -> None:
    old = make_row(response=[1, 2], versions=[VersionSpan(3, 0, 1), VersionSpan(5, 1, 2)])
    ahead = make_row(response=[1], versions=[VersionSpan(7, 0, 1)])
    found = staleness_columns(5, {0: old, 1: ahead}, [0, 1])[STALENESS]
    assert [value_R.tolist() for value_R in found.values()] == [[2.0, 2.0], [0.0]]


def test_the_old_policy_is_run_forward_only_for_a_loss_that_reads_it() -> None:
    steps = RoundPlan(rollout_id=0, steps=PLAN.steps * 2)
    assert needs_old_log_prob(steps, AlgoConfig())
    assert needs_old_log_prob(steps, AlgoConfig(loss_type="custom_loss"))
    assert not needs_old_log_prob(steps, AlgoConfig(loss_type="sft_loss"))
    assert needs_old_log_prob(steps, AlgoConfig(loss_type="sft_loss", use_unbiased_kl=True))  # the ratio is to it
    assert not needs_old_log_prob(PLAN, AlgoConfig())
