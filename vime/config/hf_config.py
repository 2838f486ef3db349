"""What the checks need to know of the model, read from config.json without importing transformers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from vime.types import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The numbers of an HF config that decide which layouts and lengths are possible, and what a token costs."""

    model_type: str
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    num_experts: int  # 0: every layer is dense
    num_experts_per_token: int
    moe_intermediate_size: int
    vocab_size: int
    max_position_embeddings: int


def read_model_shape(directory: str) -> ModelShape:
    """Read DIRECTORY/config.json; ConfigError when it is missing or not a causal language model's."""
    path = Path(directory).expanduser() / "config.json"
    if not path.is_file():
        raise ConfigError(
            f"--hf-checkpoint {directory}: no config.json there. Expected a Hugging Face model directory with "
            "config.json, *.safetensors and tokenizer files. Check the path."
        )
    try:
        record = json.loads(path.read_text())
        heads, hidden = int(record["num_attention_heads"]), int(record["hidden_size"])
        return ModelShape(
            model_type=str(record["model_type"]),
            num_layers=int(record["num_hidden_layers"]),
            hidden_size=hidden,
            num_attention_heads=heads,
            num_key_value_heads=int(record.get("num_key_value_heads") or heads),
            head_dim=int(record.get("head_dim") or hidden // heads),
            intermediate_size=int(record["intermediate_size"]),
            num_experts=int(record.get("num_experts") or record.get("num_local_experts") or 0),
            num_experts_per_token=int(record.get("num_experts_per_tok") or 0),
            moe_intermediate_size=int(record.get("moe_intermediate_size") or 0),
            vocab_size=int(record["vocab_size"]),
            max_position_embeddings=int(record["max_position_embeddings"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"--hf-checkpoint {directory}: {path.name} cannot be read as a decoder-only language model's config: "
            f"{type(error).__name__} {error}. Expected JSON with model_type, num_hidden_layers, hidden_size, "
            "num_attention_heads, intermediate_size, vocab_size and max_position_embeddings."
        ) from error


def has_weights(directory: str) -> bool:
    return any(Path(directory).expanduser().glob("*.safetensors"))
