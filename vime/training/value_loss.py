"""The critic's loss of one packed micro-batch and the numbers that are reported about it. T: packed tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vime.algo.losses import reduce_loss
from vime.algo.values import explained_variance, value_loss
from vime.batching.pack import PackedBatch
from vime.training.columns import RETURN, SAMPLE_TOKENS, VALUE
from vime.types import StepPlan

VALUE_STATISTICS = ("value_loss", "value_clipfrac", "value_mean", "target", "target_square", "error", "error_square")
"""The vector that is summed over packs and ranks, in order. The first is reduced like the policy's loss; the others are
means over the trainable tokens of the step: of the value and the return (target), and of return minus value."""


@dataclass(frozen=True, slots=True)
class ValueLoss:
    """`protocols.PackLoss` of a model with a value head; denominators as in `policy_loss.PolicyLoss`.

    The columns VALUE (at the start of the round, used for the advantages) and RETURN are constants.
    """

    step: StepPlan
    value_clip: float
    per_token: bool

    def __call__(self, value_T: Tensor, entropy_T: Tensor, batch: PackedBatch) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """Return (loss scalar with graph, statistics [S] float64 in the order of VALUE_STATISTICS). Entropies are
        unused."""
        old_value_T, return_T = batch.extra_T[VALUE], batch.extra_T[RETURN]
        loss_T, is_clipped_T = value_loss(value_T, old_value_T, return_T, value_clip=self.value_clip)
        loss = reduce_loss(
            loss_T,
            batch.mask_T,
            batch.row_slices,
            per_token=self.per_token,
            num_samples=self.step.num_samples,
            num_tokens=self.step.num_tokens,
            sample_tokens_T=batch.extra_T.get(SAMPLE_TOKENS),
        )
        target_T, error_T = return_T.double(), (return_T - old_value_T).double()
        means = (is_clipped_T, old_value_T, target_T, target_T.square(), error_T, error_T.square())
        shares = (loss.detach().double(), *(self._token_mean(value_T, batch) for value_T in means))
        return loss, torch.stack(shares)

    def _token_mean(self, value_T: Tensor, batch: PackedBatch) -> Tensor:
        """Return this pack's share of the mean over the trainable tokens of the step."""
        return torch.where(batch.mask_T > 0, value_T.double(), 0.0).sum() / max(self.step.num_tokens, 1)


def value_metrics(totals: Sequence[float]) -> dict[str, float]:
    """Return the metrics of one step of the critic from the sums over all packs and ranks; the same on every rank.

    The explained variance is left out of a step whose returns are all equal.
    """
    named = dict(zip(VALUE_STATISTICS, totals, strict=True))
    metrics = {f"train/{name}": named[name] for name in ("value_loss", "value_clipfrac", "value_mean")}
    moments = {name: named[name] for name in ("target", "target_square", "error", "error_square")}
    explained = explained_variance(**moments)
    return (
        metrics
        | {"train/return_mean": named["target"]}
        | ({} if math.isnan(explained) else {"train/explained_variance": explained})
    )
