"""Multi-head latent attention over a pack (DeepSeek-V2, arXiv 2405.04434, section 2.1), in place of megatron's layer.

megatron's `MLASelfAttention` rotates sequence by sequence, in every layer anew, and cuts the down projections over
ranks, to gather what they give. Here each rank computes them whole for the tokens that it holds under sequence
parallelism, and positions are those that `CompletionModel` looks up once for all layers.

L: tokens of this rank, S: those that it holds under sequence parallelism (else L), H: query heads of this rank.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn

from vime.backends.megatron_utils.deepseek import Latent
from vime.backends.megatron_utils.fused import rotate
from vime.backends.megatron_utils.layer_spec import PackedAttention, RMSNorm


class WholeLinear(nn.Module):
    """A linear layer that is not cut. Its gradient is whole on every rank, or, under sequence parallelism, that of this
    rank's tokens: megatron sums those over the ranks."""

    def __init__(self, config: TransformerConfig, inputs: int, outputs: int) -> None:
        super().__init__()
        made = {"dtype": config.params_dtype, "device": torch.cuda.current_device()}
        self.weight = nn.Parameter(torch.empty(outputs, inputs, **made))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # as of `RMSNorm`

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class LatentAttention(MegatronModule):
    """Queries, keys and values by way of short vectors; `PackedAttention` does the rest."""

    def __init__(self, config: TransformerConfig, layer_number: int, latent: Latent, **_unused: object) -> None:
        super().__init__(config=config)
        self.latent, heads, hidden = latent, config.num_attention_heads, config.hidden_size
        self.num_heads = heads // config.tensor_model_parallel_size
        self.queries_from_latent = latent.query_rank > 0
        if self.queries_from_latent:
            self.linear_q_down_proj = WholeLinear(config, hidden, latent.query_rank)
            self.q_layernorm = RMSNorm(config, latent.query_rank, config.layernorm_epsilon)
            self.linear_q_up_proj = _column(config, latent.query_rank, heads * latent.num_query)
        else:
            self.linear_q_proj = _column(config, hidden, heads * latent.num_query)
        self.linear_kv_down_proj = WholeLinear(config, hidden, latent.key_value_rank + latent.num_rotated)
        self.kv_layernorm = RMSNorm(config, latent.key_value_rank, config.layernorm_epsilon)
        self.linear_kv_up_proj = _column(config, latent.key_value_rank, heads * (latent.num_plain + latent.num_values))
        self.core_attention = PackedAttention(config, layer_number, softmax_scale=config.softmax_scale, rotates=False)
        self.linear_proj = RowParallelLinear(
            heads * latent.num_values,
            hidden,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            is_expert=False,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
        )

    def forward(
        self,
        hidden_states: Tensor,  # [S, 1, hidden]
        attention_mask: Tensor | None = None,  # noqa: ARG002  the pack says it all
        *,
        packed_seq_params: PackedSeqParams,
        **_unused: object,
    ) -> tuple[Tensor, None]:
        """Answers [S, 1, hidden]. Collective over the tensor-parallel group."""
        query, key, value = self._heads(hidden_states, packed_seq_params.rotation)
        if self.config.recompute_granularity == "selective" and self.training:

            def attend(*parts: Tensor) -> Tensor:
                return self.core_attention(*parts, None, packed_seq_params=packed_seq_params)  # type: ignore[no-any-return]

            mixed = tensor_parallel.checkpoint(attend, False, query, key, value)
        else:
            mixed = self.core_attention(query, key, value, None, packed_seq_params=packed_seq_params)
        output, _ = self.linear_proj(mixed)
        return output, None

    def _heads(self, hidden_S1: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys [L, H, plain + rotated], values [L, H, values]."""
        latent = self.latent
        if self.queries_from_latent:
            query, _ = self.linear_q_up_proj(self.q_layernorm(self.linear_q_down_proj(hidden_S1)))
        else:
            query, _ = self.linear_q_proj(hidden_S1)
        short, turning = self.linear_kv_down_proj(hidden_S1).split([latent.key_value_rank, latent.num_rotated], -1)
        both, _ = self.linear_kv_up_proj(self.kv_layernorm(short))
        # one for all heads, so the gradients of every rank's heads are summed; several ranks are there with
        # sequence parallelism only, which experts ask for (config/layout.py)
        if self.config.sequence_parallel:
            turning = gather_from_sequence_parallel_region(turning)
        query_LHD = query.view(-1, self.num_heads, latent.num_query)
        both_LHD = both.view(-1, self.num_heads, latent.num_plain + latent.num_values)
        plain, turned = query_LHD.split([latent.num_plain, latent.num_rotated], -1)
        plain_key, value = both_LHD.split([latent.num_plain, latent.num_values], -1)
        turned_key = rotate(_by_halves(turning), rotation).expand(-1, self.num_heads, -1)
        query_LHD = torch.cat([plain, rotate(_by_halves(turned), rotation)], -1)
        return query_LHD, torch.cat([plain_key, turned_key], -1), value


def _column(config: TransformerConfig, inputs: int, outputs: int) -> ColumnParallelLinear:
    return ColumnParallelLinear(
        inputs,
        outputs,
        config=config,
        init_method=config.init_method,
        bias=False,
        gather_output=False,
        is_expert=False,
        tp_group=parallel_state.get_tensor_model_parallel_group(),
    )


def _by_halves(x: Tensor) -> Tensor:
    """Channels in pairs -> the first of each pair, then the second of each, which is how `rotate` pairs them."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)  # type: ignore[no-any-return]  # torch leaves unflatten untyped
