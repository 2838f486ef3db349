"""All cases of this folder run in one launch of four processes: starting them costs more than the work."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.agreement_cases import agreement_cases
from tests.helpers.algorithm_cases import algorithm_cases
from tests.helpers.dist_launch import launch
from tests.helpers.megatron_cases import KINDS, all_cases
from tests.helpers.megatron_models import make_model
from tests.helpers.ppo_cases import ppo_cases


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of tiny models: one per kind, a reference model, and one whose config and weights do not match."""
    directory = tmp_path_factory.mktemp("megatron-models")
    for kind in KINDS:
        make_model(kind, directory / kind)
    make_model("qwen2", directory / "reference", seed=1)
    make_model("qwen2_critic", directory / "critic", seed=2)
    shutil.copytree(directory / "qwen2", directory / "mixed")
    shutil.copy(directory / "qwen3" / "config.json", directory / "mixed" / "config.json")
    return directory


@pytest.fixture(scope="session")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where cases write checkpoints and models."""
    return tmp_path_factory.mktemp("megatron-work")


@pytest.fixture(scope="session")
def answers(models: Path, work: Path) -> Callable[[str], list[Any]]:
    """Case name -> the answer of each rank that took part."""
    by_rank = launch(
        "tests.helpers.megatron_worker:run",
        world_size=4,
        directory=work / "launch",
        arguments={"cases": [*all_cases(models, work), *agreement_cases(models)]},
        deadline_s=900,
    )
    return lambda name: [rank[name] for rank in by_rank if name in rank]


@pytest.fixture(scope="session")
def algorithms(models: Path, work: Path) -> Callable[[str], list[Any]]:
    """The same of the algorithms' cases, in one launch of two processes."""
    by_rank = launch(
        "tests.helpers.megatron_worker:run",
        world_size=2,
        directory=work / "launch-algorithms",
        arguments={"cases": [*algorithm_cases(models), *ppo_cases(models, work)]},
        deadline_s=300,
    )
    return lambda name: [rank[name] for rank in by_rank if name in rank]
