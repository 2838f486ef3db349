"""How each HF tensor lies in a megatron-core parameter, and how tensor parallelism cuts it. Pure tensor functions.

One table, `RULES`: megatron parameter -> HF tensors and their `Kind`. One more architecture is one more row.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from vime.backends.megatron_utils.architecture import Architecture
from vime.backends.megatron_utils.hf_tensors import EMBEDDING, HEAD, VALUE_HEAD

OUTPUT_LAYER = "output_layer.weight"
CRITIC_LAYER = "value_head.weight"  # what `HFWeights` calls the output layer of a critic


class Kind(StrEnum):
    """Layout of HF tensors inside one megatron parameter."""

    REPLICATED = "replicated"  # the same on every tensor-parallel rank
    COLUMN = "column"  # cut along the output dimension
    ROW = "row"  # cut along the input dimension, the second
    LAST = "last"  # cut along the last dimension
    GATE_UP = "gate_up"  # per rank: [its gate rows; its up rows]
    QKV = "qkv"  # per key/value group: its query heads, its key head, its value head
    VOCAB = "vocab"  # rows cut over ranks, zero rows at the end


@dataclass(frozen=True, slots=True)
class Rule:
    pattern: re.Pattern[str]
    hf_names: tuple[str, ...]
    kind: Kind


_LAYER = r"decoder\.layers\.(?P<layer>\d+)\."
_HF_LAYER = "model.layers.{layer}."
_EXPERT = r"mlp\.experts\.local_experts\.(?P<expert>\d+)\."
_HF_EXPERT = _HF_LAYER + "mlp.experts.{expert}."
_EXPERT_NUMBER = re.compile(r"(?<=\.local_experts\.)\d+")
_STACKED = re.compile(r"\.mlp\.experts\.(gate_up|down)_proj\.")


def _rule(pattern: str, hf_names: Sequence[str], kind: Kind) -> Rule:
    return Rule(re.compile(pattern + "$"), tuple(hf_names), kind)


# The second spelling of a norm is Transformer Engine's, which fuses it into the linear layer that follows.
RULES = (
    _rule(r"embedding\.word_embeddings\.weight", [EMBEDDING], Kind.VOCAB),
    _rule(r"output_layer\.weight", [HEAD], Kind.VOCAB),
    _rule(r"value_head\.weight", [VALUE_HEAD], Kind.REPLICATED),
    _rule(r"decoder\.final_layernorm\.weight", ["model.norm.weight"], Kind.REPLICATED),
    _rule(
        _LAYER + r"(input_layernorm\.weight|self_attention\.linear_qkv\.layer_norm_weight)",
        [_HF_LAYER + "input_layernorm.weight"],
        Kind.REPLICATED,
    ),
    _rule(
        _LAYER + r"(pre_mlp_layernorm\.weight|mlp\.linear_fc1\.layer_norm_weight)",
        [_HF_LAYER + "post_attention_layernorm.weight"],
        Kind.REPLICATED,
    ),
    _rule(
        _LAYER + r"self_attention\.linear_qkv\.(?P<part>weight|bias)",
        [_HF_LAYER + f"self_attn.{letter}_proj.{{part}}" for letter in "qkv"],
        Kind.QKV,
    ),
    _rule(_LAYER + r"self_attention\.linear_proj\.weight", [_HF_LAYER + "self_attn.o_proj.weight"], Kind.ROW),
    _rule(
        _LAYER + r"self_attention\.(?P<letter>[qk])_layernorm\.weight",
        [_HF_LAYER + "self_attn.{letter}_norm.weight"],
        Kind.REPLICATED,
    ),
    _rule(
        _LAYER + r"mlp\.linear_fc1\.weight",
        [_HF_LAYER + "mlp.gate_proj.weight", _HF_LAYER + "mlp.up_proj.weight"],
        Kind.GATE_UP,
    ),
    _rule(_LAYER + r"mlp\.linear_fc2\.weight", [_HF_LAYER + "mlp.down_proj.weight"], Kind.ROW),
    _rule(_LAYER + r"mlp\.router\.weight", [_HF_LAYER + "mlp.gate.weight"], Kind.REPLICATED),
    _rule(
        _LAYER + _EXPERT + r"linear_fc1\.weight",
        [_HF_EXPERT + "gate_proj.weight", _HF_EXPERT + "up_proj.weight"],
        Kind.GATE_UP,
    ),
    _rule(_LAYER + _EXPERT + r"linear_fc2\.weight", [_HF_EXPERT + "down_proj.weight"], Kind.ROW),
)


SANDWICH_RULES = (
    _rule(_LAYER + r"pre_mlp_layernorm\.weight", [_HF_LAYER + "pre_feedforward_layernorm.weight"], Kind.REPLICATED),
    _rule(
        _LAYER + r"self_attention\.post_layernorm\.weight",
        [_HF_LAYER + "post_attention_layernorm.weight"],
        Kind.REPLICATED,
    ),
    _rule(_LAYER + r"mlp\.post_layernorm\.weight", [_HF_LAYER + "post_feedforward_layernorm.weight"], Kind.REPLICATED),
)
"""Before RULES, for a model with norms behind attention and MLP too."""


_HF_ATTENTION = _HF_LAYER + "self_attn."
LATENT_RULES = (
    _rule(_LAYER + r"self_attention\.linear_q_proj\.weight", [_HF_ATTENTION + "q_proj.weight"], Kind.COLUMN),
    _rule(_LAYER + r"self_attention\.linear_q_down_proj\.weight", [_HF_ATTENTION + "q_a_proj.weight"], Kind.REPLICATED),
    _rule(_LAYER + r"self_attention\.q_layernorm\.weight", [_HF_ATTENTION + "q_a_layernorm.weight"], Kind.REPLICATED),
    _rule(_LAYER + r"self_attention\.linear_q_up_proj\.weight", [_HF_ATTENTION + "q_b_proj.weight"], Kind.COLUMN),
    _rule(
        _LAYER + r"self_attention\.linear_kv_down_proj\.weight",
        [_HF_ATTENTION + "kv_a_proj_with_mqa.weight"],
        Kind.REPLICATED,
    ),
    _rule(_LAYER + r"self_attention\.kv_layernorm\.weight", [_HF_ATTENTION + "kv_a_layernorm.weight"], Kind.REPLICATED),
    _rule(_LAYER + r"self_attention\.linear_kv_up_proj\.weight", [_HF_ATTENTION + "kv_b_proj.weight"], Kind.COLUMN),
    _rule(_LAYER + r"mlp\.router\.expert_bias", [_HF_LAYER + "mlp.gate.e_score_correction_bias"], Kind.REPLICATED),
    _rule(
        _LAYER + r"mlp\.shared_experts\.linear_fc1\.weight",
        [_HF_LAYER + f"mlp.shared_experts.{part}_proj.weight" for part in ("gate", "up")],
        Kind.GATE_UP,
    ),
    _rule(
        _LAYER + r"mlp\.shared_experts\.linear_fc2\.weight",
        [_HF_LAYER + "mlp.shared_experts.down_proj.weight"],
        Kind.ROW,
    ),
)
"""Before RULES, for a model with latent attention."""


SINK_RULES = (
    _rule(_LAYER + r"self_attention\.linear_proj\.bias", [_HF_ATTENTION + "o_proj.bias"], Kind.REPLICATED),
    _rule(_LAYER + r"self_attention\.core_attention\.sinks", [_HF_ATTENTION + "sinks"], Kind.COLUMN),
    _rule(_LAYER + r"mlp\.router\.(?P<part>weight|bias)", [_HF_LAYER + "mlp.router.{part}"], Kind.REPLICATED),
    _rule(_LAYER + r"mlp\.experts\.gate_up_proj\.weight", [_HF_LAYER + "mlp.experts.gate_up_proj"], Kind.LAST),
    _rule(_LAYER + r"mlp\.experts\.gate_up_proj\.bias", [_HF_LAYER + "mlp.experts.gate_up_proj_bias"], Kind.LAST),
    _rule(_LAYER + r"mlp\.experts\.down_proj\.weight", [_HF_LAYER + "mlp.experts.down_proj"], Kind.ROW),
    _rule(_LAYER + r"mlp\.experts\.down_proj\.bias", [_HF_LAYER + "mlp.experts.down_proj_bias"], Kind.REPLICATED),
)
"""Before RULES, for a model with attention sinks."""


def rules_of(architecture: Architecture) -> tuple[Rule, ...]:
    if architecture.has_sinks:
        return (*SINK_RULES, *RULES)
    if architecture.latent is not None:
        return (*LATENT_RULES, *RULES)
    return (*SANDWICH_RULES, *RULES) if architecture.has_sandwich_norms else RULES


def hf_names_and_kind(name: str, rules: Sequence[Rule] = RULES) -> tuple[tuple[str, ...], Kind]:
    """HF tensors inside the megatron parameter `name` (layer and expert numbers of the whole model); the first rule
    that fits."""
    for rule in rules:
        found = rule.pattern.match(name)
        if found:
            parts = {key: value for key, value in found.groupdict().items() if value is not None}
            return tuple(hf_name.format(**parts) for hf_name in rule.hf_names), rule.kind
    raise KeyError(f"no rule for the megatron parameter {name}")


def is_expert(name: str) -> bool:
    """Whether the megatron parameter `name` belongs to experts. Expert parallelism spreads those over ranks; all
    others, the router too, are on every rank of the expert group."""
    return _EXPERT_NUMBER.search(name) is not None or is_stacked(name)


def is_stacked(name: str) -> bool:
    """Whether the megatron parameter `name` has all experts of the rank, one after the other."""
    return _STACKED.search(name) is not None


def with_expert_offset(name: str, offset: int) -> str:
    """`name` with its expert's number on this rank (from 0) made the number in the whole model."""
    return _EXPERT_NUMBER.sub(lambda found: str(int(found[0]) + offset), name)


def to_shard(
    kind: Kind, tensors: Sequence[Tensor], *, architecture: Architecture, rank: int, size: int, rows: int
) -> Tensor:
    """HF tensors -> the parameter of tensor-parallel rank `rank` of `size`; `rows` is its first dimension."""
    if kind is Kind.REPLICATED:
        return tensors[0]
    if kind is Kind.ROW:
        return tensors[0].chunk(size, 1)[rank]
    if kind is Kind.LAST:
        return tensors[0].chunk(size, -1)[rank]
    if kind is Kind.COLUMN:
        return tensors[0].chunk(size, 0)[rank]
    if kind is Kind.GATE_UP:
        return torch.cat([tensor.chunk(size, 0)[rank] for tensor in tensors])
    if kind is Kind.QKV:
        # [groups, rows of one group, ...]; with more ranks than groups the cut goes through a group
        grouped = [tensor.unflatten(0, (architecture.num_key_value_heads, -1)) for tensor in tensors]
        return torch.cat(grouped, 1).flatten(0, 1).chunk(size, 0)[rank]
    shard = tensors[0][rank * rows : (rank + 1) * rows]
    missing = rows - shard.size(0)
    return torch.cat([shard, shard.new_zeros(missing, *shard.shape[1:])]) if missing else shard


def from_shards(kind: Kind, shards: Sequence[Tensor], *, architecture: Architecture) -> list[Tensor]:
    """The parameters of all tensor-parallel ranks, in rank order -> HF tensors. Inverse of `to_shard`."""
    if kind is Kind.REPLICATED:
        return [shards[0]]
    if kind is Kind.ROW:
        return [_joined(shards, 1)]
    if kind is Kind.LAST:
        return [_joined(shards, -1)]
    if kind is Kind.COLUMN:
        return [_joined(shards)]
    if kind is Kind.VOCAB:
        return [_joined(shards)[: architecture.vocab_size]]
    if kind is Kind.GATE_UP:
        halves = [shard.chunk(2, 0) for shard in shards]
        return [_joined([half[part] for half in halves]) for part in (0, 1)]
    grouped = _joined(shards).unflatten(0, (architecture.num_key_value_heads, -1))
    heads_per_group = architecture.num_attention_heads // architecture.num_key_value_heads
    sizes = [heads_per_group * architecture.head_dim, architecture.head_dim, architecture.head_dim]
    return [part.flatten(0, 1) for part in grouped.split(sizes, 1)]


def _joined(parts: Sequence[Tensor], dimension: int = 0) -> Tensor:
    """Of one part the part itself, which `torch.cat` would copy."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dimension)
