"""Faults of weights and of the prefix cache, between a real engine and a real trainer, are named from one round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.dist_launch import launch
from vime.backends.vllm_utils.engine import EngineProcess


@pytest.fixture(scope="module")
def verdicts(
    vllm_engine: EngineProcess, qwen3_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    arguments = {"model": qwen3_dir, "url": vllm_engine.url}
    directory = tmp_path_factory.mktemp("agreement")
    [answers] = launch(
        "tests.helpers.mismatch_engine:run", world_size=1, directory=directory, arguments=arguments, deadline_s=180
    )
    return answers


@pytest.mark.parametrize("name", ["sound", "sound again"])
def test_a_sound_pair_agrees(verdicts: dict[str, dict[str, Any]], name: str) -> None:
    assert verdicts[name]["mean"] < 1e-5
    assert verdicts[name]["cause"] is None


def test_other_weights_under_the_same_version_are_named_by_their_hash(verdicts: dict[str, dict[str, Any]]) -> None:
    found = verdicts["other weights"]
    assert found["cause"] == "weights of another version"
    assert f"the trainer has 201 with {found['hash']}" in found["summary"]


def test_keys_and_values_of_old_weights_are_named(verdicts: dict[str, dict[str, Any]]) -> None:
    found = verdicts["stale cache"]
    assert found["cause"] == "stale prefix cache"
    assert "apart with and without its prefix cache" in found["summary"]
