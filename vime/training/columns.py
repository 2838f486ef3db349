"""Per-token columns that the trainer adds to its rows before the first step of a round. R: response tokens of a row.

They exist on the ranks that compute the loss (`RankPlace.holds_tokens`); elsewhere every dict of a column is empty.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from vime.algo.advantages import (
    TOKEN_REWARD_ESTIMATORS,
    discounted_returns,
    distillation_advantages,
    penalised_advantages,
    whiten,
)
from vime.algo.kl import kl_estimate
from vime.algo.values import generalized_advantages
from vime.config.training import AlgoConfig
from vime.data.rows import TrainRow
from vime.types import RankPlace, RoundPlan, StepPlan

OLD_LOGP, REF_LOGP, TEACHER_LOGP = "old_logp", "ref_logp", "teacher_logp"
ADVANTAGE, STALENESS = "advantage", "staleness"
VALUE, RETURN = "value", "return"
"""Columns of a critic: its prediction at the start of the round, and its target."""
SAMPLE_TOKENS = "sample_tokens"
"""The trainable tokens of the row's sample, over all of its rows; only in a step with a sample of several rows."""

Columns = dict[str, dict[int, Tensor]]
"""Column name -> row number -> [R] values."""


ArrayColumns = dict[str, dict[int, NDArray[np.float32]]]
"""The same as numpy arrays: how columns travel between processes."""


def to_arrays(columns: Columns) -> ArrayColumns:
    return {name: {row: value_R.numpy() for row, value_R in column.items()} for name, column in columns.items()}


def from_arrays(columns: ArrayColumns, rows: Mapping[int, TrainRow]) -> Columns:
    """Return the columns of `rows`, bit for bit."""
    return {name: {row: torch.tensor(column[row]) for row in rows if row in column} for name, column in columns.items()}


def has_token_advantages(algo: AlgoConfig) -> bool:
    """Return whether the advantages of a row differ from its one number `TrainRow.reward`."""
    if algo.loss_type == "sft_loss":
        return False
    is_return = algo.advantage_estimator in ("reinforce_plus_plus", "ppo")
    return is_return or algo.kl_coef > 0 or algo.use_opd or bool(algo.normalize_advantages)


def needs_old_log_prob(plan: RoundPlan, algo: AlgoConfig, *, policy_moves: bool = True) -> bool:
    """Return whether a forward pass for the old (proximal) policy is needed. In a round of one step it is the policy
    itself, and in a round of the critic alone nothing is compared with it; then it is needed only if --kl-coef or
    --use-opd uses it for the advantages before the step begins. Imitation compares nothing but with
    --use-unbiased-kl."""
    num_steps = len(plan.steps) * algo.num_ppo_epochs
    is_compared = algo.loss_type != "sft_loss" or algo.use_unbiased_kl
    return (policy_moves and num_steps > 1 and is_compared) or algo.kl_coef > 0 or algo.use_opd


def advantage_columns(
    plan: RoundPlan,
    rows: Mapping[int, TrainRow],
    columns: Columns,
    *,
    algo: AlgoConfig,
    place: RankPlace,
    device: torch.device,
) -> Columns:
    """Return {ADVANTAGE: ...} when advantages differ by token, with RETURN when there is a critic, else {}. Collective
    over all trainer ranks, which agree on `algo`. Ranks for which `RankPlace.speaks` holds contribute their tokens to
    the moments of the whitening."""
    if not has_token_advantages(algo):
        return {}
    if VALUE in columns:
        columns = {**columns, **_critic_columns(rows, columns, algo=algo)}
    advantage: dict[int, Tensor] = {}
    for step in plan.steps:
        numbers = [row for batch in step.micro_batches[place.dp_rank] for row in batch] if place.holds_tokens else []
        of_step = {row: token_advantages(rows[row], row, columns, algo=algo) for row in numbers}
        if algo.normalize_advantages:
            masks = {row: torch.as_tensor(rows[row].loss_mask) > 0 for row in numbers}
            of_step = _whitened(of_step, masks, step, speaks=place.speaks, device=device)
        advantage.update(of_step)
    made = {ADVANTAGE: advantage} | ({RETURN: columns[RETURN]} if RETURN in columns else {})
    return {name: {row: made_R.float() for row, made_R in column.items()} for name, column in made.items()}


def token_advantages(row: TrainRow, number: int, columns: Columns, *, algo: AlgoConfig) -> Tensor:
    """Return [R] float64: the row's advantage at each of its tokens, before whitening."""
    advantage_R = _estimated(row, number, columns, algo=algo)
    if not algo.use_opd:
        return advantage_R
    teacher_logp_R = (
        columns[TEACHER_LOGP][number].double()
        if TEACHER_LOGP in columns
        else torch.as_tensor(row.extra["teacher_log_probs"], dtype=torch.float64)
    )
    old_logp_R = columns[OLD_LOGP][number].double()
    return distillation_advantages(advantage_R, old_logp_R, teacher_logp_R, coefficient=algo.opd_kl_coef)


def _estimated(row: TrainRow, number: int, columns: Columns, *, algo: AlgoConfig) -> Tensor:
    """Return the advantage by --advantage-estimator, with the KL penalty of --kl-coef."""
    if algo.advantage_estimator == "ppo":
        return columns[ADVANTAGE][number]
    penalty_R = _penalty(row, number, columns, algo=algo)
    if algo.advantage_estimator == "reinforce_plus_plus":
        mask_R = torch.as_tensor(row.loss_mask)
        return discounted_returns(row.reward, penalty_R, mask_R, gamma=algo.gamma)
    assert algo.kl_coef == 0 or algo.advantage_estimator in TOKEN_REWARD_ESTIMATORS, "check_algo refuses others"
    return penalised_advantages(row.reward, penalty_R)


def _critic_columns(rows: Mapping[int, TrainRow], columns: Columns, *, algo: AlgoConfig) -> Columns:
    """Return ADVANTAGE before whitening and RETURN of every row that has values, float64."""
    judged = {
        number: generalized_advantages(
            rows[number].reward,
            _penalty(rows[number], number, columns, algo=algo),
            value_R,
            torch.as_tensor(rows[number].loss_mask),
            gamma=algo.gamma,
            lambd=algo.lambd,
        )
        for number, value_R in columns[VALUE].items()
    }
    return {
        name: {number: pair[index] for number, pair in judged.items()} for index, name in enumerate((ADVANTAGE, RETURN))
    }


def _penalty(row: TrainRow, number: int, columns: Columns, *, algo: AlgoConfig) -> Tensor:
    """Return [R] float64: what --kl-coef subtracts from the reward of each token; k1, as `kl_estimate` derives."""
    if algo.kl_coef == 0:
        return torch.zeros(row.response_length, dtype=torch.float64)
    old_logp_R, ref_logp_R = columns[OLD_LOGP][number].double(), columns[REF_LOGP][number].double()
    return algo.kl_coef * kl_estimate(old_logp_R, ref_logp_R, "k1")


def staleness_columns(rollout_id: int, rows: Mapping[int, TrainRow], numbers: Sequence[int]) -> Columns:
    """Return, at a row's tokens, the versions between its oldest trainable token and the weights of the round (its
    number)."""
    return {
        STALENESS: {
            row: torch.full((rows[row].response_length,), float(max(0, rollout_id - rows[row].oldest_version)))
            for row in numbers
        }
    }


def sample_token_columns(step: StepPlan, rows: Mapping[int, TrainRow], numbers: Sequence[int]) -> Columns:
    """Return {SAMPLE_TOKENS: ...} of the rows `numbers` for `losses.reduce_loss`; {} where every sample of the step
    is one row, which divides by its own tokens."""
    if not step.sample_tokens:
        return {}
    of_sample = dict(step.sample_tokens)
    return {
        SAMPLE_TOKENS: {
            row: torch.full((rows[row].response_length,), of_sample.get(row, rows[row].num_trainable))
            for row in numbers
        }
    }


def _whitened(
    advantages: dict[int, Tensor],
    masks: Mapping[int, Tensor],
    step: StepPlan,
    *,
    speaks: bool,
    device: torch.device,
) -> dict[int, Tensor]:
    """Scale to mean 0 and variance 1 over the trainable tokens of the step. Collective over all trainer ranks."""
    count = max(step.num_tokens, 1)

    def step_sum(values: Mapping[int, Tensor]) -> Tensor:
        total = sum((float(value_R[masks[row]].sum()) for row, value_R in values.items()), 0.0) if speaks else 0.0
        summed = torch.tensor(total, dtype=torch.float64, device=device)
        dist.all_reduce(summed)
        return summed.cpu()

    mean = step_sum(advantages) / count
    variance = step_sum({row: (value_R - mean).square() for row, value_R in advantages.items()}) / count
    return {row: whiten(value_R, mean=mean, variance=variance) for row, value_R in advantages.items()}
