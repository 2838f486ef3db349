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
    attention = _attention(architecture) if architecture.latent is None else _latent_attention(architecture)
    layer = {**attention, **_mlp(architecture)}
    if architecture.has_sandwich_norms:
        layer |= {f"{place}_feedforward_layernorm.weight": (hidden,) for place in ("pre", "post")}
    num_dense = 0 if architecture.router is None else architecture.router.num_dense_layers
    dense = {**attention, "post_attention_layernorm.weight": (hidden,)}
    dense |= _gated("mlp.", hidden, architecture.intermediate_size)
    for number in range(architecture.num_layers):
        tensors |= {
            f"model.layers.{number}.{name}": shape for name, shape in (dense if number < num_dense else layer).items()
        }
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
    if architecture.has_sinks:
        tensors |= {"self_attn.o_proj.bias": (hidden,), "self_attn.sinks": (architecture.num_attention_heads,)}
    if architecture.has_qk_norm:
        tensors |= {f"self_attn.{letter}_norm.weight": (width,) for letter in "qk"}
    return tensors


def _latent_attention(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    latent, hidden, heads = architecture.latent, architecture.hidden_size, architecture.num_attention_heads
    assert latent is not None
    short, queries = latent.key_value_rank, heads * latent.num_query
    tensors: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (hidden,)}
    if latent.query_rank:
        tensors["self_attn.q_a_proj.weight"] = (latent.query_rank, hidden)
        tensors["self_attn.q_a_layernorm.weight"] = (latent.query_rank,)
        tensors["self_attn.q_b_proj.weight"] = (queries, latent.query_rank)
    else:
        tensors["self_attn.q_proj.weight"] = (queries, hidden)
    tensors["self_attn.kv_a_proj_with_mqa.weight"] = (short + latent.num_rotated, hidden)
    tensors["self_attn.kv_a_layernorm.weight"] = (short,)
    tensors["self_attn.kv_b_proj.weight"] = (heads * (latent.num_plain + latent.num_values), short)
    tensors["self_attn.o_proj.weight"] = (hidden, heads * latent.num_values)
    return tensors


def _mlp(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    hidden = architecture.hidden_size
    tensors: dict[str, tuple[int, ...]] = {"post_attention_layernorm.weight": (hidden,)}
    if not architecture.num_experts:
        return tensors | _gated("mlp.", hidden, architecture.intermediate_size)
    if architecture.has_sinks:
        return tensors | _stacked(architecture.num_experts, hidden, architecture.moe_intermediate_size)
    tensors["mlp.gate.weight"] = (architecture.num_experts, hidden)
    if architecture.router is not None:
        tensors["mlp.gate.e_score_correction_bias"] = (architecture.num_experts,)
        tensors |= _gated("mlp.shared_experts.", hidden, architecture.router.shared_size)
    for number in range(architecture.num_experts):
        tensors |= _gated(f"mlp.experts.{number}.", hidden, architecture.moe_intermediate_size)
    return tensors


def _stacked(experts: int, hidden: int, size: int) -> dict[str, tuple[int, ...]]:
    return {
        "mlp.router.weight": (experts, hidden),
        "mlp.router.bias": (experts,),
        "mlp.experts.gate_up_proj": (experts, hidden, 2 * size),
        "mlp.experts.gate_up_proj_bias": (experts, 2 * size),
        "mlp.experts.down_proj": (experts, size, hidden),
        "mlp.experts.down_proj_bias": (experts, hidden),
    }


def _gated(prefix: str, hidden: int, size: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}gate_proj.weight": (size, hidden),
        f"{prefix}up_proj.weight": (size, hidden),
        f"{prefix}down_proj.weight": (hidden, size),
    }
