"""All cases of this folder run in one launch of two processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.dist_launch import launch
from tests.helpers.engine_contract import contract_cases
from tests.helpers.megatron_models import make_model
from tests.helpers.role_cases import role_cases


@pytest.fixture(scope="session")
def small_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("contract-models")
    make_model("qwen2", directory / "qwen2")
    make_model("qwen2", directory / "reference", seed=1)
    make_model("qwen2_critic", directory / "critic", seed=2)
    make_model("qwen2", directory / "teacher", seed=2)
    return directory


@pytest.fixture(scope="session")
def contract(small_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Any]]:
    """Case name -> the answer of each rank that took part."""
    work = tmp_path_factory.mktemp("contract-work")
    by_rank = launch(
        "tests.helpers.megatron_worker:run",
        world_size=2,
        directory=work / "launch",
        arguments={"cases": [*contract_cases(small_models, work), *role_cases(small_models)]},
        deadline_s=240,
    )
    return lambda name: [rank[name] for rank in by_rank if name in rank]
