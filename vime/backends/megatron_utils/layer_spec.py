"""Which modules one transformer layer is made of: our own (any device) or Transformer Engine's (GPU).

The local spec replaces three of megatron-core's parts:
- `RMSNorm`: megatron's torch norm refuses --sequence-parallel; ours marks its weight so that its gradient is summed
  over the tensor-parallel group.
- `PackedAttention`: megatron's attention without Transformer Engine cannot read packed sequences (its mask would be
  T x T); ours runs torch's scaled_dot_product_attention once per sequence, so no token sees another sequence.
- `GatedMLP`: megatron's unfused activation writes three more tensors as wide as the MLP.

Shapes: T packed tokens, L those of this context-parallel rank (all T without), H query heads of this rank, G key/value
heads of this rank, D head dimension.
"""

from __future__ import annotations

import enum
import itertools
import math

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    gather_from_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    is_layer_window_attention,
    make_sharded_tensors_for_checkpoint,
)
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from vime.backends.megatron_utils.context_parallel import ContextCut
from vime.backends.megatron_utils.fused import geglu, rms_norm, rotate, swiglu
from vime.backends.megatron_utils.grouped_experts import GroupedExperts
from vime.backends.megatron_utils.routing_replay import ReplayLayer
from vime.backends.megatron_utils.stacked_experts import BiasedAttention, BiasedMoELayer, StackedExperts
from vime.batching.pack import Rests, SharedPrompts
from vime.types import ConfigError

WINDOW_BLOCK = 1024
"""Queries of a layer with a window that are computed together, at least."""
SINK_CHANNELS = 8
"""Channels are added by as many: torch's fused attention on a GPU takes no others."""


def block_spec(
    config: TransformerConfig,
    implementation: str,
    *,
    chunk: int | None = None,
    replays_routing: bool = False,
    has_sandwich_norms: bool = False,
    has_sinks: bool = False,
    attention: ModuleSpec | None = None,
    num_dense_layers: int = 0,
    groups_experts: bool = False,
) -> TransformerBlockSubmodules:
    """The decoder block of this pipeline stage, or of one `chunk` of it in an interleaved pipeline. `implementation` is
    --transformer-impl. `replays_routing`: experts are those that a pack brings along, see `ReplayLayer`. `has_sinks`:
    GPT-OSS's layers. `attention`: in place of grouped-query attention. `num_dense_layers`: the first of a model with
    experts that have none. `groups_experts`: see `GroupedExperts`."""
    if not hasattr(moe_utils, "te_general_gemm"):
        # megatron-core 0.16.1 reads this name in the router of a MoE layer, and defines it with Transformer Engine only
        moe_utils.te_general_gemm = None
    if implementation == "transformer_engine":
        layer, norm = _transformer_engine_layer(config)
    else:
        layer, norm = _local_layer(config, has_sandwich_norms=has_sandwich_norms, attention=attention), RMSNorm
        if has_sinks:
            _add_sinks(layer)
    if groups_experts and config.num_moe_experts and not has_sinks:
        layer.submodules.mlp.submodules.experts.module = GroupedExperts
    if replays_routing:
        layer.module = ReplayLayer
    count, first = get_num_layers_to_build(config, chunk), get_transformer_layer_offset(config, chunk)
    layers = [layer] * count
    if first < num_dense_layers:
        dense = _local_layer(config, has_sandwich_norms=has_sandwich_norms, attention=attention, has_experts=False)
        num_dense = min(count, num_dense_layers - first)
        layers = [dense] * num_dense + [layer] * (count - num_dense)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm)


def _local_layer(
    config: TransformerConfig,
    *,
    has_sandwich_norms: bool,
    attention: ModuleSpec | None = None,
    has_experts: bool = True,
) -> ModuleSpec:
    num_experts = config.num_moe_experts if has_experts else None
    layer = get_gpt_layer_local_spec(num_experts=num_experts, qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    parts = layer.submodules
    if num_experts is None:
        parts.mlp = SandwichMLP if has_sandwich_norms else GatedMLP
    parts.input_layernorm = RMSNorm
    parts.pre_mlp_layernorm = RMSNorm
    if has_sandwich_norms:
        parts.self_attention.module = SandwichAttention
    # megatron maps the norms to Transformer Engine's names inside checkpoints, so that both specs read one checkpoint.
    if attention is not None:
        parts.self_attention = attention
        return layer
    own = parts.self_attention.submodules
    own.core_attention = PackedAttention
    if config.qk_layernorm:
        own.q_layernorm = own.k_layernorm = RMSNorm
    return layer


def _add_sinks(layer: ModuleSpec) -> None:
    """Make the parts of a layer with experts those of GPT-OSS."""
    parts = layer.submodules
    parts.self_attention.module = BiasedAttention
    parts.self_attention.submodules.core_attention = ModuleSpec(module=PackedAttention, params={"has_sinks": True})
    parts.mlp.module = BiasedMoELayer
    parts.mlp.submodules.experts = StackedExperts


def _transformer_engine_layer(config: TransformerConfig) -> tuple[ModuleSpec, type]:
    try:
        from megatron.core.extensions.transformer_engine import TENorm

        layer = get_gpt_layer_with_transformer_engine_spec(
            num_experts=config.num_moe_experts, qk_layernorm=config.qk_layernorm
        )
    except (ImportError, NameError) as error:
        raise ConfigError(
            f"--transformer-impl transformer_engine: Transformer Engine is not installed ({error}). "
            "Install it, or use --transformer-impl local."
        ) from error
    return layer, TENorm


class RMSNorm(torch.nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, normalised in fp32 and cast back before the weight, as HF models do; Gemma's
    with `layernorm_zero_centered_gamma`, see `rms_norm`."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_unused: object) -> None:
        super().__init__()
        self.eps, self.adds_one = eps, bool(config.layernorm_zero_centered_gamma)
        self.weight = torch.nn.Parameter(
            torch.ones(hidden_size, dtype=config.params_dtype, device=torch.cuda.current_device())
        )
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined] # megatron sums such gradients over TP

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, adds_one=self.adds_one)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[object, ...] = (), metadata: dict[str, object] | None = None
    ) -> dict[str, object]:
        """Return what is saved of it: megatron's MLP asks each of its children, and Gemma's has a norm."""
        groups = ensure_metadata_has_dp_cp_group(metadata)
        sharded: dict[str, object] = make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {},
            sharded_offsets,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            dp_cp_group=groups["dp_cp_group"],
        )
        return sharded


class GatedMLP(MLP):
    """megatron's MLP of a dense layer, with one pass over the wide tensor for the activation and one for its
    gradient."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(
            config,
            MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear),
            ffn_hidden_size=config.ffn_hidden_size,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
        )
        self.activation = swiglu if config.activation_func is F.silu else geglu

    def forward(
        self, hidden_states: Tensor, per_token_scale: Tensor | None = None, **_unused: object
    ) -> tuple[Tensor, Tensor | None]:
        assert per_token_scale is None, "megatron scales experts only"
        gate_up, _ = self.linear_fc1(hidden_states)
        return self.linear_fc2(self.activation(gate_up))  # type: ignore[no-any-return]


class SandwichMLP(GatedMLP):
    """Its output is normalised before the layer adds it (Gemma)."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.post_layernorm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, *args: object, **kwargs: object) -> tuple[Tensor, Tensor | None]:
        output, bias = super().forward(*args, **kwargs)  # type: ignore[arg-type]
        assert bias is None, "such models have no biases"
        return self.post_layernorm(output), None


class SandwichAttention(SelfAttention):
    """Its output is normalised before the layer adds it (Gemma)."""

    def __init__(self, config: TransformerConfig, *args: object, **kwargs: object) -> None:
        super().__init__(config, *args, **kwargs)
        self.post_layernorm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, *args: object, **kwargs: object) -> tuple[Tensor, Tensor | None]:
        output, bias = super().forward(*args, **kwargs)
        assert bias is None, "such models have no biases"
        return self.post_layernorm(output), None


class Triangle(enum.Enum):
    """Which queries see which keys, where there are fewer queries than keys."""

    END = enum.auto()  # the last query sees the last key, the one before it all but that, and so on


Mask = Tensor | Triangle | None
"""[queries, keys], True where a query sees a key; or a triangle; or None: that of as many queries as keys."""


def masks_are_fused(query: Tensor) -> bool:
    """Whether a kernel that holds no scores takes a mask and heads that share a key: that of the CPU does."""
    return query.device.type == "cpu"


def _knows_groups(query: Tensor, mask: Tensor | Triangle) -> bool:
    """Whether a kernel of a GPU that holds no scores lets heads share a key: flash attention does, which computes in 16
    bits and takes no mask of ours."""
    return mask is Triangle.END and query.dtype in (torch.bfloat16, torch.float16)


def attend_end(query: Tensor, key: Tensor, value: Tensor, *, scale: float, enable_gqa: bool) -> Tensor:
    """[sequences, H, queries, D] -> the same, for `Triangle.END`: kernels of a GPU know it without a mask."""
    triangle = causal_lower_right(query.size(2), key.size(2))
    return F.scaled_dot_product_attention(query, key, value, attn_mask=triangle, scale=scale, enable_gqa=enable_gqa)


class PackedAttention(MegatronModule):
    """Causal attention within each sequence of a pack; a drop-in for megatron's core attention.

    Queries and keys are rotated here, in one go over the pack, by angles that `model.CompletionModel` looks up once for
    all layers. megatron would cut them by sequence, in every layer anew, and wait for the device to say where.
    Under context parallelism the keys and values of all ranks are gathered (backward: summed and scattered), and the
    two chunks of this rank look at what comes before them.

    In a layer with a window a token sees itself and the window - 1 tokens before it.

    A sink is a learned score of each head that takes part in the softmax and has no value (GPT-OSS). It is the score of
    one more key, which every token sees.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *_unused: object,
        softmax_scale: float | None = None,
        rotates: bool = True,
        has_sinks: bool = False,
        **_ignored: object,
    ) -> None:
        """`rotates`: queries and keys come without their positions."""
        super().__init__(config=config)
        self.layer_number, self.rotates = layer_number, rotates
        # megatron counts the tokens before a token, config.json the token itself too
        has_window = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window: int | None = config.window_size[0] + 1 if has_window else None
        self.scale = softmax_scale if softmax_scale is not None else 1.0 / math.sqrt(config.kv_channels)
        self.sinks: torch.nn.Parameter | None = None
        if has_sinks:
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            made = {"dtype": config.params_dtype, "device": torch.cuda.current_device()}
            self.sinks = torch.nn.Parameter(torch.zeros(heads, **made))
            set_tensor_model_parallel_attributes(self.sinks, is_parallel=True, dim=0, stride=1)

    def forward(
        self,
        query: Tensor,  # [L, H, D]
        key: Tensor,  # [L, G, D]
        value: Tensor,  # [L, G, D]
        attention_mask: Tensor | None,  # noqa: ARG002  megatron passes it; the pack says it all
        attn_mask_type: object = None,  # noqa: ARG002
        attention_bias: Tensor | None = None,  # noqa: ARG002
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Answers [L, 1, H * D]."""
        if packed_seq_params is None:
            raise RuntimeError("PackedAttention: got an unpacked batch, expected packed_seq_params")
        # set by step.py; python ints: no device sync per layer
        shared: SharedPrompts | None = packed_seq_params.shared_prompts
        starts: list[int] = packed_seq_params.cu_seqlens_host
        cut: ContextCut | None = packed_seq_params.context_cut
        rotation: tuple[Tensor, Tensor] = (  # set by CompletionModel
            packed_seq_params.rotation if self.window is None else packed_seq_params.window_rotation
        )
        if self.rotates:
            query, key = rotate(query, rotation), rotate(key, rotation)
        if shared is not None:
            outputs = self._attend_shared(query, key, value, shared)
        elif cut is None:
            outputs = self._attend_sequences(query, key, value, starts)
        else:
            outputs = self._attend_chunks(query, key, value, starts, cut)
        out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return out.reshape(out.size(0), 1, -1)

    def _attend_shared(self, query: Tensor, key: Tensor, value: Tensor, shared: SharedPrompts) -> list[Tensor]:
        """The outputs of all heads and rests: a rest sees its head and itself. Those of equal lengths go together."""
        parts = [x.split(shared.sizes) for x in (query, key, value)]
        outputs: list[Tensor] = []
        held: dict[int, tuple[Tensor, Tensor]] = {}
        for entry, *part in zip((*shared.heads, *shared.rests), *parts, strict=True):
            q, k, v = (x.unflatten(0, (entry.count, entry.length)) for x in part)
            first = 0
            if isinstance(entry, Rests):
                first = entry.head_length
                k, v = (
                    torch.cat([x.index_select(0, entry.heads), own], 1)
                    for x, own in zip(held[first], (k, v), strict=True)
                )
            else:
                held[entry.length] = k, v
            outputs.append(self._attend(q, k, v, first=first).flatten(0, 1))
        return outputs

    def _attend_sequences(self, query: Tensor, key: Tensor, value: Tensor, starts: list[int]) -> list[Tensor]:
        """The outputs of whole sequences; neighbours of one length go together."""
        lengths = [end - start for start, end in itertools.pairwise(starts)]
        runs = [(length, len(list(run))) for length, run in itertools.groupby(lengths)]
        sizes = [length * count for length, count in runs]
        # split, not slices: the gradient of a slice is as long as the pack, of a split as long as its part
        parts = [x.split(sizes) if len(sizes) > 1 else [x] for x in (query, key, value)]
        return [
            self._attend(*(x.unflatten(0, (count, length)) for x in part), first=0).flatten(0, 1)
            for (length, count), *part in zip(runs, *parts, strict=True)
        ]

    def _attend_chunks(
        self, query: Tensor, key: Tensor, value: Tensor, starts: list[int], cut: ContextCut
    ) -> list[Tensor]:
        """The outputs of this rank's two chunks of every sequence. Collective over the context-parallel group."""
        size, rank = cut.group.size(), cut.group.rank()
        both, sizes = torch.cat([key, value], -1), [key.size(-1), value.size(-1)]  # one collective for both
        both_TG = gather_from_sequence_parallel_region(both, group=cut.group)[cut.order_T]
        outputs, done = [], 0
        for start, end in itertools.pairwise(starts):
            chunk = (end - start) // (2 * size)
            for number in (rank, 2 * size - 1 - rank):
                first = number * chunk
                seen_key, seen_value = both_TG[start : start + first + chunk].split(sizes, -1)
                part = (query[done : done + chunk], seen_key, seen_value)
                outputs.append(self._attend(*(x.unsqueeze(0) for x in part), first=first).squeeze(0))
                done += chunk
        return outputs

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, *, first: int) -> Tensor:
        """[sequences, queries, H, D] -> the same; query i, which stands at position `first` + i, sees keys <= that, as
        far as its window reaches."""
        if self.window is None or first + query.size(1) <= self.window:
            return self._attend_block(query, key, value, first=first, reach=None)
        # blocks of queries, each with the keys that one of them sees: the work does not grow with the square
        outputs, size = [], max(self.window, WINDOW_BLOCK)
        for start, part in zip(itertools.count(first, size), query.split(size, 1), strict=False):
            seen = slice(max(0, start - self.window + 1), start + part.size(1))
            block = (part, key[:, seen], value[:, seen])
            outputs.append(self._attend_block(*block, first=start - seen.start, reach=self.window))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)

    def _attend_block(self, query: Tensor, key: Tensor, value: Tensor, *, first: int, reach: int | None) -> Tensor:
        mask: Mask = None
        if reach is not None or (first and masks_are_fused(query)):
            mask = torch.ones(query.size(1), key.size(1), dtype=torch.bool, device=query.device).tril_(first)
            if reach is not None:
                mask.triu_(first - reach + 1)
        elif first:
            mask = Triangle.END
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        if self.sinks is None:
            return self._mix(query, key, value, mask).transpose(1, 2)
        return self._attend_with_sinks(query, key, value, self.sinks, mask).transpose(1, 2)

    def _mix(self, query: Tensor, key: Tensor, value: Tensor, mask: Mask) -> Tensor:
        """[sequences, H, queries, D] -> the same. Without a mask the attention is causal."""
        is_grouped = query.size(1) != key.size(1)
        if mask is not None and is_grouped and not (masks_are_fused(query) or _knows_groups(query, mask)):
            key, value = (x.repeat_interleave(query.size(1) // x.size(1), 1) for x in (key, value))
            is_grouped = False
        if mask is Triangle.END:
            return attend_end(query, key, value, scale=self.scale, enable_gqa=is_grouped)
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=self.scale, enable_gqa=is_grouped
        )

    def _attend_with_sinks(self, query: Tensor, key: Tensor, value: Tensor, sinks_H: Tensor, mask: Mask) -> Tensor:
        """As `_attend_block` behind its transposition, with one more key in front. Heads that share a key have
        different sinks, so each has a channel of its own: 1 in its queries, its sink in that key. Without a mask a
        query of zeros goes in front too, which leaves the triangle as it is."""
        count, heads, _, channels = query.shape
        groups = key.size(1)
        shared = heads // groups
        more = -(-shared // SINK_CHANNELS) * SINK_CHANNELS
        marks_HM = torch.eye(shared, more, dtype=query.dtype, device=query.device).repeat(groups, 1)
        query = torch.cat([query, marks_HM.unsqueeze(1).expand(count, -1, query.size(2), -1)], -1)
        sinks_GM = F.pad(sinks_H.unflatten(0, (groups, shared)) / self.scale, (channels, more - shared))
        key = torch.cat([sinks_GM.unsqueeze(1).expand(count, -1, -1, -1), F.pad(key, (0, more))], 2)
        value = F.pad(value, (0, more, 1, 0))  # as wide as keys: torch's fused attention asks for it
        if mask is None:
            query = F.pad(query, (0, 0, 1, 0))
        elif mask is not Triangle.END:
            mask = F.pad(mask, (1, 0), value=True)
        return self._mix(query, key, value, mask)[:, :, int(mask is None) :, :channels]

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[object, ...] = (), metadata: dict[str, object] | None = None
    ) -> dict[str, object]:
        """The pieces of whole tensors for megatron's checkpoints."""
        return make_sharded_tensors_for_checkpoint(  # type: ignore[no-any-return]
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"sinks": 0},
            sharded_offsets,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            dp_cp_group=(metadata or {})["dp_cp_group"],
        )
