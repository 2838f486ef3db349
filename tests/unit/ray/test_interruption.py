"""What a signal costs: nothing at the first one, and no false promise at the second."""

import contextlib
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vime.config.parse import Config, parse
from vime.observability.events import EventLog
from vime.observability.metrics import Tracker, read_metrics
from vime.observability.screen import Screen
from vime.ray import launch, rollout_manager
from vime.ray.books import RoundBooks
from vime.ray.checkpoint import Start
from vime.ray.interrupts import Interrupts
from vime.ray.machine import Machine, Parts, Watchers
from vime.ray.rollout_manager import GeneratedRound
from vime.ray.waits import Interrupted
from vime.types import EngineReport
from vime.weights.versions import VersionLedger


class FakeTrainers:
    def __init__(self) -> None:
        self.published: list[int] = []

    def train(self, rollout_id: int, *_: Any) -> dict[str, float]:
        return {"train/loss": float(rollout_id)}

    def publish(self, version: int, *_: Any) -> Any:
        self.published.append(version)
        report = EngineReport(engine="engine-0", version=version, content_hash="h", num_tensors=1)
        return SimpleNamespace(engine_reports=[report], content_hash="h", version=version, metrics=dict)


def make_machine(config: Config, run_dir: Path, *, num_rollout: int) -> Machine:
    screen, events = Screen(run_dir), EventLog(run_dir, "driver")
    books = RoundBooks(Tracker(config.tracking, run_dir, {}), screen)
    parts: Any = Parts(
        manager=None,
        trainers=FakeTrainers(),
        engines=SimpleNamespace(addresses=[]),
        carrier=SimpleNamespace(clear=lambda _ticket: None),
        num_rollout=num_rollout,
    )
    watchers = Watchers(screen=screen, interrupts=Interrupts(), events=events, books=books)
    return Machine(config, run_dir, parts, watchers, VersionLedger(), Start(rollout_id=0, checkpoint=None))


def test_the_first_signal_is_a_request_and_the_second_is_not(capfd: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Interrupts() as interrupts:
        interrupts.raise_if_asked("nothing")
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Interrupted, match="a wait"):
            interrupts.raise_if_asked("a wait")
        assert "once more: stop at once, without saving" in capfd.readouterr().err
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_round_that_was_trained_is_booked_when_the_interruption_comes_before_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = make_machine(parse([]), tmp_path, num_rollout=9)
    monkeypatch.setattr(machine, "save", lambda: None)

    def rhythm(machine: Machine) -> None:
        for rollout_id in machine.rounds():
            if rollout_id == 2:
                raise Interrupted("generation")
            machine.train(GeneratedRound(rollout_id=rollout_id, ticket=None, metrics={}))
            if rollout_id == 1:
                raise Interrupted("evaluation")

    assert launch._drive(machine, rhythm, machine.watchers.events) == 130
    assert {step: line["train/loss"] for step, line in read_metrics(tmp_path).items()} == {0: 0.0, 1: 1.0}


def test_a_second_signal_does_not_claim_that_nothing_was_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    @contextlib.contextmanager
    def killed(*_: Any):
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(launch, "open_machine", killed)
    monkeypatch.setattr(launch, "setup_logging", lambda *_: None)
    (tmp_path / "logs").mkdir()
    assert launch._run(parse([]), tmp_path, lambda _machine: None) == 130
    assert "since the last checkpoint are not saved" in capfd.readouterr().err


def test_rare_updates_still_serve_what_the_last_round_trained(tmp_path: Path) -> None:
    config = parse(["--update-weights-interval", "2", "--max-staleness", "1"])
    machine = make_machine(config, tmp_path, num_rollout=3)
    machine.watchers.interrupts = Interrupts()
    engines: Any = SimpleNamespace(addresses=[SimpleNamespace(name="engine-0")], check=lambda: None)
    machine.parts.engines = engines
    machine.publish()
    for rollout_id in machine.rounds():
        machine.train(GeneratedRound(rollout_id=rollout_id, ticket=None, metrics={}))
        machine.publish()
    # version 0 at start, 2 because the interval is over, 3 because it is the last
    assert machine.parts.trainers.published == [0, 2, 3]  # type: ignore[union-attr]


def test_a_replayed_run_evaluates_without_a_data_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = tmp_path / "rollout.py"
    plugin.write_text(
        "from vime.types import RolloutFnEvalOutput\n\n\n"
        "def generate_rollout(args, rollout_id, data_source, evaluation=False):\n"
        "    assert evaluation and data_source is None\n"
        "    return RolloutFnEvalOutput(data={}, metrics={'eval/own/reward_mean': 0.5})\n"
    )
    monkeypatch.setattr(rollout_manager, "setup_logging", lambda *_: None)
    flags = [
        "--load-debug-rollout-data",
        "x_{rollout_id}.jsonl",
        "--rollout-function-path",
        f"{plugin}:generate_rollout",
    ]
    manager = rollout_manager.RolloutManager.__ray_metadata__.modified_class(parse(flags), str(tmp_path), None)
    assert manager.prepare().num_prompts == 0
    assert manager.evaluate(0) == {"eval/own/reward_mean": 0.5}
