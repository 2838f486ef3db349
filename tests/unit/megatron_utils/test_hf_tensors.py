"""What preflight expects in a model's files is what transformers writes there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.tiny_models import make_llama, make_qwen3, make_qwen3_moe
from vime.backends.megatron_utils.architecture import as_critic, read_architecture
from vime.backends.megatron_utils.hf_tensors import expected_tensors
from vime.config.model_files import read_headers


def make_qwen2(directory: Path) -> Path:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from tests.helpers.tiny_models import COMMON

    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**COMMON, num_attention_heads=4, num_key_value_heads=2))
    model.save_pretrained(directory)
    return directory


FAMILIES: dict[str, Callable[[Path], Path]] = {
    "qwen3": make_qwen3,
    "qwen3 with a head of its own": lambda directory: make_qwen3(directory, tied=False),
    "llama": make_llama,
    "qwen2": make_qwen2,
    "qwen3_moe": make_qwen3_moe,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tensors_of_a_family_are_those_that_transformers_writes(family: str, tmp_path: Path) -> None:
    directory = str(FAMILIES[family](tmp_path / "model"))
    written = {name: header.shape for name, header in read_headers(directory, flag="--hf-checkpoint").items()}
    architecture = read_architecture(directory)
    if architecture.is_tied:
        written.pop("lm_head.weight", None)
    assert expected_tensors(architecture) == written


def test_a_critic_has_a_value_head_and_no_vocabulary_head(tmp_path: Path) -> None:
    architecture = as_critic(read_architecture(str(make_llama(tmp_path / "model"))))
    tensors = expected_tensors(architecture)
    assert tensors["score.weight"] == (1, 64)
    assert "lm_head.weight" not in tensors
