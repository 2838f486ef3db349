"""What an HF config says about the model, in plain numbers; models that would train wrongly are refused here.

Refusing is the point: with a rotary scaling, an attention bias or a sliding window silently dropped a model still
trains, but its log-probabilities differ from the engine's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from vime.config.hf_config import ModelShape, read_record, shape_of
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
"""The entries that `read_architecture` reads, with their types in a config.json that needs no defaults from
transformers. A model with experts always needs them: transformers renames its entries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture(ModelShape):
    """A decoder with RMSNorm, rotary positions, grouped-query attention and a SwiGLU MLP, or experts that are such:
    each token goes to `num_experts_per_token` of them, weighted by a softmax of the router's logits."""

    norm_epsilon: float
    rope_theta: float
    rope_llama3_factor: float | None  # None: positions are not scaled
    is_tied: bool  # one matrix embeds tokens and makes logits
    has_qkv_bias: bool
    has_qk_norm: bool
    normalizes_chosen: bool  # the weights of the chosen experts sum to 1: the softmax runs over these only
    has_value_head: bool = False  # a critic: one number a token instead of logits


def read_architecture(directory: str, *, flag: str = "--hf-checkpoint") -> Architecture:
    """Read DIRECTORY/config.json; ConfigError for a model this trainer cannot compute exactly."""
    where, record = f"{flag} {directory}", read_record(directory, flag=flag)
    model_type = record.get("model_type")
    if model_type not in SUPPORTED_MODEL_TYPES:
        raise ConfigError(
            f"{where}: model_type {model_type!r} is not supported by the trainer. "
            f"Expected one of {', '.join(SUPPORTED_MODEL_TYPES)}."
        )
    if not is_complete(record):
        record = _completed(directory)
    _refuse_unsupported(record, where)
    rope_theta, llama3_factor = _rope(record, where)
    epsilon = record["rms_norm_eps"]
    if not isinstance(epsilon, int | float):
        raise ConfigError(f"{where}: config.json has rms_norm_eps={epsilon!r}, expected a number.")
    return Architecture(
        **asdict(shape_of(record, where)),
        norm_epsilon=epsilon,
        rope_theta=rope_theta,
        rope_llama3_factor=llama3_factor,
        is_tied=bool(record["tie_word_embeddings"]),
        has_qkv_bias=model_type == "qwen2",
        has_qk_norm=model_type in ("qwen3", "qwen3_moe"),
        normalizes_chosen=bool(record.get("norm_topk_prob", True)),
    )


def is_complete(entries: dict[str, object]) -> bool:
    """Whether the config.json of a supported model has by itself everything that is read here, as transformers writes
    it since 5.0. Then transformers, which imports torch, is not needed: 3 CPU s before a run begins, and 1.5 in each
    trainer.

    What is missing, spelled as before 5.0 or of another type is left to transformers, which knows each model's
    defaults. Of entries that some models do not have, every default is the value that is expected.
    """
    kinds = NUMBERS_OF.get(str(entries["model_type"]))
    if kinds is None:
        return False
    rope, heads, hidden = (entries.get(name) for name in ("rope_parameters", "num_attention_heads", "hidden_size"))
    return (
        str(entries.get("transformers_version", "")).startswith("5.")
        and all(type(entries.get(name)) is kind for name, kind in kinds.items())
        and isinstance(heads, int)
        and isinstance(hidden, int)
        and heads > 0
        and hidden % heads == 0
        and isinstance(rope, dict)
        and rope.keys() == {"rope_theta", "rope_type"}
        and rope["rope_type"] == "default"
    )


def _completed(directory: str) -> dict[str, object]:
    with without(MODELS_OF_TRANSFORMERS), without_collector():
        from transformers import AutoConfig

        return dict(AutoConfig.from_pretrained(str(Path(directory).expanduser()), local_files_only=True).to_dict())


def as_critic(architecture: Architecture) -> Architecture:
    """Return the same transformer with a value head, so nothing is tied to the embedding."""
    return replace(architecture, is_tied=False, has_value_head=True)


def _refuse_unsupported(record: dict[str, object], where: str) -> None:
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
        got = record.get(name)  # some model types do not have it
        if got not in (None, expected):
            raise ConfigError(
                f"{where}: config.json has {name}={got!r}; the trainer computes {name}={expected!r} only, so its "
                "log-probabilities would differ from the engine's. Use another model."
            )


def _rope(record: dict[str, object], where: str) -> tuple[float, float | None]:
    """Return (theta, Llama-3 factor or None). transformers 5 gathers both in `rope_parameters`."""
    said = record.get("rope_parameters")
    parameters: dict[str, object] = dict(said) if isinstance(said, Mapping) else {}
    theta, kind = parameters.pop("rope_theta", None), parameters.pop("rope_type", "default")
    if not isinstance(theta, int | float):
        raise ConfigError(f"{where}: config.json names no rope_theta. Expected a number; add it.")
    if kind == "default":
        return float(theta), None
    factor = parameters.pop("factor", None)
    if kind == "llama3" and isinstance(factor, int | float) and parameters == LLAMA3_ROPE:
        return float(theta), float(factor)
    raise ConfigError(
        f"{where}: rotary scaling {kind!r} with {parameters} is not supported. Expected none, or llama3 with "
        f"{LLAMA3_ROPE} and any factor. Use another model."
    )
