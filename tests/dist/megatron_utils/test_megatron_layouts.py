"""Every parallel layout trains like one process, and one process trains like plain torch."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import reference_policy as reference
from tests.helpers.megatron_cases import (
    CHUNK_LAYOUTS,
    FOR_THE_NIGHT,
    GROUPED_LAYOUTS,
    LAYOUTS,
    MOE_LAYOUTS,
    ONEDNN_LAYOUTS,
    SHARED_LAYOUTS,
    TIED_LAYOUTS,
    TIED_MOE_LAYOUTS,
    layout_cases,
)
from tests.helpers.megatron_models import make_plan, make_rows
from tests.helpers.megatron_worker import Answers, answers_of
from tests.helpers.nightly import is_night

RELATIVE = 1e-5  # loss and gradient norm, fp32
ABSOLUTE = 1e-6  # losses and differences are sums of terms near 1 that cancel
WEIGHT = 2e-6  # absolute; one step moves a weight by up to 1e-3


@pytest.fixture(scope="module")
def answers(models: Path, work: Path, request: pytest.FixtureRequest) -> Answers:
    return answers_of(
        layout_cases(models, is_night=is_night(request, Path(__file__))), directory=work / "launch-layouts"
    )


def assert_trained_alike(got: dict[str, Any], expected: dict[str, Any]) -> None:
    for mine, theirs in zip(got["metrics"], expected["metrics"], strict=True):
        assert mine == pytest.approx(theirs, rel=RELATIVE, abs=ABSOLUTE)
    assert set(got["weights"]) == set(expected["weights"])
    for name, tensor in expected["weights"].items():
        torch.testing.assert_close(got["weights"][name], tensor, rtol=0, atol=WEIGHT, msg=name)


SINGLE = {
    **{f"grpo-{layout}": "grpo-single" for layout in LAYOUTS},
    **{f"grpo-onednn-{layout}": "grpo-single" for layout in ONEDNN_LAYOUTS},
    **{f"grpo-chunks-{layout}": "grpo-single" for layout in CHUNK_LAYOUTS},
    "grpo-chunks-tied": "grpo-tied-single",
    "grpo-chunks-moe-ep2": "grpo-moe-single",
    **{f"grpo-moe-{layout}": "grpo-moe-single" for layout in MOE_LAYOUTS | GROUPED_LAYOUTS},
    **{f"groups-shared-{layout}": "groups-copied" for layout in SHARED_LAYOUTS},
    "groups-shared-moe": "groups-copied-moe",
}


def by_night(cases: Iterable[str]) -> list[Any]:
    return [pytest.param(case, marks=[pytest.mark.nightly] * (case in FOR_THE_NIGHT)) for case in cases]


@pytest.mark.parametrize("case", by_night(SINGLE))
def test_layout_gives_the_loss_norm_and_weights_of_one_process(answers: Answers, case: str) -> None:
    [single] = answers(SINGLE[case])
    ranks = answers(case)
    for rank in ranks:
        assert_trained_alike(rank, single)
        assert rank["metrics"] == ranks[0]["metrics"]
        assert rank["hash"] == ranks[0]["hash"]


@pytest.mark.parametrize("case", by_night(f"grpo-{layout}" for layout in [*TIED_LAYOUTS, *TIED_MOE_LAYOUTS]))
def test_tied_embedding_on_two_stages_trains_like_one_process(answers: Answers, case: str) -> None:
    [single] = answers("grpo-moe-tied-single" if "moe" in case else "grpo-tied-single")
    for rank in answers(case):
        assert_trained_alike(rank, single)


@pytest.mark.parametrize(
    ("case", "kind", "anchor", "per_token"),
    [
        ("grpo-single", "qwen2", "reference", False),
        ("grpo-tied-single", "qwen2_tied", "qwen3", False),
        ("grpo-moe-single", "qwen3_moe", "qwen3_moe_tied", False),
        ("grpo-moe-tied-single", "qwen3_moe_tied", "qwen3_moe", False),
        ("per-token-single", "qwen2", "reference", True),
    ],
)
def test_a_grpo_round_with_kl_and_entropy_equals_plain_torch(
    answers: Answers, models: Path, case: str, kind: str, anchor: str, per_token: bool
) -> None:
    model, rows = reference.load(models / kind), make_rows()
    steps = reference.train_round(
        model, reference.load(models / anchor), rows, make_plan(rows, dp_size=1, num_steps=2), per_token=per_token
    )
    [answer] = answers(case)
    [metrics] = answer["metrics"]
    for key in ("loss", "grad_norm"):
        expected = sum(step[key] for step in steps) / len(steps)
        print(f"{case} {key}: {metrics[f'train/{key}']:.7f}, plain torch {expected:.7f}")  # noqa: T201
        assert metrics[f"train/{key}"] == pytest.approx(expected, rel=RELATIVE, abs=ABSOLUTE if key == "loss" else 0)
    assert metrics["train/lr"] == pytest.approx(steps[-1]["lr"], rel=1e-9)
    state = reference.named_weights(model)
    for name, tensor in answer["weights"].items():
        torch.testing.assert_close(tensor, state[name], rtol=0, atol=WEIGHT, msg=name)


def test_per_token_loss_over_two_replicas_divides_by_the_tokens_of_both(answers: Answers) -> None:
    [single] = answers("per-token-single")
    for rank in answers("per-token-dp2"):
        assert_trained_alike(rank, single)


@pytest.mark.parametrize(
    ("case", "world"),
    [
        ("empty-rank-dp2", 2),
        ("empty-batch-pp2", 2),
        ("empty-batch-vpp2-cp2", 4),
        ("empty-rank-cp2-dp2", 4),
        ("empty-rank-moe-ep2", 2),
    ],
)
def test_a_rank_or_micro_batch_without_rows_changes_nothing(answers: Answers, case: str, world: int) -> None:
    [single] = answers("plain-moe-single" if "moe" in case else "plain-single")
    ranks = answers(case)
    assert len(ranks) == world
    for rank in ranks:
        assert_trained_alike(rank, single)


@pytest.mark.parametrize("case", ["alone-cp2", "together-cp2", "alone-moe-ep2"])
def test_rows_alone_or_together_in_a_pack_give_the_same_step(answers: Answers, case: str) -> None:
    [single] = answers("plain-moe-single" if "moe" in case else "plain-single")
    for rank in answers(case):
        assert_trained_alike(rank, single)


def test_counts_and_differences_are_those_of_the_rows(answers: Answers) -> None:
    rows = make_rows()
    [metrics] = answers("plain-single")[0]["metrics"]
    assert metrics["train/num_samples"] == 8
    # 6+23+12+32+4+17+8+14 = 116 response tokens, rows 1, 4 and 7 have one that is masked
    assert metrics["train/num_tokens"] == 113
    # one step: the ratio is 1, so the loss is minus the mean reward and nothing is clipped
    assert metrics["train/loss"] == pytest.approx(-sum(row.reward for row in rows) / 8, rel=1e-5)
    assert metrics["train/pg_clipfrac"] == 0
    assert metrics["train/ppo_kl"] == 0
    assert metrics["train/kl_loss"] == 0


def test_engine_difference_is_measured_on_trainable_tokens_before_the_first_step(
    answers: Answers, models: Path
) -> None:
    rows = make_rows()
    logps = reference.log_probs(reference.load(models / "qwen2"), rows, temperature=1.0)
    total = sum(
        abs(float(logp) - rollout)
        for row, logp_R in zip(rows, logps, strict=True)
        for logp, rollout, trainable in zip(logp_R, row.rollout_log_probs, row.loss_mask, strict=True)
        if trainable
    )
    [metrics] = answers("plain-single")[0]["metrics"]
    assert metrics["train/train_rollout_logprob_abs_diff"] == pytest.approx(total / 113, rel=1e-5)


def test_bf16_trains_near_fp32_and_alike_in_two_layouts(answers: Answers) -> None:
    [single] = answers("bf16-single")
    fp32 = answers("plain-single")[0]["metrics"][0]
    first = single["metrics"][0]
    assert first["train/grad_norm"] == pytest.approx(fp32["train/grad_norm"], rel=2e-2)
    assert first["train/entropy"] == pytest.approx(fp32["train/entropy"], rel=1e-3)
    assert {tensor.dtype for tensor in single["weights"].values()} == {torch.bfloat16}
    for rank in answers("bf16-tp2-dp2"):
        for mine, theirs in zip(rank["metrics"], single["metrics"], strict=True):
            assert mine["train/grad_norm"] == pytest.approx(theirs["train/grad_norm"], rel=2e-2)


def test_rate_warms_up_from_zero_and_then_falls_linearly(answers: Answers) -> None:
    # peak 1e-3, floor 1e-4, 2 steps of warm-up, 8 steps in all: 6 steps of decay, 1.5e-4 each
    [answer] = answers("schedule")
    rates = [metrics["train/lr"] for metrics in answer["metrics"]]
    assert rates == pytest.approx([0.0, 5e-4, 1e-3, 8.5e-4, 7e-4], rel=1e-9)


def test_each_replica_has_one_source_rank(answers: Answers) -> None:
    # order tp, dp, pp: tensor pairs (0,1) and (2,3); two replicas of one stage
    assert [rank["place"] for rank in answers("grpo-tp2-dp2")] == [
        (0, 2, True, 0),
        (0, 2, False, 0),
        (1, 2, True, 2),
        (1, 2, False, 2),
    ]
    # two replicas of two stages: ranks 0 and 1 are the first stages, 2 and 3 the last
    assert [rank["place"] for rank in answers("grpo-pp2-dp2-distributed")] == [
        (0, 2, True, 0),
        (1, 2, True, 1),
        (0, 2, False, 0),
        (1, 2, False, 1),
    ]


def test_context_parallel_ranks_share_the_rows_that_one_of_them_fetches(answers: Answers) -> None:
    # order tp, cp, dp, pp: ranks 0 and 1 share the sequences of the first replica, 2 and 3 those of the second
    assert [rank["place"] for rank in answers("grpo-cp2-dp2-distributed")] == [
        (0, 2, True, 0),
        (0, 2, False, 0),
        (1, 2, True, 2),
        (1, 2, False, 2),
    ]
    # two stages: ranks 0 and 1 are the first, 2 and 3 the second; all four are one replica
    assert [rank["place"] for rank in answers("grpo-pp2-cp2")] == [(0, 1, number == 0, 0) for number in range(4)]


def test_a_rank_needs_its_own_rows_only_and_names_one_that_is_missing(answers: Answers) -> None:
    first, second = answers("missing-rows")  # rows are dealt out in turn: row 3 belongs to the second rank
    assert first["works"]
    assert second["works"]
    assert first["error"] is None
    kind, message = second["error"]
    assert kind == "HandoffError"
    assert "rows [3] to data-parallel index 1" in message


def test_a_reward_that_is_nan_fails_on_every_rank_naming_the_rows_and_moves_no_weight(answers: Answers) -> None:
    for rank in answers("nan-reward"):
        kind, message = rank["error"]
        assert kind == "VimeError"
        assert "round 0, optimizer step 0" in message
        assert "row 5 (sample 5)" in message
        assert "row 4" not in message
        assert rank["before"] == rank["after"]


def test_a_gradient_norm_that_overflows_fails_on_every_rank_and_moves_no_weight(answers: Answers) -> None:
    for rank in answers("huge-reward"):
        kind, message = rank["error"]
        assert kind == "VimeError"
        assert "the gradient norm is inf" in message
        assert rank["before"] == rank["after"]


@pytest.mark.parametrize(
    ("case", "bytes_per_parameter"),
    [
        # fp32 weight and gradient, two moments: 4 + 4 + 8
        ("asleep-single", 16),
        # bf16 weight, fp32 gradient, main weight and moments: 2 + 4 + 4 + 8
        ("asleep-bf16", 18),
        # the same with main weight and moments cut over two ranks: 2 + 4 + (4 + 8) / 2
        ("asleep-bf16-distributed", 12),
    ],
)
def test_sleep_gives_back_all_that_grows_with_the_model_and_waking_takes_as_much(
    answers: Answers, case: str, bytes_per_parameter: float
) -> None:
    for rank in answers(case):
        assert rank["freed"] == pytest.approx(bytes_per_parameter, rel=0.01)
        assert rank["taken"] == pytest.approx(rank["freed"], rel=0.01)
