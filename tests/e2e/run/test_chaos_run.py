"""Real runs on the scripted engine: the same weights in every mode, and after kills. The whole matrix of phases takes
an hour (`scripts/chaos.sh`); here are a kill that ends nothing, and one that ends the life of every part."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.helpers.training import TinyTask, Training, train
from vime.cli.chaos import parse_case
from vime.cli.chaos_run import ChaosRun, Plan
from vime.utils.failpoints import Point

ROUNDS = 6


def scripted(tiny_task: TinyTask, mode: str) -> list[str]:
    engine = ["--debug-engine-module", "vime.backends.vllm_utils.scripted_server"]
    return [*tiny_task.flags(), *engine, "--num-rollout", str(ROUNDS), "--transferqueue-mode", mode]


def test_a_run_that_was_killed_twice_has_the_weights_of_the_run_that_was_not(
    tiny_task: TinyTask, tmp_path: Path
) -> None:
    """Undisturbed in mode off; in streaming the ledger is killed with a commit that nobody has heard of, then a trainer
    with gradients and old weights."""
    undisturbed = train(scripted(tiny_task, "off"), tmp_path / "off")
    assert undisturbed.code == 0, undisturbed.output
    expected = dict(enumerate(undisturbed.confirmed_hashes()))
    assert len(set(expected.values())) == ROUNDS + 1
    plan = Plan(out=tmp_path, script="train.py", flags=tuple(scripted(tiny_task, "streaming")), deadline_s=200)
    run = ChaosRun(plan, "killed", expected=expected)
    outcome = run.complete([parse_case("ledger@ledger.commit:2"), parse_case("trainer@trainer.optimizer:1")])
    assert outcome.is_good, (outcome, run.log.read_text())
    assert [(strike.hit, strike.then.split(":")[0]) for strike in outcome.strikes] == [
        ("ledger", "went on"),  # Ray starts it again on its file, and the answer that was lost is asked for again
        ("trainer", "restarted itself"),
    ]
    assert outcome.codes == [0]
    assert outcome.audit == "kept"
    assert run.hashes == expected


def test_each_round_has_one_line_of_metrics_wherever_behind_its_training_the_driver_dies(
    tiny_task: TinyTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each start trains two rounds and dies with the checkpoint of the second, before its line and its evaluation; at
    RENAMED the marker says the checkpoint before, so that the round comes again."""
    run_dir = tmp_path / "run"
    evaluation = ["--eval-prompt-data", "held-out", str(tiny_task.prompts.with_name("eval.jsonl"))]
    flags = [*scripted(tiny_task, "streaming"), *evaluation, "--eval-interval", "1", "--save-interval", "1"]
    flags += ["--load", str(run_dir / "checkpoints"), "--save", str(run_dir / "checkpoints")]
    monkeypatch.setenv("VIME_FAILPOINTS_DIR", str(tmp_path / "notes"))
    for point in (Point.RENAMED, Point.DURABLE):
        monkeypatch.setenv("VIME_FAILPOINTS", f"{point}:2:kill")
        killed = Training("train.py", flags, run_dir)
        assert killed.process.wait(280) == -signal.SIGKILL, killed.so_far().output
        killed.kill()  # Ray's two agents take a minute to end
    monkeypatch.delenv("VIME_FAILPOINTS")
    finished = train(flags, run_dir)
    assert finished.code == 0, finished.output
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert sorted(line["step"] for line in lines if "weights/version" in line.get("metrics", {})) == list(range(ROUNDS))
    rounds = finished.metrics()
    assert all(line["weights/version"] == step + 1 and "train/loss" in line for step, line in rounds.items())
    assert all("eval/held-out/reward_mean" in line for line in rounds.values())
