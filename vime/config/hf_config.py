"""What the checks need to know of the model, read from config.json without importing transformers."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vime.config.model_files import what_is_there
from vime.types import ConfigError

SPELLINGS = {
    "num_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden_size": ("hidden_size", "n_embd", "n_embed", "d_model", "emb_dim"),
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"),
    "num_key_value_heads": ("num_key_value_heads", "num_kv_heads"),
    "head_dim": ("head_dim",),
    "intermediate_size": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
    "num_experts": ("num_experts", "num_local_experts", "n_routed_experts"),
    "num_experts_per_token": ("num_experts_per_tok",),
    "moe_intermediate_size": ("moe_intermediate_size",),
    "vocab_size": ("vocab_size",),
    "max_position_embeddings": ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx"),
}
"""Names of a field in config.json, by model family."""
REQUIRED = ("num_layers", "hidden_size")
VISION_FAMILIES = ("idefics3",)
"""Model types whose images are trained: each tile of an image has equally many tokens, and positions are those of
text."""
EXPECTED = ("num_attention_heads", "intermediate_size", "vocab_size", "max_position_embeddings")
"""Some families leave these to their class in transformers (Gemma 3) or have none (ALiBi has no last position)."""


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
    vocab_size: int  # 0: unsaid
    max_position_embeddings: int  # 0: unsaid
    window: int = 0  # of a layer in `window_layers`: a token sees itself and the window - 1 before it. 0: no such layer
    window_layers: tuple[int, ...] = ()  # their numbers, from 0
    attention_weights: int = 0  # numbers in the matrices of a layer's attention. 0: those of heads of head_dim
    shared_expert_size: int = 0  # columns of the MLP that every token of a layer with experts goes through
    num_dense_layers: int = 0  # the first of a model with experts that have none
    unsaid: tuple[str, ...] = ()  # of EXPECTED: config.json does not say them, and what stands above is an assumption


def read_record(directory: str, *, flag: str = "--hf-checkpoint") -> dict[str, object]:
    """DIRECTORY/config.json as it is written; ConfigError when it is missing or no JSON object."""
    path, where = Path(os.path.expanduser(directory)) / "config.json", f"{flag} {directory}"
    if not path.is_file():
        raise ConfigError(
            f"{where}: no config.json there. {what_is_there(directory)}Expected a Hugging Face "
            "model directory with config.json, *.safetensors and tokenizer files. Check the path."
        )
    try:
        return dict(json.loads(path.read_text()).items())
    except (OSError, ValueError, AttributeError) as error:
        raise _unreadable(where, error) from error


def text_entries(record: dict[str, object]) -> dict[str, object]:
    """Return the record merged with that of the text part of a model with vision."""
    text = record.get("text_config")
    return record | text if isinstance(text, dict) else record


def read_model_shape(directory: str, *, flag: str = "--hf-checkpoint") -> ModelShape:
    """Read the shape from DIRECTORY/config.json; ConfigError when it is missing or not a causal language model's."""
    return shape_of(read_record(directory, flag=flag), f"{flag} {directory}")


def shape_of(record: dict[str, object], where: str) -> ModelShape:
    """Build the shape. Missing values are assumed, which is enough for a cost model: one head as wide as the hidden
    state, an MLP of four times that. `where`: flag and directory, for the ConfigError of a record that is not a causal
    language model's."""
    try:
        said = _numbers(text_entries(record))
        hidden, heads = said["hidden_size"], said.get("num_attention_heads", 1)
        intermediate = said.get("intermediate_size", 4 * hidden)
        num_experts = said.get("num_experts", 0)
        entries = text_entries(record)
        window, window_layers = _windows(entries, said["num_layers"])
        latent, head_dim = _latent_sizes(entries, hidden, heads)
        return ModelShape(
            model_type=str(record["model_type"]),
            num_layers=said["num_layers"],
            hidden_size=hidden,
            num_attention_heads=heads,
            num_key_value_heads=said.get("num_key_value_heads", heads),
            head_dim=head_dim or said.get("head_dim", hidden // heads),
            intermediate_size=intermediate,
            num_experts=num_experts,
            num_experts_per_token=said.get("num_experts_per_token", 0),
            moe_intermediate_size=said.get("moe_intermediate_size", intermediate if num_experts else 0),
            vocab_size=said.get("vocab_size", 0),
            max_position_embeddings=said.get("max_position_embeddings", 0),
            window=window,
            window_layers=window_layers,
            attention_weights=latent,
            shared_expert_size=_count(entries, "n_shared_experts") * said.get("moe_intermediate_size", 0),
            num_dense_layers=_count(entries, "first_k_dense_replace") if num_experts else 0,
            unsaid=tuple(name for name in EXPECTED if name not in said),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise _unreadable(where, error) from error


def _latent_sizes(record: Mapping[str, object], hidden: int, heads: int) -> tuple[int, int]:
    """Return the numbers in the matrices of multi-head latent attention, and a head as wide as its keys and values are
    on average, by which scores and weighted values are counted; 0 and 0 for other attention."""
    short, queries = _count(record, "kv_lora_rank"), _count(record, "q_lora_rank")
    plain, turned, values = (_count(record, name) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    if not short:
        return 0, 0
    wide = heads * (plain + turned)
    query = queries * (hidden + wide) if queries else hidden * wide
    weights = query + hidden * (short + turned) + short * heads * (plain + values) + heads * values * hidden
    return weights, (plain + turned + values) // 2


def _count(record: Mapping[str, object], name: str) -> int:
    value = record.get(name)
    return value if isinstance(value, int) else 0


def _windows(record: Mapping[str, object], num_layers: int) -> tuple[int, tuple[int, ...]]:
    """Return the window and the layers that have it. A list by layer decides; without one Mistral has it in every
    layer, GPT-OSS in every other one, and Gemma 3 in all but each `sliding_window_pattern`-th."""
    window, kinds, family = record.get("sliding_window"), record.get("layer_types"), record.get("model_type")
    if not isinstance(window, int) or window <= 0 or record.get("use_sliding_window") is False:
        return 0, ()
    every = record.get("sliding_window_pattern") or 6
    layers: tuple[int, ...] = ()
    if isinstance(kinds, list):
        layers = tuple(number for number, kind in enumerate(kinds[:num_layers]) if kind == "sliding_attention")
    elif family == "mistral":
        layers = tuple(range(num_layers))
    elif family == "gpt_oss":
        layers = tuple(range(0, num_layers, 2))
    elif family == "gemma3_text" and isinstance(every, int):
        layers = tuple(number for number in range(num_layers) if (number + 1) % every)
    return (window, layers) if layers else (0, ())


def _unreadable(where: str, error: Exception) -> ConfigError:
    known = "; ".join(" or ".join(SPELLINGS[name]) for name in REQUIRED)
    return ConfigError(
        f"{where}: config.json cannot be read as a decoder-only language model's config: "
        f"{type(error).__name__} {error}. Expected JSON with model_type; {known}."
    )


def _numbers(record: Mapping[str, object]) -> dict[str, int]:
    """Map each field to its value under any of its names; null and 0 count as missing; of a list per layer the
    largest."""
    found = {field: next(filter(None, map(record.get, names)), None) for field, names in SPELLINGS.items()}
    return {field: _whole(value) for field, value in found.items() if value is not None}


def _whole(value: object) -> int:
    largest = max(value) if isinstance(value, list) else value
    if not isinstance(largest, str | int | float):
        raise TypeError(f"expected a number, got {value!r}")
    return int(largest)


def num_tokenizer_ids(directory: str) -> int | None:
    """Return the highest token id of DIRECTORY/tokenizer.json + 1; None when it is not known. An embedding is often
    padded beyond it."""
    try:
        record = json.loads((Path(os.path.expanduser(directory)) / "tokenizer.json").read_text())
        vocabulary = record["model"]["vocab"]  # {token: id}, or a list by id
        ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
        return 1 + int(max([*ids, *(token["id"] for token in record.get("added_tokens", []))]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def has_latent_attention(directory: str) -> bool:
    """Whether keys and values of the model come from a short vector (DeepSeek's). False where no config.json says."""
    try:
        return bool(json.loads((Path(os.path.expanduser(directory)) / "config.json").read_text()).get("kv_lora_rank"))
    except (OSError, ValueError, AttributeError):
        return False


def has_weights(directory: str) -> bool:
    return any(Path(os.path.expanduser(directory)).glob("*.safetensors"))
