"""The formulas of the policy loss. T: packed tokens.

Per-token losses: each takes the log ratio `logp - old_logp` (with its graph), so that the ratio of a token and the
ratio of a sequence (GSPO) share one clip. They have no denominator.

Corrections for tokens that another policy sampled. Three policies: `behaviour` (the engine that sampled, its own
log-probabilities), `proximal` (the trainer's weights at the start of the round) and the policy in training. Ratios to
the proximal policy are clipped in the losses; the weights are proximal / behaviour, constants that multiply the policy
loss of a token. They return (weight [T], is_changed [T]: the weight is not the plain ratio). No denominators.

`reduce_loss` makes one number from many tokens, with denominators that are global to the optimizer step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vime.types import ConfigError

LOG_RATIO_LIMIT = 20.0
"""Log ratios are cut at +-20 before exp (e^20 = 4.9e8), so that no weight and no square of one overflows."""


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


def ratio(log_ratio_T: Tensor) -> Tensor:
    """Return exp of a log ratio, safe from overflow; a constant."""
    return torch.exp(log_ratio_T.detach().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


def truncated_weight(log_ratio_T: Tensor, *, low: float, high: float) -> tuple[Tensor, Tensor]:
    """TIS: w = clamp(proximal / behaviour, low, high).

    Truncated importance sampling, Ionides 2008; between engine and trainer: Yao et al. 2025, "Your Efficient RL
    Framework Secretly Brings You Off-Policy RL Training". Example: ratios (.5, 1, 4), range 0..2 -> (.5, 1, 2).
    """
    plain_T = ratio(log_ratio_T)
    weight_T = plain_T.clamp(low, high)
    return weight_T, weight_T != plain_T


def kept_weight(log_ratio_T: Tensor, *, low: float, high: float) -> tuple[Tensor, Tensor]:
    """IcePop: w = proximal / behaviour inside [low, high], and 0 outside: such a token has no gradient.

    Ling team 2025, "Every Step Evolves", the calibration function M(k; low, high). Tokens left out stay in the
    denominators. Example: ratios (.4, 1, 4), range .5..2 -> (0, 1, 0).
    """
    plain_T = ratio(log_ratio_T)
    is_outside_T = (plain_T < low) | (plain_T > high)
    return plain_T.masked_fill(is_outside_T, 0.0), is_outside_T


def decoupled_weight(log_ratio_T: Tensor, *, cap: float) -> tuple[Tensor, Tensor]:
    """Decoupled PPO: w = proximal / behaviour, and 0 above `cap`.

    Hilton et al. 2022, "Batch size-invariance for policy optimization", decoupled objective; AReaL (Fu et al. 2025,
    arXiv 2505.24298) with the cap of its implementation, without which a few tokens dominate the gradient.
    Example: cap 2, ratios (.1, 1, 4) -> (.1, 1, 0).
    """
    return kept_weight(log_ratio_T, low=0.0, high=cap)


def multi_level_weight(
    log_ratio_T: Tensor,
    mask_T: Tensor,
    row_slices: Sequence[slice],
    *,
    level: str,
    mode: str,
    low: float,
    high: float,
) -> tuple[Tensor, Tensor]:
    """MIS: a weight for a token, for its whole completion, or the geometric mean over it; then truncated or masked.

    Liu et al. 2025, "When Speed Kills Stability" (truncated and masked importance sampling): level token w = exp(x_t),
    sequence w = exp(sum_t x_t), geometric w = exp(mean_t x_t), sums over the trainable tokens of the row; mode truncate
    as in `truncated_weight`, mode mask as in `kept_weight`. Example: ratios (2, 8) of one row: token (2, 8), sequence
    (16, 16), geometric (4, 4).
    """
    if level == "sequence":
        log_ratio_T = row_sums(log_ratio_T, mask_T, row_slices)
    elif level == "geometric":
        log_ratio_T = row_means(log_ratio_T, mask_T, row_slices)
    elif level != "token":
        raise ConfigError(f"--mis-level: got {level!r}, expected token, sequence or geometric.")
    cut = truncated_weight if mode == "truncate" else kept_weight
    return cut(log_ratio_T, low=low, high=high)


def off_policy_sequence_mask(
    logp_T: Tensor,
    behaviour_logp_T: Tensor,
    advantage_T: Tensor,
    mask_T: Tensor,
    row_slices: Sequence[slice],
    *,
    delta: float,
) -> Tensor:
    """OPSM: True at tokens to leave out: those of negative advantage in a completion that drifted by more than `delta`.

    DeepSeek-V3.2 2025, off-policy sequence masking: drift = mean over the completion of log(behaviour / policy), in
    nats a token. The denominators of the loss stay as they are. Example: behaviour (.5, .5), policy (.25, .5): drift
    ln 2 / 2 = 0.347; left out at delta 0.1 when A < 0, kept when A > 0.
    """
    drift_T = row_means((behaviour_logp_T - logp_T).detach(), mask_T, row_slices)
    return (drift_T > delta) & (advantage_T < 0)


def effective_sample_size(weight_sum: float, square_sum: float, count: float) -> float:
    """Return the ESS as a share of the tokens: (sum w)^2 / (n sum w^2), Kong 1992. In (0, 1]; 1 when all weights are
    equal; nan without tokens. Example: weights (1, 1, 2) -> 16 / (3 * 6) = 0.889.
    """
    return weight_sum**2 / (count * square_sum) if count > 0 and square_sum > 0 else float("nan")


def reduce_loss(
    value_T: Tensor,
    mask_T: Tensor,
    row_slices: Sequence[slice],
    *,
    per_token: bool,
    num_samples: int,
    num_tokens: int,
    sample_tokens_T: Tensor | None = None,
) -> Tensor:
    """Return this pack's share of the step's mean: a scalar, float32.

    Default: for each sample the mean over its masked tokens, summed over the samples, divided by `num_samples`.
    `per_token`: the sum over masked tokens, divided by `num_tokens`. (GRPO, Shao et al. 2024, equation 3, and the
    token-level loss of DAPO, Yu et al. 2025.)

    A sample is one row, unless `sample_tokens_T` says otherwise: at the positions of each row the masked tokens of its
    sample, over all of the sample's rows, wherever they are. Then a row gives its sum divided by that number.

    `value_T` and `mask_T` are [T] (mask 1 = counts; any dtype), `row_slices` are the positions of each row. Both
    denominators count the WHOLE optimizer step, over all ranks and micro-batches, so the sum of the results over all
    packs is the step's value, on any packing; code that averages over ranks afterwards must undo that. A row without
    masked tokens contributes 0 and still counts in `num_samples`. A step with none gives 0. Values where the mask
    is 0 are never read, so they may be inf or nan. The result is part of the graph even for an empty pack: every rank
    can call backward. Example: rows with values (1, 3) and (5,), num_samples 2, num_tokens 3: (2 + 5) / 2 = 3.5, or
    9 / 3 = 3 per token; both of one sample, num_samples 1: 4 / 3 + 5 / 3 = 3.
    """
    counts_T = mask_T > 0
    value_T = torch.where(counts_T, value_T.float(), 0.0)
    if per_token:
        return value_T.sum() / max(num_tokens, 1)
    total = value_T[:0].sum()
    for row in row_slices:
        divisor = counts_T[row].sum() if sample_tokens_T is None else sample_tokens_T[row.start]
        total = total + value_T[row].sum() / divisor.clamp(min=1)
    return total / max(num_samples, 1)


def row_sums(value_T: Tensor, mask_T: Tensor, row_slices: Sequence[slice]) -> Tensor:
    """Return at each token the sum of `value_T` over the masked tokens of its row; [T], 0 outside of rows, with graph.

    Values where the mask is 0 are never read. Example: rows with values (1, 3) and (5,) -> (4, 4, 5).
    """
    return _per_row(value_T, mask_T, row_slices)[0]


def row_means(value_T: Tensor, mask_T: Tensor, row_slices: Sequence[slice]) -> Tensor:
    """Return `row_sums` divided by the row's masked tokens; a row without any is 0. Example: as there -> (2, 2, 5)."""
    sum_T, count_T = _per_row(value_T, mask_T, row_slices)
    return sum_T / count_T.clamp(min=1)


def _per_row(value_T: Tensor, mask_T: Tensor, row_slices: Sequence[slice]) -> tuple[Tensor, Tensor]:
    """Return at each token (sum, count) of its row's masked tokens; 0 outside. Rows are ascending and disjoint.

    It expands and concatenates: unlike scattered adds, this has one order of summation on every device.
    """
    counts_T = mask_T > 0
    value_T = torch.where(counts_T, value_T, 0.0)
    if not row_slices:  # zeros with a graph: a rank with nothing to do calls backward like its peers
        return 0.0 * value_T, 0.0 * value_T.detach()
    sums, counts, end = [], [], 0
    for positions in row_slices:
        gap, length = value_T.new_zeros(positions.start - end), positions.stop - positions.start
        sums += [gap, value_T[positions].sum().expand(length)]
        counts += [gap, counts_T[positions].sum().to(value_T.dtype).expand(length)]
        end = positions.stop
    gap = value_T.new_zeros(value_T.numel() - end)
    return torch.cat([*sums, gap]), torch.cat([*counts, gap])
