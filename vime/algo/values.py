"""The formulas of a critic: advantages from predicted returns, and its loss (--advantage-estimator ppo).

R: response tokens of one row, T: packed tokens. The value at a token is the return predicted BEFORE that token is
chosen, from the prompt and the tokens ahead of it.
"""

from __future__ import annotations

import torch
from torch import Tensor


def generalized_advantages(
    reward: float, penalty_R: Tensor, value_R: Tensor, mask_R: Tensor, *, gamma: float, lambd: float
) -> tuple[Tensor, Tensor]:
    """Return (advantage, return) of each response token, both [R] float64.

    GAE, Schulman et al. 2016 (arXiv 1506.02438), equation 16, over the trainable tokens t of one completion: token
    reward r_t = [t is last] reward - penalty_t; delta_t = r_t + gamma V_{t+1} - V_t, where V after the last token is 0;
    A_t = delta_t + gamma lambd A_{t+1}; return_t = A_t + V_t, the critic's target.

    Tokens with mask 0 (tool output) are no decisions: the recursion skips them, so neither their values nor their
    penalties are read, they cost no discount, and their advantage and return are 0. Without a trainable token all 0. No
    denominator. Example: reward 1, no penalty, values (.5, .6), gamma 1, lambd .5: A = 1 - .6 = .4 at the last token,
    (.6 - .5) + .5 * .4 = .3 before it; returns (.8, 1).
    """
    trainable = (mask_R > 0).nonzero().flatten().tolist()
    advantage_R = torch.zeros(len(mask_R), dtype=torch.float64)
    return_R = torch.zeros_like(advantage_R)
    penalties, values = penalty_R.double().tolist(), value_R.double().tolist()
    pending, next_value, next_advantage = reward, 0.0, 0.0
    for token in reversed(trainable):
        delta = pending - penalties[token] + gamma * next_value - values[token]
        next_advantage = delta + gamma * lambd * next_advantage
        pending, next_value = 0.0, values[token]
        advantage_R[token], return_R[token] = next_advantage, next_advantage + next_value
    return advantage_R, return_R


def value_loss(value_T: Tensor, old_value_T: Tensor, return_T: Tensor, *, value_clip: float) -> tuple[Tensor, Tensor]:
    """Return the squared error of every token, clipped around the old value, and whether it was clipped.

    loss = 0.5 max((v - R)^2, (clamp(v, v_old - value_clip, v_old + value_clip) - R)^2). Schulman et al. 2017 (PPO) take
    the squared error; the clipped form is that of its published implementation, which others use too. An infinite
    `value_clip` is the plain squared error.

    All [T] floating point; `old_value_T` (at the start of the round) and `return_T` are constants, gradients flow
    through `value_T`. Returns (loss, is_clipped: the clipped term is strictly the one taken, so this token has no
    gradient). No denominator. Example: v 1, v_old 0, R 2, clip .2: 0.5 max(1, 1.8^2) = 1.62, clipped.
    """
    old_value_T, return_T = old_value_T.detach(), return_T.detach()
    plain_T = (value_T - return_T).square()
    bounded_T = value_T.clamp(old_value_T - value_clip, old_value_T + value_clip)
    clipped_T = (bounded_T - return_T).square()
    return 0.5 * torch.maximum(plain_T, clipped_T), (clipped_T > plain_T).detach()


def explained_variance(*, target: float, target_square: float, error: float, error_square: float) -> float:
    """Return 1 - Var(R - V) / Var(R) from means over tokens of R, R^2, R - V and (R - V)^2.

    1: every return was predicted; 0: no better than a constant; nan when all returns are equal. Example: returns (0, 2)
    and values (.5, 1.5): R means 1 and 2, errors (-.5, .5) means 0 and .25: 1 - .25 / 1 = .75.
    """
    variance = target_square - target**2
    if variance <= 1e-12 * max(target_square, 1e-12):
        return float("nan")
    return 1 - (error_square - error**2) / variance
