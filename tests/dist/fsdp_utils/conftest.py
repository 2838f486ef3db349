"""All cases of this folder run in one launch of two processes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.helpers.fsdp_cases import FAMILIES, fsdp_cases, make_family, with_padding_token
from tests.helpers.megatron_models import SHAPE, make_model, make_rows
from tests.helpers.megatron_worker import Answers, answers_of


@pytest.fixture(scope="session")
def families(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of tiny models: one per family, one that packing breaks, and some whose parts do not fit."""
    directory = tmp_path_factory.mktemp("fsdp-models")
    for kind in [*FAMILIES, "mamba"]:
        make_family(kind, directory / kind)
    make_model("qwen2", directory / "qwen2")
    make_model("qwen2", directory / "reference", seed=1)
    shutil.copytree(directory / "gemma", directory / "mixed")
    shutil.copy(directory / "mistral" / "config.json", directory / "mixed" / "config.json")
    shutil.copytree(directory / "qwen2", directory / "padded")
    with_padding_token(directory / "padded", int(make_rows()[0].tokens[1]))
    for name in ("two-labels", "broken-file"):
        shutil.copytree(directory / "qwen2", directory / name)
    save_file({"score.weight": torch.zeros(2, SHAPE["hidden_size"])}, directory / "two-labels" / "score.safetensors")
    (directory / "broken-file" / "score.safetensors").write_bytes(b"no tensors")
    (directory / "t5").mkdir()
    (directory / "t5" / "config.json").write_text(json.dumps({"model_type": "t5"}))
    return directory


@pytest.fixture(scope="session")
def fsdp(families: Path, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    work = tmp_path_factory.mktemp("fsdp-work")
    return answers_of(fsdp_cases(families, work), directory=work / "launch")
