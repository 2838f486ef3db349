"""Corrections for tokens that another policy sampled. T: packed tokens.

Three policies: `behaviour` (the engine that sampled, its own log-probabilities), `proximal` (the trainer's weights at
the start of the round) and the policy in training. Ratios to the proximal policy are clipped in `losses`; the weights
here are proximal / behaviour, constants that multiply the policy loss of a token. They return (weight [T], is_changed
[T]: the weight is not the plain ratio). No denominators.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vime.algo.reductions import row_means, row_sums
from vime.types import ConfigError

LOG_RATIO_LIMIT = 20.0
"""Log ratios are cut at +-20 before exp (e^20 = 4.9e8), so that no weight and no square of one overflows."""


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
