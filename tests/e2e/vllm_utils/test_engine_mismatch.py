"""Faults of weights and of the prefix cache, between a real engine and a real trainer, are named from one record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.dist_launch import launch
from vime.backends.vllm_utils.engine import EngineProcess
from vime.observability.diagnosis import diagnose
from vime.observability.mismatch_record import read_record


@pytest.fixture(scope="module")
def answers(
    vllm_engine: EngineProcess, qwen3_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    arguments = {"model": qwen3_dir, "url": vllm_engine.url}
    directory = tmp_path_factory.mktemp("mismatch")
    [told] = launch(
        "tests.helpers.mismatch_engine:run", world_size=1, directory=directory, arguments=arguments, deadline_s=180
    )
    answers: dict[str, dict[str, Any]] = {}
    for name, answer in told.items():  # engine and trainer are not asked here: the latter is gone
        found = diagnose(read_record(Path(answer["record"]))) if answer["record"] else None
        answers[name] = answer | {"cause": found and str(found.cause), "summary": found and found.summary}
    return answers


@pytest.mark.parametrize("name", ["sound", "sound again"])
def test_a_sound_pair_agrees(answers: dict[str, dict[str, Any]], name: str) -> None:
    assert answers[name]["mean"] < 1e-5
    assert answers[name]["cause"] is None


def test_other_weights_under_the_same_version_are_named_by_their_hash(answers: dict[str, dict[str, Any]]) -> None:
    found = answers["other weights"]
    assert found["cause"] == "weights of another version"
    assert f"the trainer has 201 with {found['hash']}" in found["summary"]


def test_keys_and_values_of_old_weights_are_named(answers: dict[str, dict[str, Any]]) -> None:
    found = answers["stale cache"]
    assert found["cause"] == "stale prefix cache"
    assert "apart with and without its prefix cache" in found["summary"]
