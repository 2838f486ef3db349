"""MoE routing replay: tokens go to the experts that the engine chose for them (--use-rollout-routing-replay).

Router logits of the engine and of the trainer differ by rounding, and a token near a tie then takes other experts in
training than in generation: its log-probability jumps (Ma et al. 2025, "Rollout Routing Replay"). Here the choice is
the engine's; the weights of the chosen experts are still the trainer's softmax over its own logits, with gradient.

The choices travel with the pack (`PackedSeqParams.routed_experts`), and each layer takes its own from there when it
runs. So an activation that is computed again in the backward pass, at whatever point of whatever pipeline schedule,
finds the choices of its own micro-batch, and nothing has to be queued. A token without a record (-1: padding, the last
token of a sequence, what a plug-in left out) goes where the trainer's router sends it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router_replay import RouterReplay
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from vime.types import HandoffError


class GivenExperts(RouterReplay):
    """What megatron's router asks in the place of its own top-k. Not in megatron's global list: one list for all models
    of a process could not distinguish a policy from its reference."""

    def __init__(self) -> None:
        self.experts_LK: Tensor | None = None  # int64; L: tokens of this rank, K: experts a token

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(scores of the chosen experts, the chosen experts), both [L, K]."""
        assert default_compute_topk is not None
        own_scores_LK, own_LK = default_compute_topk(scores, topk, num_groups, group_topk)
        if self.experts_LK is None:
            return own_scores_LK, own_LK
        chosen_LK = torch.where(self.experts_LK >= 0, self.experts_LK, own_LK)
        return scores.gather(1, chosen_LK), chosen_LK


class ReplayLayer(TransformerLayer):
    """A layer that gives its router, each time it runs, the experts that the pack names for it."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        assert isinstance(self.mlp, MoELayer), "check_routing_replay refuses models without experts"
        self.given = GivenExperts()
        self.mlp.router.router_replay = self.given

    def forward(self, *args: object, packed_seq_params: PackedSeqParams, **kwargs: object) -> object:
        self.given.experts_LK = self._experts(packed_seq_params.routed_experts)
        return super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)

    def _experts(self, experts_LW: Tensor | None) -> Tensor | None:
        """This layer's columns, and under sequence parallelism this rank's tokens."""
        if experts_LW is None:
            return None
        layers, top_k = self.config.num_layers, self.config.moe_router_topk
        if experts_LW.shape[1] != layers * top_k:
            raise HandoffError(
                f"rollout_routed_experts: {experts_LW.shape[1]} numbers a token, expected {layers} layers x {top_k} "
                "experts. The engine runs another model."
            )
        experts_LK = experts_LW[:, (self.layer_number - 1) * top_k : self.layer_number * top_k]
        if self.config.sequence_parallel:
            size = parallel_state.get_tensor_model_parallel_world_size()
            experts_LK = experts_LK.chunk(size)[parallel_state.get_tensor_model_parallel_rank()]
        return experts_LK.long()
