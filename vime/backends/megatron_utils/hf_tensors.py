"""The tensors that a model of each supported family has in its files, by config.json alone and without torch.

Missing tensors of a wrong directory are reported before any process starts, and `HFWeights` takes names and shapes from
here.
"""

from __future__ import annotations

from vime.backends.megatron_utils.architecture import Architecture

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
VALUE_HEAD = "score.weight"  # as in transformers' reward models


def expected_tensors(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """HF name -> shape. A tied head is the embedding and has no tensor of its own."""
    hidden, vocabulary = architecture.hidden_size, architecture.vocab_size
    tensors: dict[str, tuple[int, ...]] = {EMBEDDING: (vocabulary, hidden), "model.norm.weight": (hidden,)}
    if architecture.has_value_head:
        tensors[VALUE_HEAD] = (1, hidden)
    elif not architecture.is_tied:
        tensors[HEAD] = (vocabulary, hidden)
    layer = {**_attention(architecture), **_mlp(architecture)}
    if architecture.has_sandwich_norms:
        layer |= {f"{place}_feedforward_layernorm.weight": (hidden,) for place in ("pre", "post")}
    for number in range(architecture.num_layers):
        tensors |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
    return tensors


def _attention(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    hidden, width = architecture.hidden_size, architecture.head_dim
    rows = {"q": architecture.num_attention_heads * width, "k": architecture.num_key_value_heads * width}
    rows["v"] = rows["k"]
    tensors: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (hidden,)}
    tensors |= {f"self_attn.{letter}_proj.weight": (size, hidden) for letter, size in rows.items()}
    tensors["self_attn.o_proj.weight"] = (hidden, rows["q"])
    if architecture.has_qkv_bias:
        tensors |= {f"self_attn.{letter}_proj.bias": (size,) for letter, size in rows.items()}
    if architecture.has_qk_norm:
        tensors |= {f"self_attn.{letter}_norm.weight": (width,) for letter in "qk"}
    return tensors


def _mlp(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    hidden = architecture.hidden_size
    tensors: dict[str, tuple[int, ...]] = {"post_attention_layernorm.weight": (hidden,)}
    if not architecture.num_experts:
        return tensors | _gated("mlp.", hidden, architecture.intermediate_size)
    tensors["mlp.gate.weight"] = (architecture.num_experts, hidden)
    for number in range(architecture.num_experts):
        tensors |= _gated(f"mlp.experts.{number}.", hidden, architecture.moe_intermediate_size)
    return tensors


def _gated(prefix: str, hidden: int, size: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}gate_proj.weight": (size, hidden),
        f"{prefix}up_proj.weight": (size, hidden),
        f"{prefix}down_proj.weight": (hidden, size),
    }
