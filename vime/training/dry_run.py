"""What forward and backward of a dry run are given: rows, columns and the loss of a role."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from vime.config.parse import Config
from vime.data.rows import TrainRow
from vime.protocols import PackLoss
from vime.training import columns
from vime.training.policy_loss import PolicyLoss
from vime.training.value_loss import ValueLoss
from vime.types import EngineSpec, StepPlan, VersionSpan

OF_POLICY = (columns.OLD_LOGP, columns.REF_LOGP, columns.TEACHER_LOGP, columns.ADVANTAGE)
OF_CRITIC = (columns.VALUE, columns.RETURN)


def step_inputs(
    config: Config, spec: EngineSpec, lengths: Sequence[int]
) -> tuple[list[TrainRow], dict[str, list[Tensor]], PackLoss]:
    """Return the rows of one micro-batch with `lengths` tokens, their columns, and the loss. Of a row as much as
    possible is response: those tokens have logits."""
    rows = [_row(length, config.rollout.rollout_max_response_len) for length in lengths]
    step = StepPlan(micro_batches=(), num_samples=len(rows), num_tokens=sum(row.response_length for row in rows))
    names = OF_CRITIC if spec.has_value_head else OF_POLICY
    placed = {name: [torch.zeros(row.response_length) for row in rows] for name in names}
    if spec.has_value_head:
        per_token = config.algo.calculate_per_token_loss
        return rows, placed, ValueLoss(step, value_clip=config.critic.value_clip, per_token=per_token)
    return rows, placed, PolicyLoss(config.algo, step)


def _row(length: int, longest_response: int) -> TrainRow:
    response = min(longest_response, length - 1)
    return TrainRow(
        sample_index=0,
        group_index=0,
        rollout_id=0,
        tokens=np.zeros(length, np.int32),
        response_length=response,
        loss_mask=np.ones(response, np.uint8),
        rollout_log_probs=np.zeros(response, np.float32),
        token_policy_versions=(VersionSpan(0, 0, response),),
        reward=0.0,
        raw_reward=0.0,
        status="completed",
        truncated=False,
    )
