"""What preflight expects in a model's files is what transformers writes there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.families import EXPORTS, MEGATRON
from tests.helpers.tiny_models import make_llama
from vime.backends.megatron_utils.architecture import as_critic, read_architecture
from vime.backends.megatron_utils.hf_tensors import expected_tensors
from vime.config.model_files import read_headers


@pytest.mark.parametrize("family", EXPORTS)
def test_the_tensors_of_a_family_are_those_that_transformers_writes(family: str, tmp_path: Path) -> None:
    directory = str(EXPORTS[family](tmp_path / "model"))
    written = {name: header.shape for name, header in read_headers(directory, flag="--hf-checkpoint").items()}
    architecture = read_architecture(directory)
    assert [architecture.model_type in each.model_types for each in MEGATRON if family in each.exports] == [True]
    if architecture.is_tied:
        written.pop("lm_head.weight", None)
    assert expected_tensors(architecture) == written


def test_a_critic_has_a_value_head_and_no_vocabulary_head(tmp_path: Path) -> None:
    architecture = as_critic(read_architecture(str(make_llama(tmp_path / "model"))))
    tensors = expected_tensors(architecture)
    assert tensors["score.weight"] == (1, 64)
    assert "lm_head.weight" not in tensors
