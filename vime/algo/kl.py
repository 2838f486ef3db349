"""Estimators of the KL divergence from a reference policy, one value per token. T: packed tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from vime.algo.losses import LOG_RATIO_LIMIT
from vime.types import ConfigError

KL_KINDS = ("k1", "k2", "k3", "low_var_kl")
LOW_VAR_KL_LIMIT = 10.0


def kl_estimate(logp_T: Tensor, ref_logp_T: Tensor, kind: str) -> Tensor:
    """Estimate KL(policy || reference) at each sampled token, with x = logp - ref_logp.

    Schulman 2020, "Approximating KL divergence": k1 = x (unbiased, noisy); k2 = x^2 / 2 (biased, low variance);
    k3 = exp(-x) - 1 + x (unbiased, never negative). low_var_kl = k3 clamped to +-10, as in GRPO (Shao et al. 2024,
    equation 4) with the usual guard against a reference probability near 0.

    A good estimate of the value is not one of the gradient. With p the policy, q the reference, p(y) the probability
    of a sampled token y and E over y ~ p, E[grad log p] = 0, so grad KL(p || q) = E[log(p / q) grad log p]. What an
    estimate f(x) adds to the gradient (Tang and Munos 2025, arXiv 2506.09477; Liu et al. 2025, arXiv 2510.01555):
    as a penalty in the reward, a constant that weighs grad log p, E[f(x) grad log p]: k1 exactly grad KL(p || q); k3
    E[(q / p - 1 + x) grad log p] = grad KL(p || q) - grad KL(q || p), which near the reference is almost nothing, and
    k2 as little. So `--kl-coef` takes k1 (`--kl-loss-type` does not change it).
    as a term of the loss, differentiated itself, E[f'(x) grad log p]: k1 E[grad log p] = 0, so it is refused there;
    k2 exactly grad KL(p || q); k3 E[(1 - q / p) grad log p] = grad KL(q || p), the other direction. `unbiased_kl`
    gives grad KL(p || q) with any unbiased estimate (k1, k3).

    Inputs and result [T], floating point, in the dtype of the inputs; gradients flow through `logp_T`. No denominator.
    Example: x = ln 2 gives k1 = 0.6931, k2 = 0.2402, k3 = 0.5 - 1 + 0.6931 = 0.1931.
    """
    difference_T = logp_T - ref_logp_T.detach()
    if kind == "k1":
        return difference_T
    if kind == "k2":
        return difference_T.square() / 2
    if kind not in KL_KINDS:
        raise ConfigError(f"--kl-loss-type: got {kind!r}, expected one of {', '.join(KL_KINDS)}.")
    if (
        kind == "low_var_kl"
    ):  # k3 is above its limit from |x| = 11 on; exp of more would overflow and its gradient be nan
        difference_T = difference_T.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    k3_T = torch.exp(-difference_T) - 1 + difference_T
    return k3_T.clamp(-LOW_VAR_KL_LIMIT, LOW_VAR_KL_LIMIT) if kind == "low_var_kl" else k3_T


def unbiased_kl(kl_T: Tensor, log_ratio_T: Tensor, weight_T: Tensor | None = None) -> Tensor:
    """Return the KL estimate times the importance ratio exp(logp - old_logp), with the graph of both; [T].

    DeepSeek-V3.2 2025, unbiased KL estimate: tokens were sampled by another policy, and the ratio to it makes the
    estimate and its GRADIENT unbiased under the present one; also at ratio 1, where the value is unchanged, the
    gradient is not. Tokens that the engine sampled with older weights, or other arithmetic, need the constant
    `weight_T` of the policy term, old / engine: both factors are the ratio to the engine, truncated as for the policy
    term. A log ratio above `LOG_RATIO_LIMIT` counts as that limit, as in `losses.policy_loss`.
    Example: kl 0.2, ratio 1.5 -> 0.3; with weight 0.5 -> 0.15.
    """
    weighted_T = kl_T * torch.exp(log_ratio_T.clamp(max=LOG_RATIO_LIMIT))
    return weighted_T if weight_T is None else weighted_T * weight_T
