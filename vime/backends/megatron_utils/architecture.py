"""What an HF config says about the model, in plain numbers; models that would train wrongly are refused here.

Refusing is the point: with a rotary scaling, an attention bias or a sliding window silently dropped a model still
trains, but its log-probabilities differ from the engine's.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vime.types import ConfigError
from vime.utils.imports import MODELS_OF_TRANSFORMERS, without, without_collector

SUPPORTED_MODEL_TYPES = ("llama", "qwen2", "qwen3", "qwen3_moe")
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""megatron-core has these numbers of Llama 3 built in; only `factor` is free."""

NUMBERS: dict[str, type] = {
    **dict.fromkeys(("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads"), int),
    **dict.fromkeys(("num_key_value_heads", "vocab_size", "max_position_embeddings"), int),
    "rms_norm_eps": float,
    "tie_word_embeddings": bool,
}
NUMBERS_OF: dict[str, dict[str, type]] = {
    "llama": {**NUMBERS, "head_dim": int},
    "qwen2": NUMBERS,
    "qwen3": {**NUMBERS, "head_dim": int},
}
"""What `read_architecture` reads, and what it is in a config.json that needs no completion. One of a model with experts
always does: transformers renames its entries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A decoder with RMSNorm, rotary positions, grouped-query attention and a SwiGLU MLP, or experts that are such."""

    model_type: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    norm_epsilon: float
    rope_theta: float
    rope_llama3_factor: float | None  # None: positions are not scaled
    is_tied: bool  # one matrix embeds tokens and makes logits
    has_qkv_bias: bool
    has_qk_norm: bool
    experts: Experts | None = None  # None: every layer is dense
    has_value_head: bool = False  # a critic: one number a token instead of logits


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The MoE part of a layer: each token goes to its `top_k` experts, weighted by a softmax of the router's logits."""

    count: int
    ffn_hidden_size: int  # of one expert
    top_k: int
    is_normalized: bool  # the chosen weights sum to 1, that is the softmax runs over the chosen experts only


def read_architecture(directory: str, *, flag: str = "--hf-checkpoint") -> Architecture:
    """Read DIRECTORY/config.json; ConfigError for a model this trainer cannot compute exactly."""
    path = Path(directory).expanduser()
    try:
        written = json.loads((path / "config.json").read_text())
        model_type = written.get("model_type")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{flag} {directory}: config.json cannot be read: {error}.") from error
    if model_type not in SUPPORTED_MODEL_TYPES:
        raise ConfigError(
            f"{flag} {directory}: model_type {model_type!r} is not supported by the trainer. "
            f"Expected one of {', '.join(SUPPORTED_MODEL_TYPES)}."
        )
    hf = Written(written) if is_complete(written) else _completed(path)
    _refuse_unsupported(hf, f"{flag} {directory}")
    rope_theta, llama3_factor = _rope(hf, f"{flag} {directory}")
    return Architecture(
        model_type=model_type,
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        ffn_hidden_size=hf.intermediate_size,
        num_heads=hf.num_attention_heads,
        num_kv_heads=hf.num_key_value_heads,
        head_dim=_optional(hf, "head_dim") or hf.hidden_size // hf.num_attention_heads,
        vocab_size=hf.vocab_size,
        max_positions=hf.max_position_embeddings,
        norm_epsilon=hf.rms_norm_eps,
        rope_theta=rope_theta,
        rope_llama3_factor=llama3_factor,
        is_tied=hf.tie_word_embeddings,
        has_qkv_bias=model_type == "qwen2",
        has_qk_norm=model_type in ("qwen3", "qwen3_moe"),
        experts=_experts(hf) if model_type == "qwen3_moe" else None,
    )


class Written:
    """config.json as it is written, in the place of the object that transformers makes of it."""

    def __init__(self, entries: dict[str, Any]) -> None:
        self._entries = entries

    def __getattr__(self, name: str) -> Any:
        return self._entries[name]

    def to_dict(self) -> dict[str, Any]:
        return self._entries


def is_complete(entries: dict[str, Any]) -> bool:
    """Whether config.json, of a supported model, says by itself all that is read here: as transformers writes it since
    5.0. Then nobody has to load transformers, which brings torch: 3 CPU s before a run begins, and 1.5 in each trainer.

    What is missing, spelled as before 5.0 or of another type is left to transformers, which knows each model's
    defaults. Of entries that some models do not have, every default is the value that is expected.
    """
    kinds = NUMBERS_OF.get(entries["model_type"])
    if kinds is None:
        return False
    rope = entries.get("rope_parameters")
    return (
        str(entries.get("transformers_version", "")).startswith("5.")
        and all(type(entries.get(name)) is kind for name, kind in kinds.items())
        and entries["num_attention_heads"] > 0
        and entries["hidden_size"] % entries["num_attention_heads"] == 0
        and isinstance(rope, dict)
        and rope.keys() == {"rope_theta", "rope_type"}
        and rope["rope_type"] == "default"
    )


def _completed(path: Path) -> Any:
    with without(MODELS_OF_TRANSFORMERS), without_collector():
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(str(path), local_files_only=True)


def as_critic(architecture: Architecture) -> Architecture:
    """The same transformer with a value head: nothing is left to be tied to the embedding."""
    return replace(architecture, is_tied=False, has_value_head=True)


def _experts(hf: Any) -> Experts:
    return Experts(
        count=hf.num_experts,
        ffn_hidden_size=hf.moe_intermediate_size,
        top_k=hf.num_experts_per_tok,
        is_normalized=hf.norm_topk_prob,
    )


def _optional(hf: Any, name: str) -> Any:
    """A config entry that only some model types have."""
    return hf.to_dict().get(name)


def _refuse_unsupported(hf: Any, where: str) -> None:
    for name, expected in (
        ("attention_bias", False),
        ("mlp_bias", False),
        ("use_sliding_window", False),
        ("hidden_act", "silu"),
        ("attention_dropout", 0.0),
        ("partial_rotary_factor", 1.0),
        ("decoder_sparse_step", 1),
        ("mlp_only_layers", []),
    ):
        got = _optional(hf, name)
        if got not in (None, expected):
            raise ConfigError(
                f"{where}: config.json has {name}={got!r}; the trainer computes {name}={expected!r} only, so its "
                "log-probabilities would differ from the engine's. Use another model."
            )


def _rope(hf: Any, where: str) -> tuple[float, float | None]:
    """(theta, Llama-3 factor or None). transformers 5 gathers both in `rope_parameters`."""
    parameters = dict(hf.rope_parameters or {})
    theta, kind = parameters.pop("rope_theta", None), parameters.pop("rope_type", "default")
    if theta is None:
        raise ConfigError(f"{where}: config.json names no rope_theta. Expected a number; add it.")
    if kind == "default":
        return float(theta), None
    factor = parameters.pop("factor", None)
    if kind == "llama3" and factor is not None and parameters == LLAMA3_ROPE:
        return float(theta), float(factor)
    raise ConfigError(
        f"{where}: rotary scaling {kind!r} with {parameters} is not supported. Expected none, or llama3 with "
        f"{LLAMA3_ROPE} and any factor. Use another model."
    )
