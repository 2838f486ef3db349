"""The loss of one packed micro-batch and the numbers that are reported about it. T: packed tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from vime.algo.kl import kl_estimate, unbiased_kl
from vime.algo.losses import (
    cispo_loss,
    decoupled_weight,
    kept_weight,
    multi_level_weight,
    off_policy_sequence_mask,
    policy_loss,
    reduce_loss,
    sequence_log_ratio,
    sft_loss,
    truncated_weight,
)
from vime.batching.pack import PackedBatch
from vime.config.training import AlgoConfig
from vime.protocols import calling_plugin
from vime.training.columns import ADVANTAGE, OLD_LOGP, REF_LOGP, SAMPLE_TOKENS, STALENESS
from vime.training.loss_statistics import bucket_sums, mismatch_values
from vime.types import PluginError, StepPlan

CustomLoss = Callable[[Tensor, Tensor, Mapping[str, Tensor]], Tensor]
"""--custom-loss-path with its first argument bound: (logp [T], entropy [T], columns) -> loss [T]."""


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """The policy term of each token, and how it was computed; all [T]."""

    value_T: Tensor
    is_clipped_T: Tensor  # the clipped term was the one taken
    is_reweighted_T: Tensor  # the off-policy weight was truncated or dropped
    is_left_out_T: Tensor  # by --use-opsm
    weight_T: Tensor | None = None  # the off-policy weight; None without a correction


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """The loss that --loss-type and --advantage-estimator name, with KL and entropy terms: this pack's share of the
    loss of the step.

    Denominators are the step's, over all ranks and micro-batches (`StepPlan.num_samples`, `num_tokens`); see
    `losses.reduce_loss`. A token that a correction drops still counts in them. The old (proximal) policy of a token
    is the one the round began with: the column `OLD_LOGP`, or, when there is none because the round is one step or
    imitates, the policy itself; under --use-rollout-logprobs the engine's.
    """

    algo: AlgoConfig
    step: StepPlan
    custom_loss: CustomLoss | None = None

    def __call__(self, logp_T: Tensor, entropy_T: Tensor, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """Return (loss scalar with graph, statistics [S] float64 in the order of `loss_statistics.STATISTICS`)."""
        algo = self.algo
        start_logp_T = batch.extra_T[OLD_LOGP] if OLD_LOGP in batch.extra_T else logp_T.detach()
        old_logp_T = batch.rollout_logp_T if algo.use_rollout_logprobs else start_logp_T
        policy = self._token_loss(logp_T, entropy_T, old_logp_T, batch)
        value_T, kl_T = policy.value_T, torch.zeros_like(logp_T)
        if algo.use_kl_loss:
            # At an untrained token exp of a far reference may be inf, and 0 times its gradient nan.
            ref_logp_T = torch.where(batch.mask_T > 0, batch.extra_T[REF_LOGP], logp_T.detach())
            kl_T = kl_estimate(logp_T, ref_logp_T, algo.kl_loss_type)
            if algo.use_unbiased_kl:
                kl_T = unbiased_kl(kl_T, logp_T - old_logp_T, policy.weight_T)
            value_T = value_T + algo.kl_loss_coef * kl_T
        if algo.entropy_coef:
            value_T = value_T - algo.entropy_coef * entropy_T
        loss = self._reduce(value_T, batch)
        shares = (
            loss,
            self._reduce(kl_T, batch),
            self._reduce(entropy_T, batch),
            self._token_mean(policy.is_clipped_T, batch),
            self._token_mean(old_logp_T - logp_T, batch),
            self._token_mean(policy.is_reweighted_T, batch),
            self._token_mean(policy.is_left_out_T, batch),
            *(self._token_mean(value, batch) for value in mismatch_values(start_logp_T, batch.rollout_logp_T)),
        )
        staleness_T = batch.extra_T.get(STALENESS, torch.zeros_like(batch.mask_T))
        buckets = bucket_sums(logp_T, batch.rollout_logp_T, policy.is_clipped_T, staleness_T, batch.mask_T)
        return loss, torch.cat([torch.stack([number.detach().double() for number in shares]), buckets])

    def _token_loss(self, logp_T: Tensor, entropy_T: Tensor, old_logp_T: Tensor, batch: PackedBatch) -> TokenLoss:
        nowhere_T = torch.zeros_like(logp_T, dtype=torch.bool)
        if self.algo.loss_type == "sft_loss":
            return TokenLoss(sft_loss(logp_T), nowhere_T, nowhere_T, nowhere_T)
        advantage_T = batch.extra_T.get(ADVANTAGE, batch.advantage_T)
        if self.algo.loss_type == "custom_loss":
            columns = {
                **batch.extra_T,
                ADVANTAGE: advantage_T,
                OLD_LOGP: old_logp_T.detach(),
                "rollout_logp": batch.rollout_logp_T,
                "mask": batch.mask_T,
            }
            return TokenLoss(self._custom(logp_T, entropy_T, columns), nowhere_T, nowhere_T, nowhere_T)
        value_T, is_clipped_T = self._clipped(logp_T, old_logp_T.detach(), advantage_T, batch)
        weight_T, is_reweighted_T, is_left_out_T = None, nowhere_T, nowhere_T
        weight = self._off_policy_weight(old_logp_T, batch)
        if weight is not None:
            weight_T, is_reweighted_T = weight
            value_T = value_T * weight_T
        if self.algo.use_opsm:
            is_left_out_T = off_policy_sequence_mask(
                logp_T,
                batch.rollout_logp_T,
                advantage_T,
                batch.mask_T,
                batch.row_slices,
                delta=self.algo.opsm_delta,
            )
            value_T = value_T.masked_fill(is_left_out_T, 0.0)
        return TokenLoss(value_T, is_clipped_T, is_reweighted_T, is_left_out_T, weight_T)

    def _clipped(
        self, logp_T: Tensor, old_logp_T: Tensor, advantage_T: Tensor, batch: PackedBatch
    ) -> tuple[Tensor, Tensor]:
        algo = self.algo
        low, high = algo.clip_range
        log_ratio_T = logp_T - old_logp_T
        if algo.advantage_estimator == "cispo":
            return cispo_loss(log_ratio_T, logp_T, advantage_T, eps_clip=low, eps_clip_high=high)
        if algo.advantage_estimator == "gspo":
            log_ratio_T = sequence_log_ratio(log_ratio_T, batch.mask_T, batch.row_slices)
        return policy_loss(log_ratio_T, advantage_T, eps_clip=low, eps_clip_high=high, eps_clip_c=algo.eps_clip_c)

    def _off_policy_weight(self, old_logp_T: Tensor, batch: PackedBatch) -> tuple[Tensor, Tensor] | None:
        """Return (weight, is it different from the plain ratio), both [T]; None without a correction."""
        algo = self.algo
        log_ratio_T = old_logp_T.detach() - batch.rollout_logp_T
        low, high = algo.weight_range
        match algo.off_policy_correction:
            case "tis":
                return truncated_weight(log_ratio_T, low=low, high=high)
            case "icepop":
                return kept_weight(log_ratio_T, low=low, high=high)
            case "decoupled":
                return decoupled_weight(log_ratio_T, cap=high)
            case "mis":
                return multi_level_weight(
                    log_ratio_T,
                    batch.mask_T,
                    batch.row_slices,
                    level=algo.mis_level,
                    mode=algo.mis_mode,
                    low=low,
                    high=high,
                )
        return None

    def _custom(self, logp_T: Tensor, entropy_T: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
        assert self.custom_loss is not None, "check_algo asks for --custom-loss-path"
        with calling_plugin("--custom-loss-path", self.custom_loss, on_device=True):
            value_T = self.custom_loss(logp_T, entropy_T, columns)
        if not isinstance(value_T, Tensor) or value_T.shape != logp_T.shape:
            got = tuple(value_T.shape) if isinstance(value_T, Tensor) else type(value_T).__name__
            raise PluginError(
                f"--custom-loss-path: returned {got}, expected a tensor of shape {tuple(logp_T.shape)}: the loss of "
                "every token. Vime masks and averages it."
            )
        # a constant (for a pack without rows, say) has no graph, and the peers of this rank wait in its backward pass
        return value_T if value_T.requires_grad else value_T + 0.0 * logp_T

    def _reduce(self, value_T: Tensor, batch: PackedBatch) -> Tensor:
        return reduce_loss(
            value_T,
            batch.mask_T,
            batch.row_slices,
            per_token=self.algo.calculate_per_token_loss,
            num_samples=self.step.num_samples,
            num_tokens=self.step.num_tokens,
            sample_tokens_T=batch.extra_T.get(SAMPLE_TOKENS),
        )

    def _token_mean(self, value_T: Tensor, batch: PackedBatch) -> Tensor:
        """Return this pack's share of the mean over the trainable tokens of the step."""
        return torch.where(batch.mask_T > 0, value_T.double(), 0.0).sum() / max(self.step.num_tokens, 1)
