"""The numbers reported about an optimizer step: sums over packs and ranks, then made into metrics."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vime.algo.kl import kl_estimate
from vime.algo.losses import effective_sample_size, ratio

SHARES = (
    "loss", "kl_loss", "entropy", "pg_clipfrac", "ppo_kl", "tis_clipfrac",
    "opsm_maskfrac",
)  # fmt: skip
"""Parts of step means. The first three are reduced like the loss (so loss = policy term + kl_loss_coef * kl_loss -
entropy_coef * entropy); the others are means over the trainable tokens of the step."""
NUM_LIKE_LOSS = 3
MISMATCH = ("mismatch_kl", "mismatch_k3_kl", "mismatch_chi2", "mismatch_train_nll", "mismatch_rollout_nll")
"""Means over trainable tokens, of --get-mismatch-metrics: KL(engine || trainer) by k1 and k3, chi-squared divergence
(mean of the squared ratio, minus 1), and mean -logp under either."""
BUCKETS = ("0", "1", "2", "3", "4_7", "8_up")
"""Staleness of a row in versions: clip fraction, ESS and KL are reported for each of these buckets."""
BUCKET_STARTS = (0, 1, 2, 3, 4, 8)
BUCKET_SUMS = ("count", "weight", "square", "clipped", "kl")
"""Sums over the trainable tokens of each bucket: tokens, policy / engine ratios and their squares, clipped tokens, and
k3 estimates of KL(engine || policy)."""
STATISTICS = (*SHARES, *MISMATCH, *(f"{name}/{bucket}" for bucket in BUCKETS for name in BUCKET_SUMS))
"""The vector that is summed over packs and ranks, in order."""


def rescale(*, of_loss: float, of_tokens: float) -> list[float]:
    """Return factors for STATISTICS when the denominators change by which the shares were divided: the loss's own, and
    the trainable tokens of the step. Sums have none."""
    shares = [of_loss if at < NUM_LIKE_LOSS else of_tokens for at in range(len(SHARES))]
    return shares + [of_tokens] * len(MISMATCH) + [1.0] * (len(BUCKETS) * len(BUCKET_SUMS))


def mismatch_values(old_logp_T: Tensor, rollout_logp_T: Tensor) -> list[Tensor]:
    """Return [T] float64 of each name in MISMATCH. `old_logp_T`: the trainer's policy at the start of the round."""
    old_logp_T, rollout_logp_T = old_logp_T.detach().double(), rollout_logp_T.double()
    ratio_T = ratio(old_logp_T - rollout_logp_T)
    return [
        rollout_logp_T - old_logp_T,
        _k3(old_logp_T, rollout_logp_T),
        ratio_T.square() - 1,
        -old_logp_T,
        -rollout_logp_T,
    ]


def bucket_sums(
    logp_T: Tensor, rollout_logp_T: Tensor, is_clipped_T: Tensor, staleness_T: Tensor, mask_T: Tensor
) -> Tensor:
    """Return [BUCKETS x BUCKET_SUMS] float64, flat."""
    logp_T, rollout_logp_T = logp_T.detach().double(), rollout_logp_T.double()
    weight_T = ratio(logp_T - rollout_logp_T)
    is_clipped_T = is_clipped_T.double()
    values = [torch.ones_like(weight_T), weight_T, weight_T.square(), is_clipped_T, _k3(logp_T, rollout_logp_T)]
    starts = torch.tensor(BUCKET_STARTS, dtype=staleness_T.dtype, device=staleness_T.device)
    bucket_T = torch.bucketize(staleness_T, starts, right=True) - 1
    is_member_BT = bucket_T == torch.arange(len(BUCKETS), device=bucket_T.device).unsqueeze(1)
    counted_VT = torch.where(mask_T > 0, torch.stack(values), 0.0)
    return (is_member_BT.double() @ counted_VT.T).flatten()


def to_metrics(totals: Sequence[float], *, with_mismatch: bool, is_sampled: bool = True) -> dict[str, float]:
    """Return the metrics of one step from the sums over all packs and ranks. Every rank gets the same names.

    `is_sampled`: an engine gave the log-probabilities that ESS and the buckets compare with (not so in imitation).
    Buckets that hold no token are left out, and so is a lone bucket 0: it is the whole step.
    """
    named = dict(zip(STATISTICS, totals, strict=True))
    metrics = {f"train/{name}": named[name] for name in (*SHARES, *(MISMATCH if with_mismatch else ()))}
    if with_mismatch:
        metrics["train/mismatch_ppl_ratio"] = float(
            torch.tensor(named["mismatch_train_nll"] - named["mismatch_rollout_nll"], dtype=torch.float64).exp()
        )
    if not is_sampled:
        return metrics
    whole = {name: sum(named[f"{name}/{bucket}"] for bucket in BUCKETS) for name in BUCKET_SUMS}
    if whole["count"]:
        metrics["train/ess"] = effective_sample_size(whole["weight"], whole["square"], whole["count"])
    filled = [bucket for bucket in BUCKETS if named[f"count/{bucket}"]]
    for bucket in filled if filled != [BUCKETS[0]] else []:
        count, weight, square, clipped, kl = (named[f"{name}/{bucket}"] for name in BUCKET_SUMS)
        metrics[f"train/ess/staleness_{bucket}"] = effective_sample_size(weight, square, count)
        metrics[f"train/pg_clipfrac/staleness_{bucket}"] = clipped / count
        metrics[f"train/rollout_kl/staleness_{bucket}"] = kl / count
        metrics[f"train/token_share/staleness_{bucket}"] = count / whole["count"]
    return metrics


def _k3(logp_T: Tensor, rollout_logp_T: Tensor) -> Tensor:
    """Return the k3 estimate of KL(engine || trainer) at tokens that the engine sampled: x = rollout - logp, clamped
    like a ratio."""
    difference_T = (rollout_logp_T - logp_T).clamp(-20.0, 20.0)
    return kl_estimate(difference_T, torch.zeros_like(difference_T), "k3")
