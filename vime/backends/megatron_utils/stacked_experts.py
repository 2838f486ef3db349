"""Experts of GPT-OSS: all of a layer in one tensor, biases in every linear layer, a clamped SwiGLU.

megatron's experts are layers of their own, to be put together and turned around for each export, and it computes biases
beside whole experts only. Here parameters lie as in the files: gate and up take turns, inputs come before outputs. So
expert parallelism cuts the first dimension, and expert tensor parallelism the columns of the first layer and the rows
of the second.

E: experts of this rank, H: hidden size, F: MLP columns of this rank.
"""

from __future__ import annotations

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor, nn

from vime.backends.megatron_utils.grouped_experts import await_weights

ALPHA, LIMIT = 1.702, 7.0
"""Of the gate's sigmoid, and of what goes into it (swiglu_alpha and swiglu_limit; vLLM has these numbers built in)."""


def clamped_swiglu(gate_up: Tensor) -> Tensor:
    """[..., 2 F], gate and up in turns -> [..., F]: gate sigmoid(alpha gate) (up + 1), both clamped first."""
    gate, up = gate_up[..., ::2], gate_up[..., 1::2]
    gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    return gate * torch.sigmoid(ALPHA * gate) * (up + 1)


def new_bias(size: int, config: TransformerConfig) -> nn.Parameter:
    """Return the bias of a layer whose output every tensor-parallel rank has, or, under sequence parallelism, a part of
    the tokens: megatron sums such gradients then."""
    bias = nn.Parameter(torch.zeros(size, dtype=config.params_dtype, device=torch.cuda.current_device()))
    bias.allreduce = True  # type: ignore[attr-defined]  # megatron's sign of a parameter that no expert has
    bias.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return bias


class BiasedAttention(SelfAttention):
    """Its output layer has a bias, which the layer adds once, behind the sum over ranks."""

    def __init__(self, config: TransformerConfig, *args: object, **kwargs: object) -> None:
        super().__init__(config, *args, **kwargs)
        self.linear_proj.bias = new_bias(config.hidden_size, config)


class BiasedMoELayer(MoELayer):
    """Its router's logits have a bias."""

    def __init__(self, config: TransformerConfig, *args: object, **kwargs: object) -> None:
        super().__init__(config, *args, **kwargs)
        self.router.bias = new_bias(config.num_moe_experts, config)


class StackedLinear(nn.Module):
    """[E, inputs, outputs] and [E, outputs]."""

    def __init__(
        self, sizes: tuple[int, int, int], config: TransformerConfig, *, cut_weight: int, cut_bias: int | None
    ) -> None:
        """`sizes`: of the weight on this rank. `cut_...`: the dimension that expert tensor parallelism cuts."""
        super().__init__()
        made = {"dtype": config.params_dtype, "device": torch.cuda.current_device()}
        self.weight = nn.Parameter(torch.empty(sizes, **made))
        self.bias = nn.Parameter(torch.empty(sizes[0], sizes[2], **made))
        for parameter, cut in ((self.weight, cut_weight), (self.bias, cut_bias)):
            parameter.cut_dimension = cut  # type: ignore[attr-defined]
            parameter.allreduce = config.expert_model_parallel_size == 1  # type: ignore[attr-defined]  # as of megatron's experts
            if cut is not None:
                set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=cut, stride=1)


class StackedExperts(MegatronModule):
    """A drop-in for megatron's experts, behind its token dispatcher."""

    def __init__(
        self, num_local_experts: int, config: TransformerConfig, *, pg_collection: ProcessGroupCollection
    ) -> None:
        super().__init__(config=config)
        self.expert_group, self.cut_group = pg_collection.ep, pg_collection.expt_tp
        self.data_group = pg_collection.expt_dp
        hidden, columns = config.hidden_size, config.moe_ffn_hidden_size // self.cut_group.size()
        self.gate_up_proj = StackedLinear((num_local_experts, hidden, 2 * columns), config, cut_weight=2, cut_bias=1)
        self.down_proj = StackedLinear((num_local_experts, columns, hidden), config, cut_weight=1, cut_bias=None)

    def forward(self, tokens_TH: Tensor, tokens_per_expert_E: Tensor, weight_T: Tensor) -> tuple[Tensor, None]:
        """T: tokens that were sent here, those of the first expert first. Answers [T, H], times the router's weights;
        a part of a sum where experts are cut."""
        counts: list[int] = tokens_per_expert_E.tolist()
        wide, narrow = self.gate_up_proj, self.down_proj
        await_weights(wide, narrow)
        bias_EH: Tensor = narrow.bias
        if self.cut_group.rank():
            # added on the first rank only; its gradient is that of the whole output, which all ranks have
            bias_EH = bias_EH - bias_EH.detach()
        outputs = []
        for x, weight, *expert in zip(
            # unbind and split: the gradient of a slice is as large as the whole
            tokens_TH.split(counts),
            weight_T.split(counts),
            *(parameter.unbind() for parameter in (wide.weight, wide.bias, narrow.weight, bias_EH)),
            strict=True,
        ):
            wide_weight, wide_bias, narrow_weight, narrow_bias = expert
            mixed = torch.addmm(narrow_bias, clamped_swiglu(torch.addmm(wide_bias, x, wide_weight)), narrow_weight)
            outputs.append((mixed * weight.unsqueeze(-1)).to(mixed.dtype))
        return torch.cat(outputs), None

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, object] | None = None,  # noqa: ARG002  megatron passes it
    ) -> dict[str, ShardedTensor]:
        """The pieces of whole tensors for megatron's checkpoints."""
        experts, cut, ahead = self.expert_group, self.cut_group, len(sharded_offsets)
        made = {}
        for name, parameter in self.named_parameters():
            offsets = [*sharded_offsets, (ahead, experts.rank(), experts.size())]
            dimension: int | None = parameter.cut_dimension
            if dimension is not None:
                offsets.append((ahead + dimension, cut.rank(), cut.size()))
            made[prefix + name] = ShardedTensor.from_rank_offsets(
                prefix + name,
                parameter,
                *offsets,
                replica_id=(0, cut.rank() if dimension is None else 0, self.data_group.rank()),
                prepend_axis_num=ahead,
            )
        return made
