"""Checkpoints written beside the training: visible when whole, one at a time, and a failure is said."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers.checkpoint_writer import ThreadSave
from vime.ray import launch
from vime.ray.checkpoint import RunState, find_latest, read_run_state
from vime.ray.components import Doing
from vime.ray.saver import Saver
from vime.ray.waits import Interrupted
from vime.types import CheckpointError, VimeError

DEADLINE_S = 20


class HeldTrainers:
    """Write in the background when told to; the state is that of the call."""

    def __init__(self) -> None:
        self.weights = "weights of round 1"
        self.may_write, self.breaks = threading.Event(), False

    def save(self, directory: Path, *, in_background: bool) -> ThreadSave:
        assert in_background
        copied = self.weights

        def write() -> None:
            assert self.may_write.wait(DEADLINE_S)
            if self.breaks:
                raise CheckpointError("rank 1: No space left on device")
            (directory / "weights").write_text(copied)

        return ThreadSave(write)


def make_saver(root: Path, seen: list[int] | None = None) -> Saver:
    return Saver(
        root,
        is_async=True,
        keep=None,
        protected=None,
        deadline_s=DEADLINE_S,
        on_saved=lambda rollout_id, _path: None if seen is None else seen.append(rollout_id),
    )


def state(rollout_id: int) -> RunState:
    return RunState(rollout_id=rollout_id, version=rollout_id + 1, data_source={})


def latest_round(root: Path) -> int | None:
    found = find_latest(root)
    return None if found is None else read_run_state(found).rollout_id


def test_a_save_is_visible_when_every_byte_is_written_and_holds_the_state_of_the_call(tmp_path: Path) -> None:
    trainers, seen = HeldTrainers(), []
    saver = make_saver(tmp_path, seen)
    saver.save(state(1), trainers)
    trainers.weights = "weights of round 2"
    saver.poll()
    assert (latest_round(tmp_path), saver.latest, seen) == (None, None, [])
    trainers.may_write.set()
    saver.finish()
    assert (latest_round(tmp_path), saver.latest, seen) == (1, find_latest(tmp_path), [1])
    assert (tmp_path / "iter_0000001" / "model" / "weights").read_text() == "weights of round 1"


def test_a_poll_publishes_what_was_written_meanwhile(tmp_path: Path) -> None:
    trainers = HeldTrainers()
    saver = make_saver(tmp_path)
    saver.save(state(1), trainers)
    trainers.may_write.set()
    saver._being_written[1].join(DEADLINE_S)  # type: ignore[index, union-attr]
    saver.poll()
    assert latest_round(tmp_path) == 1


def test_the_next_save_waits_for_the_one_before(tmp_path: Path) -> None:
    trainers, order = HeldTrainers(), []
    saver = make_saver(tmp_path, order)
    saver.save(state(1), trainers)
    threading.Timer(0.05, trainers.may_write.set).start()
    started = trainers.save
    trainers.save = lambda *args, **how: (order.append("second begins"), started(*args, **how))[1]  # type: ignore[method-assign]
    saver.save(state(2), trainers)
    saver.finish()
    assert order == [1, "second begins", 2]


def test_a_failed_write_is_said_once_and_the_one_before_stays(tmp_path: Path) -> None:
    trainers = HeldTrainers()
    trainers.may_write.set()
    saver = make_saver(tmp_path)
    saver.save(state(1), trainers)
    saver.finish()
    trainers.breaks = True
    saver.save(state(2), trainers)
    saver._being_written[1].join(DEADLINE_S)  # type: ignore[index, union-attr]
    with pytest.raises(CheckpointError, match="No space left"):
        saver.poll()
    assert latest_round(tmp_path) == 1
    saver.poll()
    saver.finish()
    trainers.breaks = False
    saver.save(state(3), trainers)
    saver.finish()
    assert latest_round(tmp_path) == 3
    assert not list(tmp_path.glob(".partial_*"))


class MachineAtEnd:
    """As much of the components as the end of a run needs."""

    def __init__(self, root: Path) -> None:
        self.trainers, self.saver = HeldTrainers(), make_saver(root)
        self.open_round, self.trained_round, self.doing = None, 1, None
        self.run_dir, self.checkpoint_root, self.loaded = root, root, None
        self.watchers: Any = self
        self.parts, self.turns = SimpleNamespace(engines=None), None
        self.screen = self.round_metrics = self

    def activity(self, _text: str) -> None: ...
    def emit(self, *_args: Any, **_values: Any) -> None: ...

    def save(self) -> None:
        if self.saver.newest_round != self.trained_round:
            self.saver.save(state(self.trained_round), self.trainers)


@pytest.mark.parametrize(
    ("ending", "code"),
    [(None, 0), (Interrupted("generation"), 130), (VimeError("an engine died"), 3), (ValueError("a fault"), 3)],
)
def test_however_a_run_ends_the_checkpoint_being_written_is_finished(
    ending: Exception | None, code: int, tmp_path: Path
) -> None:
    components: Any = MachineAtEnd(tmp_path)

    def schedule(components: Any) -> None:
        components.save()
        threading.Timer(0.05, components.trainers.may_write.set).start()
        if ending is not None:
            raise ending

    end = launch._drive(components, schedule)
    assert end.code == code
    assert latest_round(tmp_path) == 1
    assert len(list(tmp_path.glob("iter_*"))) == 1
    assert ending is None or f"iter_0000001; continue with --load {tmp_path}" in end.message


def test_a_failure_in_the_middle_of_training_finishes_the_checkpoint_of_the_round_before(tmp_path: Path) -> None:
    components: Any = MachineAtEnd(tmp_path)
    components.trainers.may_write.set()

    def schedule(components: Any) -> None:
        components.save()
        components.doing = Doing.TRAINING
        raise VimeError("rank 1 died")

    end = launch._drive(components, schedule)
    assert end.code == 3
    assert latest_round(tmp_path) == 1
    assert "rank 1 died" in end.message
    assert "The newest checkpoint is" in end.message


def test_a_write_that_fails_at_the_end_is_said_beside_what_ended_the_run(tmp_path: Path) -> None:
    components: Any = MachineAtEnd(tmp_path)
    components.trainers.breaks = True
    components.trainers.may_write.set()

    def schedule(components: Any) -> None:
        components.save()
        raise VimeError("an engine died")

    end = launch._drive(components, schedule)
    assert end.code == 3
    assert "an engine died" in end.message
    assert "Saving round 1 failed too: CheckpointError: rank 1: No space left on device" in end.message
    assert latest_round(tmp_path) is None
