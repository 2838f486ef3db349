"""The loss of one micro-batch, by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from vime.backends.megatron_utils.columns import ADVANTAGE, OLD_LOGP, REF_LOGP, STALENESS
from vime.backends.megatron_utils.loss_statistics import STATISTICS, to_metrics
from vime.backends.megatron_utils.policy_loss import PolicyLoss
from vime.batching.pack import PackedBatch, pack
from vime.config.training import AlgoConfig
from vime.types import StepPlan, TrainRow, VersionSpan


def row(reward: float, mask: list[int]) -> TrainRow:
    """One prompt token, then the response."""
    return TrainRow(
        sample_index=0,
        group_index=0,
        rollout_id=0,
        tokens=[1] * (1 + len(mask)),
        response_length=len(mask),
        loss_mask=mask,
        rollout_log_probs=[-1.0] * len(mask),
        token_policy_versions=(VersionSpan(0, 0, len(mask)),),
        reward=reward,
        raw_reward=reward,
        status="completed",
        truncated=False,
    )


# Rows of 2 and 1 response tokens after 1 prompt token: a pack of 5; positions 0, 1 and 3 predict response tokens.
ROWS = [row(1.0, [1, 1]), row(-2.0, [1])]
STEP = StepPlan(micro_batches=(((0, 1),),), num_samples=2, num_tokens=3)
LOGP = torch.tensor([math.log(0.6), math.log(0.5), 0.0, math.log(0.2), 0.0])


def packed(**columns: list[list[float]]) -> PackedBatch:
    return pack(ROWS, extra={name: [torch.tensor(column) for column in rows] for name, rows in columns.items()})


def statistics(batch: PackedBatch, **algo: Any) -> dict[str, float]:
    loss, numbers = PolicyLoss(AlgoConfig(**algo), STEP)(LOGP, torch.full((5,), 0.5), batch)
    assert float(loss) == pytest.approx(numbers[0].item())
    return dict(zip(STATISTICS, numbers.tolist(), strict=True))


def test_without_an_old_policy_the_ratio_is_one() -> None:
    # loss = (-1 + 2) / 2; |logp + 1| over the 3 tokens
    found = statistics(packed())
    assert found["loss"] == pytest.approx(0.5)
    assert found["ppo_kl"] == 0
    assert found["pg_clipfrac"] == 0
    expected = (abs(math.log(0.6) + 1) + abs(math.log(0.5) + 1) + abs(math.log(0.2) + 1)) / 3
    assert found["train_rollout_logprob_abs_diff"] == pytest.approx(expected)


def test_old_policy_gives_ratio_clip_and_difference() -> None:
    # old probabilities .4 .5 | .4: ratios 1.5 (A=1, clipped at 1.2), 1, 0.5 (A=-2, clipped at 0.8)
    # loss = ((-1.2 - 1) / 2 + 1.6) / 2 = 0.25; 2 of 3 tokens clipped; mean of old - new log-probability
    old = [[math.log(0.4), math.log(0.5)], [math.log(0.4)]]
    found = statistics(packed(**{OLD_LOGP: old}))
    assert found["loss"] == pytest.approx(0.25)
    assert found["pg_clipfrac"] == pytest.approx(2 / 3)
    assert found["ppo_kl"] == pytest.approx((math.log(0.4 / 0.6) + 0 + math.log(0.4 / 0.2)) / 3)


def test_clip_higher_moves_the_upper_bound_only() -> None:
    # as above with the upper bound at 1.4: loss = ((-1.4 - 1) / 2 + 1.6) / 2 = 0.2
    old = [[math.log(0.4), math.log(0.5)], [math.log(0.4)]]
    assert statistics(packed(**{OLD_LOGP: old}), eps_clip_high=0.4)["loss"] == pytest.approx(0.2)


def test_loss_is_policy_plus_kl_minus_entropy_all_reduced_alike() -> None:
    # k1: logp - ref; per row means: ln(.6/.3) and ln(.5/.5) -> ln 2 / 2; ln(.2/.1) = ln 2; reduced 0.75 ln 2
    reference = [[math.log(0.3), math.log(0.5)], [math.log(0.1)]]
    found = statistics(
        packed(**{REF_LOGP: reference}), use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="k1", entropy_coef=0.2
    )
    assert found["kl_loss"] == pytest.approx(0.75 * math.log(2))
    assert found["entropy"] == pytest.approx(0.5)
    assert found["loss"] == pytest.approx(0.5 + 0.1 * 0.75 * math.log(2) - 0.2 * 0.5)


def test_an_empty_pack_is_zero_and_can_be_differentiated() -> None:
    batch = pack([])
    logp = torch.full((batch.num_tokens,), float("nan"), requires_grad=True)
    loss, numbers = PolicyLoss(AlgoConfig(), STEP)(logp, torch.zeros(batch.num_tokens), batch)
    loss.backward()
    assert float(loss.detach()) == 0
    assert numbers.tolist() == [0.0] * len(STATISTICS)
