"""A driver that dies again and again, on the scripted engine. The whole matrix of phases and parts takes an hour
(`scripts/chaos.sh`); two of its cases are test_documented_commands.py's."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.helpers.training import TinyTask, Training, train
from vime.utils.failpoints import Point

ROUNDS = 6


def test_each_round_has_one_line_of_metrics_wherever_behind_its_training_the_driver_dies(
    tiny_task: TinyTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each start trains two rounds and dies with the checkpoint of the second, before its line and its evaluation; at
    RENAMED the marker says the checkpoint before, so that the round comes again."""
    run_dir = tmp_path / "run"
    evaluation = ["--eval-prompt-data", "held-out", str(tiny_task.prompts.with_name("eval.jsonl"))]
    flags = [*tiny_task.flags(), "--debug-engine-module", "vime.backends.vllm_utils.scripted_server"]
    flags += ["--num-rollout", str(ROUNDS), "--transferqueue-mode", "streaming"]
    flags += [*evaluation, "--eval-interval", "1", "--save-interval", "1"]
    flags += ["--load", str(run_dir / "checkpoints"), "--save", str(run_dir / "checkpoints")]
    monkeypatch.setenv("VIME_FAILPOINTS_DIR", str(tmp_path / "notes"))
    for point in (Point.RENAMED, Point.DURABLE):
        monkeypatch.setenv("VIME_FAILPOINTS", f"{point}:2:kill")
        killed = Training("train.py", flags, run_dir)
        assert killed.process.wait(280) == -signal.SIGKILL, killed.so_far().output
        assert killed.survivors(grace_s=30) == []
    monkeypatch.delenv("VIME_FAILPOINTS")
    finished = train(flags, run_dir)
    assert finished.code == 0, finished.output
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert sorted(line["step"] for line in lines if "weights/version" in line.get("metrics", {})) == list(range(ROUNDS))
    rounds = finished.metrics()
    assert all(line["weights/version"] == step + 1 and "train/loss" in line for step, line in rounds.items())
    assert all("eval/held-out/reward_mean" in line for line in rounds.values())
