"""The cases of a file run in one launch of up to four processes, so that what breaks one of them is named by few."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.helpers.megatron_cases import KINDS
from tests.helpers.megatron_models import make_models


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of tiny models: one per kind, a reference model, and one whose config and weights do not match."""
    directory = make_models(KINDS, tmp_path_factory.mktemp("megatron-models"))
    shutil.copytree(directory / "qwen2", directory / "mixed")
    shutil.copy(directory / "qwen3" / "config.json", directory / "mixed" / "config.json")
    return directory


@pytest.fixture(scope="session")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where cases write checkpoints and models."""
    return tmp_path_factory.mktemp("megatron-work")
