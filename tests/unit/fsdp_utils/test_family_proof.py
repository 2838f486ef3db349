"""What config.json alone says about packing: families are proven on both sides of every length that they name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from tests.helpers.megatron_models import EXPERTS, SHAPE
from vime.backends.fsdp_utils.hf_config import read_config
from vime.backends.fsdp_utils.probe import check_family
from vime.config.parse import parse
from vime.ray.preflight import preflight
from vime.types import ConfigError

FACTORS = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}  # one for each of the 8 / 2 frequencies of a head
LONGROPE = {"rope_type": "longrope", "original_max_position_embeddings": 128, **FACTORS}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
ROPES = {"rope_theta": 10000.0}
CHUNKED = {"attention_chunk_size": 128, "floor_scale": 128, "num_local_experts": 2, "intermediate_size_mlp": 64}
ACCEPTED: dict[str, tuple[str, dict[str, Any]]] = {
    "no length": ("qwen3", {}),
    "experts": ("qwen3_moe", EXPERTS),
    "a window in every layer": ("mistral", {"sliding_window": 4096}),
    "a window in every second layer": ("gemma2", {"head_dim": 16, "sliding_window": 1024, "pad_token_id": 0}),
    "a window in five of six layers": ("gemma3_text", {"head_dim": 16, "num_hidden_layers": 12, "pad_token_id": 0}),
    "llama3": (
        "llama", {"rope_parameters": {**LLAMA3, **ROPES, "original_max_position_embeddings": 128}},
    ),
    "yarn": ("qwen3", {"rope_parameters": {**YARN, **ROPES}}),
    "positions learned": ("opt", {"ffn_dim": 64, "pad_token_id": 1, "word_embed_proj_dim": 64}),
}  # fmt: skip
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "longrope": ("phi3", {"rope_parameters": {**LONGROPE, **ROPES}, "pad_token_id": 0}, "rope_type 'longrope'"),
    "dynamic": (
        "llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, **ROPES}},
        "rope_type 'dynamic'.*the model is the same without its rope_scaling",
    ),
    "chunks": ("llama4_text", CHUNKED, "attention_chunk_size 128, floor_scale 128.*does not keep packed sequences"),
    "convolutions between attention": (
        "lfm2", {"full_attn_idxs": [2, 3], "block_ff_dim": 64}, "'lfm2' does not keep packed sequences apart",
    ),
    "recurrent": ("mamba", {}, "'mamba' does not keep packed sequences apart"),
    "sinks": ("gpt_oss", {"num_local_experts": 2, "head_dim": 16}, "sliding_window 128.*it cannot be shown.*s_aux"),
}  # fmt: skip


def written(directory: Path, kind: str, changes: dict[str, Any]) -> Path:
    settings = AutoConfig.for_model(kind, **{**SHAPE, "max_position_embeddings": 512, **changes})
    if kind == "gpt_oss":
        settings.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0}
    settings.save_pretrained(directory)
    return directory


@pytest.mark.parametrize("name", ACCEPTED)
def test_a_family_that_keeps_packed_sequences_apart_is_accepted_on_both_sides_of_its_lengths(
    name: str, tmp_path: Path
) -> None:
    kind, changes = ACCEPTED[name]
    settings = read_config(str(written(tmp_path, kind, changes)))
    before = torch.get_rng_state()
    check_family(settings, flag="--hf-checkpoint", checkpoint="here")
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", REFUSED)
def test_what_changes_beyond_a_length_in_a_pack_is_refused_before_anything_starts(name: str, tmp_path: Path) -> None:
    kind, changes, says = REFUSED[name]
    written(tmp_path, kind, changes)
    config = parse(["--hf-checkpoint", str(tmp_path), "--train-backend", "fsdp"])
    with pytest.raises(ConfigError, match=f"(?s){says}") as caught:
        preflight(config, is_async=False)
    # what to do next: another model, or the other backend for the families that it trains
    assert "Choose another model" in str(caught.value) or "No backend of Vime" in str(caught.value)


def test_a_refusal_names_the_backend_that_trains_the_model(tmp_path: Path) -> None:
    written(tmp_path, "gpt_neox", {})
    config = parse(["--hf-checkpoint", str(tmp_path)])
    with pytest.raises(ConfigError, match=r"'gpt_neox' is not supported .* --train-backend fsdp trains this model"):
        preflight(config, is_async=False)
    written(tmp_path, "mamba", {})
    with pytest.raises(ConfigError) as caught:
        preflight(config, is_async=False)
    assert "fsdp" not in str(caught.value)
