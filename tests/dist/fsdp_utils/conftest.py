"""All cases of this folder run in one launch of two processes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.helpers.dist_launch import launch
from tests.helpers.fsdp_cases import FAMILIES, fsdp_cases, make_family
from tests.helpers.megatron_models import SHAPE, make_model


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
    for name in ("two-labels", "broken-file"):
        shutil.copytree(directory / "qwen2", directory / name)
    save_file({"score.weight": torch.zeros(2, SHAPE["hidden_size"])}, directory / "two-labels" / "score.safetensors")
    (directory / "broken-file" / "score.safetensors").write_bytes(b"no tensors")
    (directory / "t5").mkdir()
    (directory / "t5" / "config.json").write_text(json.dumps({"model_type": "t5"}))
    return directory


@pytest.fixture(scope="session")
def fsdp(families: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Any]]:
    """Case name -> the answer of each rank that took part."""
    work = tmp_path_factory.mktemp("fsdp-work")
    by_rank = launch(
        "tests.helpers.megatron_worker:run",
        world_size=2,
        directory=work / "launch",
        arguments={"cases": fsdp_cases(families, work)},
        deadline_s=240,
    )
    return lambda name: [rank[name] for rank in by_rank if name in rank]
