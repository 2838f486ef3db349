"""Every estimator and correction in plain torch, one answer at a time, written from the papers.

Nothing is imported from vime's formulas. `RECIPES` name the flags; `train_round` computes what they mean.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.helpers.reference_policy import TEMPERATURE, log_probs, response_values, run_steps
from tests.helpers.reference_ppo import Critic, advantages_and_returns, update_critic
from vime.data.rows import TrainRow
from vime.types import RoundPlan

LOW, HIGH, DUAL = 0.002, 0.004, 1.003  # narrow: a second step of this size must meet them
CLIPS = {"eps_clip": LOW, "eps_clip_high": HIGH}
LOSS_PATH = "tests.helpers.reference_algorithms.example_loss"
RECIPES: dict[str, dict[str, Any]] = {
    "three-passes": {**CLIPS, "num_ppo_epochs": 3},
    "gspo": {"advantage_estimator": "gspo", **CLIPS},
    "cispo": {"advantage_estimator": "cispo", **CLIPS},
    "rloo-dual-tis": {
        "advantage_estimator": "rloo", **CLIPS, "eps_clip_c": DUAL, "off_policy_correction": "tis", "tis_clip_low": 0.5,
    },
    "plus-plus": {"advantage_estimator": "reinforce_plus_plus", "kl_coef": 0.1, "gamma": 0.9},
    "plus-plus-baseline": {
        "advantage_estimator": "reinforce_plus_plus_baseline", "kl_coef": 0.1,
        "calculate_per_token_loss": True,
    },
    "grpo-normalised-decoupled": {
        **CLIPS, "normalize_advantages": True, "off_policy_correction": "decoupled", "tis_clip": 2.0,
        "get_mismatch_metrics": True,
    },
    "icepop-unbiased-kl": {
        "off_policy_correction": "icepop", "tis_clip": 2.0, "use_kl_loss": True, "kl_loss_coef": 0.1,
        "kl_loss_type": "k3", "use_unbiased_kl": True,
    },
    "mis": {
        "off_policy_correction": "mis", "mis_level": "geometric", "mis_mode": "truncate", "tis_clip": 2.0,
        "tis_clip_low": 0.4,
    },
    "engine-old-opsm": {"use_rollout_logprobs": True, "use_opsm": True, "opsm_delta": 1.0},
    "distilled": {"use_opd": True, "opd_kl_coef": 0.5, "advantage_estimator": "rloo"},
    "ppo": {
        "advantage_estimator": "ppo", **CLIPS, "kl_coef": 0.1, "gamma": 0.9, "lambd": 0.8,
        "critic_load": "critic", "critic_lr": 2e-4, "value_clip": 0.1,
    },
    "ppo-from-policy": {
        "advantage_estimator": "ppo", "lambd": 0.95, "normalize_advantages": False, "calculate_per_token_loss": True,
        "critic_load": "qwen2_tied", "critic_lr": 1e-3, "value_clip": math.inf, "num_ppo_epochs": 2,
    },
    "sft": {"loss_type": "sft_loss", "calculate_per_token_loss": True},
    "custom": {"loss_type": "custom_loss", "custom_loss_path": LOSS_PATH, "eps_clip": 0.2},
}  # fmt: skip
TIS_HIGH = 2.0


def example_loss(args: Any, logp_T: Tensor, entropy_T: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
    """What --custom-loss-path names in the recipe `custom`."""
    return -columns["advantage"] * (logp_T - columns["rollout_logp"]).clamp(max=1.0) - args.eps_clip * entropy_T


def train_round(
    model: torch.nn.Module,
    anchor: torch.nn.Module,
    rows: Sequence[TrainRow],
    plan: RoundPlan,
    flags: dict[str, Any],
    critic: Critic | None = None,
) -> list[dict[str, float]]:
    """Loss and norm of the policy's steps, and of the critic's under names that begin with `value_` and `critic_`."""
    plan = dataclasses.replace(plan, steps=plan.steps * flags.get("num_ppo_epochs", 1))
    old, ref = log_probs(model, rows, TEMPERATURE), log_probs(anchor, rows, TEMPERATURE)
    masks = [torch.tensor(row.loss_mask, dtype=torch.float32) for row in rows]
    engine = [torch.tensor(row.rollout_log_probs, dtype=torch.float32) for row in rows]
    values = [] if critic is None else [critic(row).detach() for row in rows]
    judged = [
        advantages_and_returns(
            row.reward, _penalty(old[i], ref[i], flags), values[i], masks[i], flags.get("gamma", 1.0), flags["lambd"]
        )
        for i, row in enumerate(rows if values else [])
    ]

    def step_loss(numbers: list[int]) -> Tensor:
        advantages = step_advantages(rows, numbers, old, ref, masks, judged, flags)
        tokens = sum(float(masks[row].sum()) for row in numbers)
        loss = torch.zeros(())
        for row in numbers:
            logp, entropy = response_values(model, rows[row], TEMPERATURE)
            value = row_loss(logp, entropy, old[row], ref[row], engine[row], advantages[row], masks[row], flags)
            total = (value * masks[row]).sum()
            per_token = flags.get("calculate_per_token_loss", False)
            loss = loss + (total / tokens if per_token else total / masks[row].sum() / len(numbers))
        return loss

    steps = run_steps(model, plan, step_loss)
    if critic is None:
        return steps
    taught = update_critic(critic, rows, plan, values, [target for _, target in judged], flags)
    return [
        {**step, "value_loss": more["loss"], "critic_grad_norm": more["grad_norm"]}
        for step, more in zip(steps, taught, strict=True)
    ]


def _penalty(old: Tensor, ref: Tensor, flags: dict) -> Tensor:
    return flags.get("kl_coef", 0.0) * (old - ref).double()


def step_advantages(
    rows: Sequence[TrainRow],
    numbers: list[int],
    old: list[Tensor],
    ref: list[Tensor],
    masks: list[Tensor],
    judged: list[tuple[Tensor, Tensor]],
    flags: dict,
) -> dict[int, Tensor]:
    estimator = flags.get("advantage_estimator", "grpo")
    found = {}
    for row in numbers:
        penalty = _penalty(old[row], ref[row], flags)
        if estimator == "ppo":
            found[row] = judged[row][0]
        elif estimator == "reinforce_plus_plus":
            reward = -penalty * masks[row]
            reward[int(masks[row].nonzero()[-1])] += rows[row].reward
            length, gamma = len(reward), flags["gamma"]
            powers = torch.tensor([[gamma ** (k - t) if k >= t else 0.0 for k in range(length)] for t in range(length)])
            found[row] = powers.double() @ reward
        else:
            found[row] = rows[row].reward - penalty
        if flags.get("use_opd"):
            teacher = torch.tensor(rows[row].extra["teacher_log_probs"], dtype=torch.float64)
            found[row] = found[row] + flags["opd_kl_coef"] * (teacher - old[row].double())
    if flags.get("normalize_advantages", estimator == "ppo" or estimator.startswith("reinforce")):
        whole = torch.cat([found[row][masks[row] > 0] for row in numbers])
        found = {row: (value - whole.mean()) / whole.std(unbiased=False) for row, value in found.items()}
    return {row: value.float() for row, value in found.items()}


def row_loss(
    logp: Tensor,
    entropy: Tensor,
    old: Tensor,
    ref: Tensor,
    engine: Tensor,
    advantage: Tensor,
    mask: Tensor,
    flags: dict,
) -> Tensor:
    if flags.get("loss_type") == "sft_loss":
        return -logp
    if flags.get("loss_type") == "custom_loss":
        return -advantage * (logp - engine).clamp(max=1.0) - 0.2 * entropy
    estimator, length = flags.get("advantage_estimator", "grpo"), mask.sum()
    low, high = 1 - flags.get("eps_clip", 0.2), 1 + flags.get("eps_clip_high", 0.2)
    base = engine if flags.get("use_rollout_logprobs") else old
    ratio = (logp - base).exp()
    if estimator == "gspo":
        ratio = (((logp - base) * mask).sum() / length).exp().expand(len(mask))
    value = -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
    if estimator == "cispo":
        value = -ratio.detach().clamp(low, high) * advantage * logp
    if "eps_clip_c" in flags:
        value = torch.where(advantage < 0, torch.minimum(value, -flags["eps_clip_c"] * advantage), value)
    weight = (old - engine).exp()
    match flags.get("off_policy_correction"):
        case "tis":
            weight = weight.clamp(flags["tis_clip_low"], TIS_HIGH)
        case "decoupled":
            weight = weight * (weight <= TIS_HIGH)
        case "icepop":
            weight = weight * ((weight <= TIS_HIGH) & (weight >= 1 / TIS_HIGH))
        case "mis":
            weight = (((old - engine) * mask).sum() / length).exp().clamp(flags["tis_clip_low"], TIS_HIGH)
        case _:
            weight = torch.ones_like(weight)
    value = value * weight
    if flags.get("use_opsm"):
        drift = ((engine - logp.detach()) * mask).sum() / length
        value = torch.where((advantage < 0) & (drift > flags["opsm_delta"]), torch.zeros_like(value), value)
    if flags.get("use_kl_loss"):
        kl = (ref - logp).exp() - 1 - (ref - logp)
        if flags.get("use_unbiased_kl"):
            kl = kl * (logp - old).exp() * weight
        value = value + flags["kl_loss_coef"] * kl
    return value
