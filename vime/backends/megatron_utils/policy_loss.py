"""The loss of one packed micro-batch and the numbers that are reported about it. T: packed tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vime.algo.kl import kl_estimate
from vime.algo.losses import policy_loss
from vime.algo.reductions import reduce_loss
from vime.batching.pack import PackedBatch
from vime.config.training import AlgoConfig
from vime.types import StepPlan

OLD_LOGP, REF_LOGP = "old_logp", "ref_logp"
STATISTICS = ("loss", "kl_loss", "entropy", "pg_clipfrac", "ppo_kl", "train_rollout_logprob_abs_diff")
"""What `PolicyLoss` answers, in order. The first three are reduced like the loss (so loss = policy term + kl_loss_coef
* kl_loss - entropy_coef * entropy); the others are means over the trainable tokens of the step."""


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """GRPO's clipped loss with KL and entropy terms, as a share of the step's loss.

    Denominators are the step's, over all ranks and micro-batches (`StepPlan.num_samples`, `num_tokens`); see
    `reductions.reduce_loss`. The old policy of a token is the one the round began with: the column `OLD_LOGP`, or, when
    there is none because the round is one step, the policy itself.
    """

    algo: AlgoConfig
    step: StepPlan

    def __call__(self, logp_T: Tensor, entropy_T: Tensor, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """(loss scalar with graph, statistics [len(STATISTICS)] float64)."""
        algo = self.algo
        old_logp_T = batch.extra_T[OLD_LOGP] if OLD_LOGP in batch.extra_T else logp_T.detach()
        value_T, is_clipped_T = policy_loss(
            logp_T,
            old_logp_T,
            batch.advantage_T,
            eps_clip=algo.eps_clip,
            eps_clip_high=algo.eps_clip if algo.eps_clip_high is None else algo.eps_clip_high,
        )
        kl_T = torch.zeros_like(logp_T)
        if algo.use_kl_loss:
            kl_T = kl_estimate(logp_T, batch.extra_T[REF_LOGP], algo.kl_loss_type)
            value_T = value_T + algo.kl_loss_coef * kl_T
        if algo.entropy_coef:
            value_T = value_T - algo.entropy_coef * entropy_T
        loss = self._reduce(value_T, batch)
        statistics = (
            loss,
            self._reduce(kl_T, batch),
            self._reduce(entropy_T, batch),
            self._token_mean(is_clipped_T, batch),
            self._token_mean(old_logp_T - logp_T, batch),
            self._token_mean((logp_T - batch.rollout_logp_T).abs(), batch),
        )
        return loss, torch.stack([number.detach().double() for number in statistics])

    def _reduce(self, value_T: Tensor, batch: PackedBatch) -> Tensor:
        return reduce_loss(
            value_T,
            batch.mask_T,
            batch.row_slices,
            per_token=self.algo.calculate_per_token_loss,
            num_samples=self.step.num_samples,
            num_tokens=self.step.num_tokens,
        )

    def _token_mean(self, value_T: Tensor, batch: PackedBatch) -> Tensor:
        """This pack's share of the mean over the trainable tokens of the step."""
        return torch.where(batch.mask_T > 0, value_T.double(), 0.0).sum() / max(self.step.num_tokens, 1)
