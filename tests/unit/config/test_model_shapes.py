"""Sizes of a model are read whatever its family calls them, and a run is refused only for what it needs to know."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.fsdp_cases import FAMILIES
from tests.helpers.megatron_models import SHAPE
from vime.config.command_line import parse_command_line
from vime.config.hf_config import read_model_shape
from vime.config.parse import Config, parse
from vime.types import ConfigError

GPT2 = {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 128, "vocab_size": 48}
BLOOM = {"n_layer": 2, "hidden_size": 32, "n_head": 4, "vocab_size": 48}
OTHERS: dict[str, dict[str, Any]] = {
    "gpt2": GPT2,
    "falcon": {**SHAPE, "ffn_hidden_size": None},
    "opt": {**SHAPE, "ffn_dim": 64},
    "gemma3_text": {"head_dim": 16},
    "gemma3": {"text_config": {**SHAPE, "head_dim": 16}, "vision_config": {"num_hidden_layers": 1}},
}
SAME = ("hidden_size", "num_attention_heads", "vocab_size", "max_position_embeddings")
HUB_GEMMA3 = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34}
"""Of the text_config that is published with the 4B model: the rest is left to the class."""


def write(directory: Path, kind: str, **values: Any) -> None:
    from transformers import AutoConfig

    AutoConfig.for_model(kind, **values).save_pretrained(directory)


def checked(directory: Path, *flags: str) -> Config:
    (directory / "model.safetensors").write_bytes(b"")
    (directory / "train.jsonl").write_text('{"input": "1"}\n')
    data = ["--hf-checkpoint", str(directory), "--prompt-data", str(directory / "train.jsonl"), "--device", "cpu"]
    run = ["--num-rollout", "3", "--rm-type", "exact_match", "--rollout-max-response-len", "48"]
    return parse_command_line([*data, *run, "--rollout-batch-size", "4", *flags])


@pytest.mark.parametrize("kind", [*FAMILIES, *OTHERS])
def test_fsdp_accepts_every_family_as_transformers_saves_it(kind: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    given = OTHERS[kind] if kind in OTHERS else {**SHAPE, **FAMILIES[kind]}
    write(tmp_path, kind, **given)
    checked(tmp_path, "--train-backend", "fsdp")
    shape, text = read_model_shape(str(tmp_path)), AutoConfig.from_pretrained(tmp_path).get_text_config()
    for field, name in (("num_layers", "num_hidden_layers"), *(2 * (same,) for same in SAME)):
        assert getattr(shape, field) == getattr(text, name), field


def test_gpt2_without_a_width_of_its_mlp_has_four_times_the_hidden_size(tmp_path: Path) -> None:
    write(tmp_path, "gpt2", **GPT2)
    assert read_model_shape(str(tmp_path)).intermediate_size == 4 * 32


def test_a_model_without_positions_needs_a_context_length(tmp_path: Path) -> None:
    write(tmp_path, "bloom", **BLOOM)  # ALiBi
    with pytest.raises(ConfigError, match=r"bloom does not say how many positions.*--rollout-max-context-len TOKENS"):
        checked(tmp_path, "--train-backend", "fsdp")
    assert checked(tmp_path, "--train-backend", "fsdp", "--rollout-max-context-len", "256")


def test_what_gemma3_leaves_to_its_class_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": HUB_GEMMA3}))
    assert checked(tmp_path, "--train-backend", "fsdp", "--rollout-max-context-len", "256")
    shape = read_model_shape(str(tmp_path))
    assert (shape.model_type, shape.num_layers, shape.hidden_size) == ("gemma3", 34, 2560)


def test_megatron_needs_to_know_what_it_cuts(tmp_path: Path) -> None:
    write(tmp_path, "gpt2", **GPT2)
    with pytest.raises(ConfigError, match=r"model_type gpt2 does not say intermediate_size.*--train-backend fsdp"):
        checked(tmp_path)


def test_a_config_without_layers_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "x", "hidden_size": 8}))
    with pytest.raises(ConfigError, match=r"num_hidden_layers or n_layer"):
        checked(tmp_path, "--train-backend", "fsdp")


@pytest.mark.parametrize(("per_node", "tp", "is_taken"), [(8, 4, True), (4, 8, True), (6, 4, False), (8, 3, False)])
def test_a_tensor_parallel_group_is_not_cut_by_the_end_of_a_node(per_node: int, tp: int, is_taken: bool) -> None:
    from vime.config.layout import _check_nodes

    config = parse(
        ["--actor-num-nodes", "2", "--actor-num-gpus-per-node", str(per_node), "--tensor-model-parallel-size", str(tp)]
    )
    if is_taken:
        _check_nodes(config.parallel, config.cluster)
    else:
        with pytest.raises(ConfigError, match=rf"--tensor-model-parallel-size {tp} on nodes of {per_node} ranks"):
            _check_nodes(config.parallel, config.cluster)
