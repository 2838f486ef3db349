"""What a signal or a failure costs: nothing that was trained, and no false promise at the second signal."""

import contextlib
import itertools
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from tests.helpers.training import ROOT
from vime.config.parse import Config, parse
from vime.observability.events import EventLog
from vime.observability.metrics import Tracker, read_metrics
from vime.observability.screen import Screen
from vime.ray import components as components_module
from vime.ray import engines, launch, rollout_manager
from vime.ray.actor import Actor
from vime.ray.checkpoint import Draft, RunState, Start, find_latest, read_run_state, save_checkpoint
from vime.ray.cluster import Patience
from vime.ray.components import Components, Parts, Watchers
from vime.ray.interrupts import Interrupts
from vime.ray.losses import Losses
from vime.ray.managed_engine import ManagedEngine
from vime.ray.managed_router import ManagedRouter, Routers
from vime.ray.rollout_manager import GeneratedRound
from vime.ray.round_metrics import RoundMetrics
from vime.ray.startup import Starter
from vime.ray.trainers import TrainedRound
from vime.ray.waits import Interrupted
from vime.types import (
    CheckpointError,
    ClusterError,
    EngineAddress,
    EngineError,
    EngineLostError,
    EngineReport,
    HandoffError,
    PartError,
    PublishError,
    RewardError,
)
from vime.weights.versions import VersionLedger

FIRST_PROGRAM: Any = SimpleNamespace(loss=None, is_alone=True, adopt_orphans=lambda: None)
WRITTEN = SimpleNamespace(wait=lambda _name, _deadline_s: {})
TICKET: Any = object()  # nobody reads rows here


class FakeTrainers:
    """`faults`: method -> the error that it raises."""

    def __init__(self) -> None:
        self.published: list[int] = []
        self.faults: dict[str, Exception] = {}

    def train(self, rollout_id: int, *_: Any, **__: Any) -> TrainedRound:
        self._fail("train")
        return TrainedRound(metrics={"train/loss": float(rollout_id)}, stepped=[])

    def save(self, directory: Path) -> Any:
        self._fail("save")
        (directory / "weights").write_text("w")
        return WRITTEN

    def _fail(self, method: str) -> None:
        if method in self.faults:
            raise self.faults[method]

    def publish(self, version: int, *_: Any) -> Any:
        self._fail("publish")
        self.published.append(version)
        report = EngineReport(engine="engine-0", version=version, content_hash="h", num_tensors=1)
        return SimpleNamespace(engine_reports=[report], content_hash="h", version=version, metrics=dict)


def quiet_engines(**more: Any) -> Any:
    """Engines of which nothing is to be told."""
    quiet = {
        "update": lambda send: send([]),
        "new": lambda _reports: [],
        "served": lambda _version, _reports: None,
        "take_metrics": dict,
    }
    return SimpleNamespace(**{"fleet": None, "tend": lambda: None, **quiet, **more})


def make_machine(config: Config, run_dir: Path, *, num_rollout: int) -> Components:
    screen, events = Screen(run_dir), EventLog(run_dir, "driver")
    round_metrics = RoundMetrics(Tracker(config.tracking, run_dir, {}), screen)
    parts: Any = Parts(
        manager=None,
        trainers=FakeTrainers(),
        engines=quiet_engines(),
        num_rollout=num_rollout,
    )
    watchers = Watchers(screen=screen, interrupts=Interrupts(), events=events, round_metrics=round_metrics)
    config = config.replace(transferqueue_mode="off")  # nothing lies anywhere that would have to be cleared
    return Components(config, run_dir, parts, watchers, VersionLedger(), Start(rollout_id=0, checkpoint=None))


def test_the_first_signal_is_a_request_and_the_second_is_not(capfd: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Interrupts() as interrupts:
        interrupts.has_work = lambda: True
        interrupts.raise_if_asked("nothing")
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Interrupted, match="a wait"):
            interrupts.raise_if_asked("a wait")
        assert "once more: stop at once, without saving" in capfd.readouterr().err
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


def test_before_there_is_anything_to_save_no_save_is_promised(capfd: pytest.CaptureFixture[str]) -> None:
    with Interrupts() as interrupts:
        os.kill(os.getpid(), signal.SIGINT)
        said = capfd.readouterr().err
        assert interrupts.is_asked
    assert "nothing has been trained that is not saved, so there is nothing to save" in said
    assert "saving the state" not in said


def test_a_save_is_promised_from_the_first_step_of_a_round_until_it_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    components = make_machine(parse([]), tmp_path, num_rollout=9)
    assert not components.has_work()  # round 0 is generated
    seen = []
    trained = TrainedRound(metrics={}, stepped=[])
    monkeypatch.setattr(
        components.parts.trainers, "train", lambda *_, **__: seen.append(components.has_work()) or trained
    )
    components.train(GeneratedRound(rollout_id=0, ticket=TICKET, metrics={}))
    assert seen == [True]
    assert components.has_work()
    components.save()
    assert not components.has_work()  # until round 1 is trained


@pytest.mark.parametrize("command", [["train.py"], ["train_async.py"], ["-m", "vime", "train"]])
def test_ctrl_c_while_modules_are_loaded_ends_without_a_traceback(command: list[str], tmp_path: Path) -> None:
    """The module that takes longest to load is one that sends the signal."""
    (tmp_path / "ray.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    search = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(
        [sys.executable, *command, "--lr", "1"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": search},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (130, "\nstopped: nothing was started.\n")


def test_parts_of_a_start_that_ends_are_not_waited_for_and_those_of_a_run_are(tmp_path: Path) -> None:
    starter = Starter(Screen(tmp_path), EventLog(tmp_path, "driver"), Interrupts())
    assert starter.grace(20.0) == 0.0
    starter.is_done = True
    assert starter.grace(20.0) == 20.0


@pytest.mark.parametrize(
    ("grace_s", "waited"), [(0.0, [(["router", "engine"], 3.0)]), (30.0, [(["router"], 30.0), (["engine"], 30.0)])]
)
def test_servers_of_a_start_that_ends_are_waited_for_together(
    grace_s: float, waited: list[tuple[list[str], float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after the other, as in a run, they could take twice as long."""
    seen: list[tuple[list[str], float]] = []
    monkeypatch.setattr(engines.ray, "wait", lambda refs, *, num_returns, timeout: seen.append((refs, timeout)))
    monkeypatch.setattr(engines.ray, "kill", lambda _actor: None)
    fleet = engines.Engines.__new__(engines.Engines)
    fleet.changes, fleet._fleet, engine = None, None, ManagedEngine(0)
    fleet._routers = Routers.__new__(Routers)
    router = ManagedRouter.__new__(ManagedRouter)  # an actor that is started is one of Ray
    fleet._routers.each, router.losses = [router], Losses("router")
    router.actor, engine.actor = (
        Actor(SimpleNamespace(stop=SimpleNamespace(remote=lambda: "router"))),
        Actor(SimpleNamespace(stop=SimpleNamespace(remote=lambda: "engine"))),
    )
    fleet._engines = [engine]
    fleet.stop(grace_s)
    assert seen == waited


def test_a_signal_ends_the_start_before_its_next_part(tmp_path: Path) -> None:
    interrupts = Interrupts()
    starter = Starter(Screen(tmp_path), EventLog(tmp_path, "driver"), interrupts)
    with starter.part("ray", "starting Ray"):
        interrupts.is_asked = True
    with pytest.raises(Interrupted, match="start-up"), starter.part("engines", "starting engines"):
        pytest.fail("a part was started")


def test_a_round_that_was_trained_is_booked_when_the_interruption_comes_before_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    components = make_machine(parse([]), tmp_path, num_rollout=9)
    monkeypatch.setattr(components, "save", lambda: None)

    def schedule(components: Components) -> None:
        for rollout_id in components.rounds():
            if rollout_id == 2:
                raise Interrupted("generation")
            components.train(GeneratedRound(rollout_id=rollout_id, ticket=TICKET, metrics={}))
            if rollout_id == 1:
                raise Interrupted("evaluation")

    end = launch._drive(components, schedule)
    assert end.code == 130
    assert {step: line["train/loss"] for step, line in read_metrics(tmp_path).items()} == {0: 0.0, 1: 1.0}


@pytest.fixture
def components(tmp_path: Path) -> Components:
    """Nine rounds, a checkpoint only when something ends them."""
    return make_machine(parse([]), tmp_path, num_rollout=9)


def train_then_raise(error: BaseException, *, rounds: int) -> launch.Schedule:
    """A reward, an engine, the data or Vime itself fails while round number `rounds` is generated."""

    def schedule(components: Components) -> None:
        for rollout_id in components.rounds():
            if rollout_id == rounds:
                raise error
            components.train(GeneratedRound(rollout_id=rollout_id, ticket=TICKET, metrics={}))
            components.save_if_due(rollout_id)
            components.publish()

    return schedule


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (RewardError("no such rubric"), "no such rubric"),
        (EngineError("engine-0 ended with exit code 137"), "engine-0 ended"),
        (KeyError("surprise"), "KeyError: 'surprise' (at test_interruption.py:"),
    ],
)
def test_a_failure_outside_the_trainers_saves_what_they_trained(
    components: Components, error: Exception, says: str
) -> None:
    end = launch._drive(components, train_then_raise(error, rounds=2))
    assert end.code == 3
    checkpoints = components.run_dir / "checkpoints"
    assert read_run_state(find_latest(checkpoints)).rollout_id == 1  # rounds 0 and 1 were trained
    told = end.message
    assert says in told
    assert f"continue with --load {checkpoints}" in told


def test_only_what_may_not_happen_again_is_worth_a_restart(components: Components) -> None:
    dead = launch._drive(components, train_then_raise(EngineLostError("engine-0 ended"), rounds=2))
    assert dead.is_worth_a_restart
    assert dead.trained_round == 1
    for lost in (ray.exceptions.RaySystemError("the GCS is gone"), ConnectionResetError("reset by peer")):
        components.doing = None
        assert launch._drive(components, train_then_raise(lost, rounds=2)).is_worth_a_restart
    for error in (
        RewardError("no such rubric"),
        HandoffError("sample 3: a log-probability is not finite"),
        EngineError("the request was refused"),
        PublishError("not confirmed"),
        PartError("trainer 0 failed with KeyError"),
        KeyError("surprise"),
        Interrupted("generation"),
    ):
        components.doing = None
        assert not launch._drive(components, train_then_raise(error, rounds=0)).is_worth_a_restart


def test_restarts_are_counted_while_no_round_is_trained_and_go_on_from_the_newest_checkpoint(tmp_path: Path) -> None:
    config = parse(["--max-restarts", "2", "--load", str(tmp_path / "elsewhere")])
    restarts = launch.Restarts(config, tmp_path)
    dead = launch.End(code=3, message="engine-0 ended", is_worth_a_restart=True, trained_round=4)
    first = restarts.after(dead)  # this run has saved nothing yet: from where it was started
    assert first is not None
    assert first.model.load == str(tmp_path / "elsewhere")
    root = tmp_path / "checkpoints"
    save_checkpoint(root, RunState(rollout_id=4, version=5, data_source={}), lambda _directory: None)
    second = restarts.after(dead)
    assert second is not None
    assert second.model.load == str(root)
    assert restarts.after(dead) is None  # twice in a row without a new round
    again = launch.Restarts(config, tmp_path)
    third = again.after(launch.End(code=3, is_worth_a_restart=True))
    assert third is not None
    assert third.model.load == str(tmp_path / "elsewhere")  # it may be an older one than the newest that lies there
    for trained in (4, 5, 6, 7):
        assert again.after(launch.End(code=3, is_worth_a_restart=True, trained_round=trained)) is not None
    assert again.after(launch.End(code=3, trained_round=8)) is None
    assert again.after(launch.End(code=0)) is None


def test_a_life_is_progress_only_past_the_newest_round_of_any_life_before(tmp_path: Path) -> None:
    """Round 7 was trained and lost with its rank; the checkpoint is that of round 4, so 5 to 7 are trained again."""

    def lost_at(trained: int) -> launch.End:
        return launch.End(code=3, is_worth_a_restart=True, trained_round=trained)

    restarts = launch.Restarts(parse(["--max-restarts", "3"]), tmp_path)
    counts = []
    for trained in (7, 5, -1, 8, 8, 6):  # -1: died in its start-up; 8: past every life before
        assert restarts.after(lost_at(trained)) is not None
        counts.append(restarts.num)
    assert counts == [1, 2, 3, 1, 2, 3]
    assert restarts.after(lost_at(8)) is None


def test_a_run_whose_checkpoints_cannot_be_read_ends_as_it_failed(tmp_path: Path, caplog: Any) -> None:
    """Not with a traceback of the restart: what failed is said, and the report is written."""
    restarts = launch.Restarts(parse(["--max-restarts", "3"]), tmp_path)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("7\n")  # and no directory of it
    assert restarts.after(launch.End(code=3, is_worth_a_restart=True, trained_round=7)) is None
    assert "it is not started again, because its checkpoints cannot be read" in caplog.text


def test_a_start_of_ray_that_fails_in_a_restart_is_a_restart_used(
    components: Components, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    starts: list[float] = []

    @contextlib.contextmanager
    def start_components(*_: Any, patience: Patience) -> Iterator[Components]:
        starts.append(patience.seconds)
        if len(starts) == 2:
            raise ClusterError("a local Ray did not start")
        if len(starts) == 3:
            raise ray.exceptions.RaySystemError("no answer")  # not in a wait, so nobody put it into our words
        yield components

    def schedule(_: Components) -> None:
        if len(starts) == 1:
            raise EngineLostError("engine-0 ended")

    monkeypatch.setattr(launch, "start_components", start_components)
    monkeypatch.setattr(launch, "setup_logging", lambda *_: None)
    flags = ["--max-restarts", "3", "--start-timeout-secs", "77", "--ray-address", "10.0.0.1:6379"]
    end = launch._run(parse(flags), components.run_dir, schedule, FIRST_PROGRAM)
    assert end == 0
    assert starts == [0, 77, 77, 77], "only restarts wait for nodes of a cluster"
    said = capsys.readouterr()
    assert "restart 3 of 3" in said.out + said.err


def lives(
    monkeypatch: pytest.MonkeyPatch, starts: Callable[[int], Components], stop: Callable[[], None] = lambda: None
) -> None:
    """`starts(number of the attempt)` starts all parts; `stop` is called when they end."""
    count = itertools.count(1)

    @contextlib.contextmanager
    def start_components(*_: Any, **__: Any) -> Iterator[Components]:
        yield starts(next(count))
        stop()

    monkeypatch.setattr(launch, "start_components", start_components)
    monkeypatch.setattr(launch, "setup_logging", lambda *_: None)


def test_a_rank_that_dies_after_ctrl_c_starts_nothing_again(
    components: Components, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else the start ended by the signal would say that this run has trained nothing."""
    lives(monkeypatch, lambda _number: components)

    def schedule(components: Components) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        train_then_raise(EngineLostError("engine-0 ended"), rounds=2)(components)

    assert launch._run(parse(["--max-restarts", "3"]), components.run_dir, schedule, FIRST_PROGRAM) == 3
    said = "".join(capsys.readouterr())
    assert f"engine-0 ended\nState saved in {components.checkpoint_root}" in said
    assert "starting again" not in said
    assert "trained nothing" not in said


@pytest.mark.parametrize("is_saved", [True, False])
def test_ctrl_c_in_a_restart_says_what_became_of_the_rounds_before(
    is_saved: bool, components: Components, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def starts(number: int) -> Components:
        if number == 2:
            raise ClusterError("no room in the cluster")
        if number == 3:
            raise Interrupted("start-up")
        return components

    lives(monkeypatch, starts)
    if not is_saved:
        components.parts.trainers.faults["save"] = OSError("no space left on device")  # type: ignore[union-attr]
    schedule = train_then_raise(EngineLostError("engine-0 ended"), rounds=2)
    config = parse(["--max-restarts", "3"])
    code = launch._run(config, components.run_dir, schedule, FIRST_PROGRAM)
    said = "".join(capsys.readouterr())
    assert code == (130 if is_saved else 3)
    end = said[said.rindex("failed: ") :]
    assert ("State saved in" if is_saved else "Saving round 1 failed too: ") in end
    assert "interrupted during start-up" in end
    assert "trained nothing" not in end


@pytest.mark.parametrize("how", [OSError("no space left on device"), KeyboardInterrupt()])
def test_a_stop_that_fails_does_not_replace_how_the_run_ended(
    how: BaseException, components: Components, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop() -> None:
        raise how

    lives(monkeypatch, lambda _number: components, stop)
    schedule = train_then_raise(RewardError("no such rubric"), rounds=2)
    assert launch._run(parse([]), components.run_dir, schedule, FIRST_PROGRAM) == 3
    said = "".join(capsys.readouterr())
    assert f"no such rubric\nState saved in {components.checkpoint_root}" in said
    assert f"the parts could not be stopped: {type(how).__name__}" in said


def test_an_exit_that_a_library_asks_for_costs_no_trained_round(components: Components) -> None:
    end = launch._drive(components, train_then_raise(SystemExit(1), rounds=2))
    assert end.code == 3
    assert read_run_state(find_latest(components.checkpoint_root)).rollout_id == 1


def test_a_restart_keeps_the_checkpoint_that_the_run_was_loaded_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--keep-checkpoints deletes all but the newest; "always the one this run was loaded from" is of the first
    attempt."""
    root = tmp_path / "checkpoints"
    for rollout_id in (3, 4):
        save_checkpoint(root, RunState(rollout_id=rollout_id, version=5, data_source={}), lambda _directory: None)
    flags = ["--max-restarts", "3", "--save", str(root), "--keep-checkpoints", "1", "--save-interval", "1"]
    config = parse([*flags, "--load", str(root / "iter_0000003")])

    def starts(number: int) -> Components:
        components = make_machine(config, tmp_path, num_rollout=6 if number == 1 else 9)
        components._start = Start(rollout_id=4 if number == 1 else 6, checkpoint=None)
        return components

    def schedule(components: Components) -> None:
        num_rollout = components.parts.num_rollout
        for rollout_id in components.rounds():
            components.train(GeneratedRound(rollout_id=rollout_id, ticket=TICKET, metrics={}))
            components.save_if_due(rollout_id)
        if num_rollout == 6:
            raise EngineLostError("engine-0 ended")

    lives(monkeypatch, starts)
    assert launch._run(config, tmp_path, schedule, FIRST_PROGRAM) == 3, "the audit finds no receipts"
    assert sorted(path.name for path in root.glob("iter_*")) == ["iter_0000003", "iter_0000008"]


def test_a_failure_before_the_first_round_is_trained_saves_nothing(components: Components) -> None:
    end = launch._drive(components, train_then_raise(RewardError("no rubric"), rounds=0))
    assert end.code == 3
    assert find_latest(components.checkpoint_root) is None
    assert "no rubric\nNo round was trained" in end.message


def test_weights_in_the_middle_of_a_round_are_not_saved(components: Components) -> None:
    components.config = components.config.replace(save_interval=2)  # saves round 1
    trainers: Any = components.parts.trainers

    def schedule(components: Components) -> None:
        for rollout_id in components.rounds():
            if rollout_id == 3:
                trainers.faults["train"] = ClusterError("rank 1 died")
            components.train(GeneratedRound(rollout_id=rollout_id, ticket=TICKET, metrics={}))
            components.save_if_due(rollout_id)

    end = launch._drive(components, schedule)
    assert end.code == 3
    assert read_run_state(find_latest(components.checkpoint_root)).rollout_id == 1
    told = end.message
    assert "rank 1 died\nThis was in the middle of a round of training" in told
    assert f"iter_0000001; continue with --load {components.checkpoint_root}" in told


def test_when_the_rescue_fails_too_both_errors_are_said(components: Components) -> None:
    trainers: Any = components.parts.trainers
    trainers.faults["save"] = OSError("no space left on device")
    for error, code in ((RewardError("no such rubric"), 3), (Interrupted("generation"), 3)):
        components._start, components.trained_round = Start(rollout_id=0, checkpoint=None), -1
        components.doing = None
        end = launch._drive(components, train_then_raise(error, rounds=1))
        assert end.code == code
        told = end.message
        assert str(error) in told
        assert "no space left on device" in told
        assert "There is no checkpoint" in told


def test_a_save_before_that_failed_does_not_cost_the_round_just_trained(components: Components) -> None:
    def full(*_: Any) -> None:
        raise CheckpointError("no space left on device")

    pending: Any = SimpleNamespace(is_over=lambda: False, wait=full)
    components.saver._being_written = (
        Draft(root=components.checkpoint_root, state=RunState(rollout_id=0, version=1, data_source={})),
        pending,
    )
    components.config = components.config.replace(save_interval=2)  # saves round 1
    end = launch._drive(components, train_then_raise(RuntimeError("unused"), rounds=9))
    assert end.code == 3
    assert read_run_state(find_latest(components.checkpoint_root)).rollout_id == 1


def test_metrics_that_cannot_be_written_do_not_cost_the_round(components: Components) -> None:
    """The sink of the metrics is what failed; it fails again when the rescue books the round."""

    def full(*_: Any) -> None:
        raise OSError("no space left on device")

    components.watchers.round_metrics.finish = full  # type: ignore[method-assign]
    end = launch._drive(components, train_then_raise(RuntimeError("unused"), rounds=9))
    assert end.code == 3
    assert read_run_state(find_latest(components.checkpoint_root)).rollout_id == 0


def test_a_publish_that_hangs_is_let_go_before_the_save(components: Components) -> None:
    """Rank 0 may be waiting for an engine, and no rank can save meanwhile: the engines end first."""
    trainers, order = components.parts.trainers, []
    trainers.faults["publish"] = EngineError("engine-0 does not answer")  # type: ignore[union-attr]
    trainers.save = lambda _directory: (order.append("save"), WRITTEN)[1]  # type: ignore[union-attr, method-assign]
    components.parts.engines = quiet_engines(stop=lambda: order.append("stop"))
    end = launch._drive(components, train_then_raise(RuntimeError("unused"), rounds=9))
    assert end.code == 3
    assert order == ["stop", "save"]


ON_A_TERMINAL = """
import os, signal, time
from vime.ray.interrupts import Interrupts, children_outlive_the_terminal
from vime.ray.waits import Interrupted
with Interrupts() as interrupts:
    with children_outlive_the_terminal():
        child = os.fork()
        if child == 0:
            time.sleep(600)
        print("ready", flush=True)
        while signal.SIGHUP not in signal.sigpending():  # the terminal is gone; the signal waits for the block's end
            time.sleep(0.01)
    print("nobody reads this", flush=True)
    child_is_alive = os.waitpid(child, os.WNOHANG) == (0, 0)
    os.kill(child, signal.SIGKILL)
    try:
        interrupts.raise_if_asked("a wait")
    except Interrupted:
        os._exit(0 if child_is_alive else 2)
os._exit(1)
"""


def test_a_closed_terminal_is_a_request_that_children_do_not_get() -> None:
    """A terminal of its own, closed under the process as the kernel does it: SIGHUP to all, writing is an error."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", ON_A_TERMINAL])
    shown = b""
    while b"ready\r\n" not in shown:
        shown += os.read(terminal, 100)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_nohup_keeps_its_meaning() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupts() as interrupts:
            os.kill(os.getpid(), signal.SIGHUP)
            interrupts.raise_if_asked("a wait")
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_second_signal_does_not_claim_that_nothing_was_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    @contextlib.contextmanager
    def killed(*_: Any, **_named: Any):
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(launch, "start_components", killed)
    monkeypatch.setattr(launch, "setup_logging", lambda *_: None)
    (tmp_path / "logs").mkdir()
    assert launch._run(parse([]), tmp_path, lambda _components: None, FIRST_PROGRAM) == 130
    assert "since the last checkpoint are not saved" in capfd.readouterr().err


def test_a_run_is_the_parent_of_orphans_before_anything_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    program: Any = SimpleNamespace(loss=None, is_alone=True, adopt_orphans=lambda: order.append("adopts orphans"))

    @contextlib.contextmanager
    def opened(*_: Any, **_named: Any):
        order.append("starts parts")
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(launch, "start_components", opened)
    monkeypatch.setattr(launch, "setup_logging", lambda *_: None)
    (tmp_path / "logs").mkdir()
    launch._run(parse([]), tmp_path, lambda _components: None, program)
    assert order == ["adopts orphans", "starts parts"]


def test_nothing_is_asked_of_engines_that_do_not_agree_with_the_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    components = make_machine(parse(["--check-weight-update-equal"]), tmp_path, num_rollout=3)
    components.parts.engines = quiet_engines(check=lambda: None, num_serving=2)
    released: list[int] = []
    components.parts.stream = SimpleNamespace(release=released.append, trained=lambda *_: None)  # type: ignore[assignment]
    answers = iter([None, PublishError("engine e0 differs")])

    def agree(*_: object, **__: object) -> None:
        if (error := next(answers)) is not None:
            raise error

    monkeypatch.setattr(components_module, "check_engines_agree", agree)
    components.publish()
    assert released == [0]
    components.train(GeneratedRound(rollout_id=0, ticket=TICKET, metrics={}))
    with pytest.raises(PublishError, match="e0 differs"):
        components.publish()
    assert released == [0]


@pytest.mark.parametrize("in_turns", [False, True])
def test_an_engine_that_started_is_compared_before_a_prompt_can_go_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_turns: bool
) -> None:
    """Before the routers send to it. Where engines and trainers take turns no prompt comes before the engines' turn,
    and they are woken up in between."""
    components = make_machine(parse([]), tmp_path, num_rollout=3)
    address, order = EngineAddress(name="engine-0", url="http://127.0.0.1:1"), list[str]()
    new = [[address], []]
    components.parts.engines = quiet_engines(
        check=lambda: None, new=lambda _reports: new.pop(0), served=lambda _version, _reports: order.append("served")
    )
    components.parts.stream = SimpleNamespace(release=lambda _version: order.append("released"))  # type: ignore[assignment]
    if in_turns:
        components.turns = SimpleNamespace(  # type: ignore[assignment]
            update=lambda: None, generate=lambda: order.append("generate")
        )

    def compare(version: int, engines: list[EngineAddress], between: Callable[[], None] | None = None) -> None:
        assert (between is not None) == in_turns
        order.extend(f"compared {each.name} at {version}" for each in engines)

    monkeypatch.setattr(components._mismatch, "after_first_update", compare)
    components.publish()
    if in_turns:
        assert order == ["served", "compared engine-0 at 0", "generate", "released"]
    else:
        assert order == ["compared engine-0 at 0", "served", "released"]


def test_rare_updates_still_serve_what_the_last_round_trained(tmp_path: Path) -> None:
    config = parse(["--update-weights-interval", "2", "--max-staleness", "1"])
    components = make_machine(config, tmp_path, num_rollout=3)
    components.watchers.interrupts = Interrupts()
    components.parts.engines = quiet_engines(check=lambda: None)
    components.publish()
    for rollout_id in components.rounds():
        components.train(GeneratedRound(rollout_id=rollout_id, ticket=TICKET, metrics={}))
        components.publish()
    # version 0 at start, 2 because the interval is over, 3 because it is the last
    assert components.parts.trainers.published == [0, 2, 3]  # type: ignore[union-attr]


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
    manager = rollout_manager.RolloutManager(parse(flags), str(tmp_path), None)
    assert manager.prepare().num_prompts == 0
    assert manager.evaluate(0) == {"eval/own/reward_mean": 0.5}
