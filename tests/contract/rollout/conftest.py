"""What the tests of rounds share: a tiny model directory, and clients that are closed after each test."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.rollout_setup import write_model_directory
from vime.rollout.vllm_rollout import close_generation


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_directory(tmp_path_factory.mktemp("model"), positions=32)


@pytest.fixture(autouse=True)
def closed_clients() -> Iterator[None]:
    yield
    close_generation()
