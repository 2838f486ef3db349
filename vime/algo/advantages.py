"""Rewards to advantages. N: the samples of one prompt group, R: response tokens of one row.

Group formulas run where rewards are converted (one group at a time); token formulas run in the trainer, where the
log-probabilities of the reference are known.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vime.types import RewardError

STD_EPSILON = 1e-6
WHITEN_EPSILON = 1e-8
TOKEN_REWARD_ESTIMATORS = ("reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo")
"""Estimators with a KL penalty in the reward of each token (--kl-coef)."""


def group_signal(reward_N: Tensor, *, estimator: str, divide_by_std: bool) -> Tensor:
    """Turn one group's rewards into what the trainer gets, by --advantage-estimator; [N].

    reinforce_plus_plus and ppo have no group baseline: their rewards stay as they are.
    """
    if estimator == "rloo":
        return leave_one_out_advantages(reward_N)
    if estimator in ("reinforce_plus_plus", "ppo"):
        _check_group(reward_N, "group_signal")
        return reward_N
    return group_advantages(reward_N, divide_by_std=divide_by_std and estimator != "reinforce_plus_plus_baseline")


def group_advantages(reward_N: Tensor, *, divide_by_std: bool) -> Tensor:
    """Reward minus its group's mean; divided by the group's standard deviation when asked.

    GRPO, Shao et al. 2024 (DeepSeekMath), section 4.1.2: A_i = (r_i - mean(r)) / (std(r) + 1e-6), std unbiased
    (denominator N - 1). Without the division it is Dr. GRPO (Liu et al. 2025).

    `reward_N` holds the rewards of ONE group, floating point: a group never sees another group's rewards, so groups
    of unequal size need no padding. Computed in float64, returned in the dtype of `reward_N`. A group of one and a
    group of equal rewards give exactly 0, not a rounding residue divided by 1e-6. Example: (1, 0, 0, 1) -> deviations
    (.5, -.5, -.5, .5), std sqrt(1/3) = 0.57735, advantages +-0.866024.
    """
    _check_group(reward_N, "group_advantages")
    if bool((reward_N == reward_N[0]).all()):
        return torch.zeros_like(reward_N)
    wide_N = reward_N.double()
    advantage_N = wide_N - wide_N.mean()
    if divide_by_std:
        advantage_N = advantage_N / (wide_N.std(unbiased=True) + STD_EPSILON)
    return advantage_N.to(reward_N.dtype)


def leave_one_out_advantages(reward_N: Tensor) -> Tensor:
    """Reward minus the mean reward of the OTHER samples of its group.

    RLOO, Ahmadian et al. 2024 ("Back to Basics"), the RLOO estimator after Kool et al. 2019: A_i = r_i - sum_{j != i}
    r_j / (N - 1), which is N / (N - 1) times the deviation from the group's mean. Dtypes and the cases of one sample
    and of equal rewards (exactly 0) as in `group_advantages`. Example: (1, 0, 0, 1) -> 1 - 1/3 = 2/3 and 0 - 2/3 =
    -2/3.
    """
    _check_group(reward_N, "leave_one_out_advantages")
    if bool((reward_N == reward_N[0]).all()):
        return torch.zeros_like(reward_N)
    wide_N = reward_N.double()
    size = reward_N.numel()
    return ((wide_N - wide_N.mean()) * size / (size - 1)).to(reward_N.dtype)


def discounted_returns(reward: float, penalty_R: Tensor, mask_R: Tensor, *, gamma: float) -> Tensor:
    """Return the discounted return of each response token when the reward is paid at its last trainable token.

    REINFORCE++, Hu et al. 2025 (arXiv 2501.03262), token-level KL penalty: token reward r_t = [t is last] reward -
    penalty_t, with penalty_t = kl_coef * KL_t; return G_t = sum over k >= t of gamma^(k - t) r_k. Whitening over the
    step comes after (`whiten`).

    `penalty_R` and `mask_R` are [R], float64 recommended; a token with mask 0 has no reward and no penalty, but it
    counts as one step of the discount. Returns [R] in the dtype of `penalty_R`. Without a trainable token all 0. No
    denominator. Example: reward 1, penalties (.1, .2, .3), gamma .5 -> from the end: 1 - .3 = .7;
    -.2 + .35 = .15; -.1 + .075 = -.025.
    """
    is_trainable_R = mask_R > 0
    if not bool(is_trainable_R.any()):
        return torch.zeros_like(penalty_R)
    rewards = torch.where(is_trainable_R, -penalty_R, 0.0).tolist()
    rewards[int(is_trainable_R.nonzero()[-1])] += reward
    returns, following = [], 0.0
    for token_reward in reversed(rewards):
        following = token_reward + gamma * following
        returns.append(following)
    return torch.tensor(returns[::-1], dtype=penalty_R.dtype)


def penalised_advantages(advantage: float, penalty_R: Tensor) -> Tensor:
    """Return the group advantage minus the KL penalty of each token itself: A_t = A - kl_coef * KL_t; [R].

    REINFORCE++ with baseline, Hu et al. 2025 (arXiv 2501.03262): mean of the group subtracted, then whitened over the
    step. No denominator; dtype of `penalty_R`. Example: A = 0.5, penalties (.1, 0) -> (.4, .5).
    """
    return advantage - penalty_R


def distillation_advantages(
    advantage_R: Tensor, logp_R: Tensor, teacher_logp_R: Tensor, *, coefficient: float
) -> Tensor:
    """Pull each token of a completion towards a teacher: A_t - coefficient * (logp_t - teacher_logp_t); [R].

    On-policy distillation, Agarwal et al. 2024 (GKD) with the reverse KL, in the advantage as in Lu 2025 ("On-Policy
    Distillation"): the one-sample estimate (k1) of KL(policy || teacher) is a penalty of the token itself. Both
    log-probabilities are constants, at the sampling temperature; a teacher that finds the token likelier raises its
    advantage. No denominator. Example: A = 0, logp = ln .5, teacher ln .25, coefficient 1 -> -ln 2.
    """
    return advantage_R - coefficient * (logp_R - teacher_logp_R)


def whiten(value_R: Tensor, *, mean: Tensor, variance: Tensor) -> Tensor:
    """Return (value - mean) / (sqrt(variance) + 1e-8).

    Global advantage normalisation of REINFORCE++, Hu et al. 2025 (arXiv 2501.03262). The moments are those of ALL
    trainable tokens of the optimizer step over all ranks (denominator `StepPlan.num_tokens`, not minus one); the caller
    sums them, so that no layout changes them.
    """
    return (value_R - mean) / (variance.sqrt() + WHITEN_EPSILON)


def _check_group(reward_N: Tensor, name: str) -> None:
    if reward_N.ndim != 1 or reward_N.numel() == 0:
        raise ValueError(f"{name}: expected the rewards of one group, got shape {tuple(reward_N.shape)}")
    if not bool(torch.isfinite(reward_N).all()):
        raise RewardError(f"{name}: got rewards {reward_N.tolist()}; expected finite numbers. Fix the reward function.")
