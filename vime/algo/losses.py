"""Per-token losses. T: packed tokens. Reduction to one number is `reductions.reduce_loss`."""

from __future__ import annotations

import torch
from torch import Tensor


def policy_loss(
    logp_T: Tensor, old_logp_T: Tensor, advantage_T: Tensor, *, eps_clip: float, eps_clip_high: float
) -> tuple[Tensor, Tensor]:
    """Clipped policy-gradient loss of every token, and whether the clip decided it.

    PPO, Schulman et al. 2017, equation 7, with the two-sided range of DAPO (Yu et al. 2025, equation 8, clip-higher):
    ratio r = exp(logp - old_logp); loss = max(-r A, -clip(r, 1 - eps_clip, 1 + eps_clip_high) A).

    All inputs [T] floating point; `old_logp_T` and `advantage_T` are constants, gradients flow through `logp_T` only.
    Answers (loss [T], is_clipped [T] bool: the clipped term is strictly larger, so this token has no gradient). No
    denominator here. Example: r = 1.5, A = 1, range 0.2/0.2 -> max(-1.5, -1.2) = -1.2, clipped.
    """
    ratio_T = torch.exp(logp_T - old_logp_T.detach())
    advantage_T = advantage_T.detach()
    plain_T = -ratio_T * advantage_T
    clipped_T = -ratio_T.clamp(1.0 - eps_clip, 1.0 + eps_clip_high) * advantage_T
    return torch.maximum(plain_T, clipped_T), (clipped_T > plain_T).detach()
