"""Rewards to advantages. N: the samples of one prompt group."""

from __future__ import annotations

import torch
from torch import Tensor

from vime.types import RewardError

STD_EPSILON = 1e-6


def group_advantages(reward_N: Tensor, *, divide_by_std: bool) -> Tensor:
    """Reward minus its group's mean; divided by the group's standard deviation when asked.

    GRPO, Shao et al. 2024 (DeepSeekMath), section 4.1.2: A_i = (r_i - mean(r)) / (std(r) + 1e-6), std unbiased
    (denominator N - 1). Without the division it is Dr. GRPO (Liu et al. 2025, equation 2).

    `reward_N` holds the rewards of ONE group, floating point: a group never sees another group's rewards, so groups
    of unequal size need no padding. Computed in float64, answered in the dtype of `reward_N`. A group of one and a
    group of equal rewards give exactly 0, not a rounding residue divided by 1e-6. Example: (1, 0, 0, 1) -> deviations
    (.5, -.5, -.5, .5), std sqrt(1/3) = 0.57735, advantages +-0.866024.
    """
    if reward_N.ndim != 1 or reward_N.numel() == 0:
        raise ValueError(f"group_advantages: expected the rewards of one group, got shape {tuple(reward_N.shape)}")
    if not bool(torch.isfinite(reward_N).all()):
        raise RewardError(
            f"group_advantages: got rewards {reward_N.tolist()}; expected finite numbers. Fix the reward function."
        )
    if bool((reward_N == reward_N[0]).all()):
        return torch.zeros_like(reward_N)
    wide_N = reward_N.double()
    advantage_N = wide_N - wide_N.mean()
    if divide_by_std:
        advantage_N = advantage_N / (wide_N.std(unbiased=True) + STD_EPSILON)
    return advantage_N.to(reward_N.dtype)
