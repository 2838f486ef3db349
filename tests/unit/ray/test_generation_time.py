"""`perf/rollout_time` ends with the last group of the round: encoding and storing it are not in it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.helpers.rollout_setup import write_model_directory
from vime.config.parse import parse
from vime.ray import rollout_manager
from vime.types import RolloutFnTrainOutput, Sample, SampleStatus, VersionSpan

GENERATED_S, STORED_S = 3.0, 40.0


def test_storing_a_round_is_not_in_the_time_of_its_generation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0

    def monotonic() -> float:
        return now

    def generate(_args: object, _rollout_id: int, _source: object) -> RolloutFnTrainOutput:
        nonlocal now
        now += GENERATED_S
        sample = Sample(group_index=0, index=0, prompt="a", tokens=[1], reward=1.0, status=SampleStatus.COMPLETED)
        sample.append_response_tokens([2], [-0.5], versions=[VersionSpan(0, 0, 1)])
        return RolloutFnTrainOutput(samples=[[sample]], metrics={})

    def put(_rollout_id: int, groups: list[object]) -> tuple[str, list[list[object]]]:
        nonlocal now
        now += STORED_S
        return "train_0", [[] for _ in groups]

    config = parse(["--hf-checkpoint", str(write_model_directory(tmp_path / "model")), "--rm-type", "exact_match"])
    manager = object.__new__(rollout_manager.RolloutManager)
    source = SimpleNamespace(save=lambda _rollout_id: {})
    manager._config, manager._generate, manager._source, manager._texts = config, generate, source, {}
    manager._rounds = SimpleNamespace(put=put)
    monkeypatch.setattr(rollout_manager, "time", SimpleNamespace(monotonic=monotonic))
    found = manager._generate_round(0)
    assert found.generated_s == GENERATED_S
    assert now == 100.0 + GENERATED_S + STORED_S
