"""What `vime chaos` does to disks and spools, and what the parts that write say of it: nothing is lost."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.ledger_cases import checked, issue, make_ready, open_ledger, train
from vime.cli.chaos_faults import fill_disk, move, tear_spool
from vime.handoff.ledger_types import LedgerFileError, Task
from vime.handoff.spool import Spool, SpoolFullError, SpoolReader
from vime.observability.events import EventKind, EventLog, read_events
from vime.ray.checkpoint import RunState, find_latest, save_checkpoint
from vime.types import CheckpointError, ConfigError


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("a disk that may be full has to be mounted, which is not allowed here")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_ledger_on_a_full_disk_refuses_what_it_cannot_write_and_goes_on_with_room(disk: Path) -> None:
    ledger = open_ledger(disk)
    train(ledger, 0)
    [task] = issue(ledger, 1)
    before = ledger.status()
    make_room = fill_disk(disk)

    def drop_and_issue() -> None:
        for _ in range(1000):  # what the file has room for already is still taken
            [other] = issue(ledger, 1)
            ledger.prompts.drop(other, "x" * 500)

    with pytest.raises(LedgerFileError, match=r"nothing was changed.*full.*Free disk space"):
        drop_and_issue()
    assert {task} <= set(ledger.prompts.heartbeat("p"))
    make_room()
    assert ledger.status().active - before.active in (0, 1)  # one was issued and could not be dropped
    ledger.prompts.abandon("p")
    make_ready(ledger, 2, version=1)
    ledger.close()
    checked(disk)


def test_a_spool_on_a_full_disk_acknowledges_nothing_and_goes_on_with_room(disk: Path) -> None:
    spool = Spool(disk / "spool")
    spool.append([(Task("train", 0, 1), b"first" * 100)])
    make_room = fill_disk(disk)
    large = (Task("train", 1, 1), b"second" * 5000)
    with pytest.raises(SpoolFullError, match="Nothing of them counts"):
        spool.append([large])
    make_room()
    spool.append([large])
    spool.close()
    assert [task.group for task, _, _ in SpoolReader(disk / "spool").entries()] == [0, 1]


def test_a_checkpoint_on_a_full_disk_leaves_the_one_before_and_is_written_with_room(disk: Path) -> None:
    def write_model(directory: Path) -> None:
        (directory / "weights").write_bytes(b"w" * 100_000)

    def state(rollout_id: int) -> RunState:
        return RunState(rollout_id=rollout_id, version=rollout_id + 1, data_source={})

    before = save_checkpoint(disk / "saved", state(1), write_model)
    make_room = fill_disk(disk)
    with pytest.raises(CheckpointError, match=r"No space left.*previous checkpoint is intact; free space"):
        save_checkpoint(disk / "saved", state(2), write_model)
    assert find_latest(disk / "saved") == before
    make_room()
    assert save_checkpoint(disk / "saved", state(2), write_model) == find_latest(disk / "saved")


def test_events_on_a_full_disk_are_lost_with_one_warning_and_written_again_with_room(
    disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # a driver once ended with a traceback over an event, and nobody read that the disk was full
    log = EventLog(disk, "driver")
    log.emit(EventKind.RUN_STARTED)
    make_room = fill_disk(disk)
    for _ in range(3):
        log.emit(EventKind.RUN_FAILED, error="x" * 5000)
    assert [record.getMessage().split(": ")[0] for record in caplog.records] == [f"{log.path} cannot be written"]
    make_room()
    log.emit(EventKind.RUN_FINISHED)
    assert [event.kind for event in read_events(disk)] == ["run_started", "run_finished"]


def test_a_large_disk_is_not_filled(tmp_path: Path) -> None:
    if shutil.disk_usage(tmp_path).free < 2 << 30:
        pytest.skip("this disk is small")
    with pytest.raises(ConfigError, match="Mount a small one"):
        fill_disk(tmp_path)


def test_a_torn_spool_has_lost_its_last_record_and_no_other(tmp_path: Path) -> None:
    assert tear_spool(tmp_path) is None  # there is no spool
    spool = Spool(tmp_path / "spool")
    spool.append([(Task("train", group, 1), b"x" * 100) for group in range(3)])
    spool.close()
    assert tear_spool(tmp_path) == tmp_path
    assert [task.group for task, _, _ in Spool(tmp_path / "spool").entries()] == [0, 1]


def test_a_directory_that_is_not_there_yet_moves_later(tmp_path: Path) -> None:
    assert move(tmp_path / "run") is None
    (tmp_path / "run").mkdir()
    assert move(tmp_path / "run") == tmp_path / "run.moved"
    assert (tmp_path / "run.moved").is_dir()
