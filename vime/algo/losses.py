"""Per-token losses. T: packed tokens. Reduction to one number is `reductions.reduce_loss`.

Every policy loss takes the log ratio `logp - old_logp` (with its graph), so that the ratio of a token and the ratio of
a sequence (GSPO) share one clip. No function here has a denominator.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vime.algo.off_policy import LOG_RATIO_LIMIT
from vime.algo.reductions import row_means


def policy_loss(
    log_ratio_T: Tensor,
    advantage_T: Tensor,
    *,
    eps_clip: float,
    eps_clip_high: float,
    eps_clip_c: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the clipped policy-gradient loss of every token, and whether the token was clipped.

    PPO, Schulman et al. 2017, equation 7, with the two-sided range of DAPO (Yu et al. 2025, clip-higher):
    ratio r = exp(log_ratio); loss = max(-r A, -clip(r, 1 - eps_clip, 1 + eps_clip_high) A). With `eps_clip_c` = c > 1
    the dual clip of Ye et al. 2020 bounds the loss of a bad token that became far likelier: for A < 0
    loss = min(loss, -c A).

    Inputs [T] floating point; `advantage_T` is a constant, gradients flow through `log_ratio_T`. Returns (loss [T],
    is_clipped [T] bool: a clipped term is strictly the one taken, so this token has no gradient). A log ratio above
    `LOG_RATIO_LIMIT` counts as that limit, without a gradient: exp of more would overflow, and 0 times its gradient
    be nan where the clip decides. Example: r = 1.5,
    A = 1, range 0.2/0.2 -> max(-1.5, -1.2) = -1.2, clipped; r = 5, A = -1, c = 3 -> min(5, 3) = 3, clipped.
    """
    ratio_T = torch.exp(log_ratio_T.clamp(max=LOG_RATIO_LIMIT))
    advantage_T = advantage_T.detach()
    plain_T = -ratio_T * advantage_T
    clipped_T = -ratio_T.clamp(1.0 - eps_clip, 1.0 + eps_clip_high) * advantage_T
    loss_T, is_clipped_T = torch.maximum(plain_T, clipped_T), (clipped_T > plain_T).detach()
    if eps_clip_c is None:
        return loss_T, is_clipped_T
    bound_T = -eps_clip_c * advantage_T
    is_bounded_T = ((advantage_T < 0) & (loss_T > bound_T)).detach()
    return torch.where(is_bounded_T, bound_T, loss_T), is_clipped_T | is_bounded_T


def sequence_log_ratio(log_ratio_T: Tensor, mask_T: Tensor, row_slices: Sequence[slice]) -> Tensor:
    """Return at each token the log ratio of its completion: the mean over its trainable tokens; [T], with graph.

    GSPO, Zheng et al. 2025, importance ratio s_i = exp(1/|y_i| sum_t (logp_t - old_logp_t)). Then `policy_loss` gives
    the GSPO objective at every token, whose mean over the row is the row's loss. Positions outside of rows are 0; a
    row without trainable tokens is 0. Example: log ratios (ln 2, ln 8), both trainable -> (ln 4, ln 4).
    """
    return row_means(log_ratio_T, mask_T, row_slices)


def cispo_loss(
    log_ratio_T: Tensor, logp_T: Tensor, advantage_T: Tensor, *, eps_clip: float, eps_clip_high: float
) -> tuple[Tensor, Tensor]:
    """REINFORCE with a clipped importance weight that carries no gradient: every token keeps its gradient.

    CISPO, MiniMax-M1 2025: loss = -sg(clip(r, 1 - eps_clip, 1 + eps_clip_high)) A logp.

    All [T]; gradients flow through `logp_T` only. Returns (loss, is_clipped: the weight was cut). Example: r = 1.5,
    A = 2, logp = -1, range 0.2/0.2 -> -1.2 * 2 * -1 = 2.4, gradient towards logp -2.4, clipped.
    """
    ratio_T = torch.exp(log_ratio_T.detach())
    weight_T = ratio_T.clamp(1.0 - eps_clip, 1.0 + eps_clip_high)
    return -weight_T * advantage_T.detach() * logp_T, weight_T != ratio_T


def sft_loss(logp_T: Tensor) -> Tensor:
    """Return the cross entropy of a completion, -logp; [T]. Its masked mean is maximum likelihood training."""
    return -logp_T
