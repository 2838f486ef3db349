"""A ledger that lost its file, its tables or a part of its log is refused by name: it was taken for a new one, and
every prompt was trained a second time."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.ledger_cases import RULES, Clock, checked, issue, lease, open_ledger, payload, train
from vime.cli.main import main
from vime.handoff.ledger import Ledger
from vime.handoff.ledger_file import find_damage
from vime.handoff.ledger_types import LedgerFileError
from vime.handoff.queue_view import export_queue, import_queue
from vime.handoff.spool import Spool

FRAME_BYTES = 24 + 4096


def write(directory: Path) -> None:
    """Two rounds; the first is in a checkpoint, which `sync` came before."""
    ledger, spool = open_ledger(directory), Spool(directory / "spool")
    train(ledger, 0)
    ledger.sync()
    ledger.rounds.durable(0)
    train(ledger, 1)
    [task, _] = issue(ledger, 2)
    spool.append([(task, b"0")])
    spool.close()
    if directory.name != "killed":
        ledger.close()


@pytest.fixture
def ended(tmp_path: Path) -> Path:
    """Of a run that ended cleanly."""
    write(tmp_path / "ended")
    return tmp_path / "ended"


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """Of a run whose process was killed: what came after `sync` is in the log."""
    child = os.fork()
    if child == 0:
        try:
            write(tmp_path / "killed")
            os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
    assert (tmp_path / "killed" / "ledger.db-wal").stat().st_size > 10 * FRAME_BYTES
    return tmp_path / "killed"


def remove(*names: str) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        for name in names:
            (run / name).unlink()

    return change


def truncate(name: str, size: int) -> Callable[[Path], None]:
    return lambda run: os.truncate(run / name, size)


def flip(name: str, offset: int, bit: int = 3) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        data = bytearray((run / name).read_bytes())
        data[offset] ^= 1 << bit
        (run / name).write_bytes(data)

    return change


def empty(run: Path) -> None:
    """What a lost log left of a ledger that was never folded in: a database without a table."""
    connection = sqlite3.connect(run / "new.db")
    connection.execute("pragma journal_mode = wal")
    connection.close()
    os.replace(run / "new.db", run / "ledger.db")


def contents(run: Path) -> dict[str, bytes]:
    """What files hold, but for sqlite's shared memory, which is made anew."""
    found = {path.name: path.read_bytes() for path in run.iterdir() if path.is_file() and path.name != "ledger.db-shm"}
    return {name: data for name, data in found.items() if data}


LOSSES = [
    ("ended", remove("ledger.db"), "the ledger is gone"),
    ("ended", remove("ledger.db", "ledger.db.lock"), "the ledger is gone"),
    ("ended", truncate("ledger.db", 0), "the ledger is empty"),
    ("ended", empty, r"the ledger is empty \(no table in 4096 bytes\)"),
    ("ended", truncate("ledger.db", 8192), "malformed"),
    ("killed", remove("ledger.db"), "the ledger is gone"),
    ("killed", truncate("ledger.db", 0), "the ledger is empty"),
    ("killed", remove("ledger.db-wal"), "ledger.db-wal: is gone, but the process that wrote ledger.db did not end"),
    ("killed", flip("ledger.db-wal", 8), "ledger.db-wal: its header is damaged"),
    ("killed", flip("ledger.db-wal", 32 + 1000), "frame 1 of .* is damaged"),
    ("killed", flip("ledger.db-wal", 32 + 8), "frame 1 of .* is damaged"),  # in its salt
    ("killed", flip("ledger.db-wal", -1000), "is damaged"),  # in the last frame, which no torn end explains
    ("killed", flip("ledger.db.lock", 1), r"ledger.db.lock: says .*expected 'open' or 'closed'"),
]


@pytest.mark.parametrize(("kind", "lose", "says"), LOSSES)
def test_what_is_lost_is_named_by_a_resume_and_by_every_command_and_nothing_is_changed(
    kind: str,
    lose: Callable[[Path], None],
    says: str,
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run: Path = request.getfixturevalue(kind)
    lose(run)
    left = contents(run)
    for _ in range(2):
        with pytest.raises(LedgerFileError, match=says):
            open_ledger(run)
    for command in (["audit", str(run)], ["queue", "ls", str(run)]):
        assert main(command) == 3
        told = capsys.readouterr().err
        assert "Resuming the run migrates it" not in told
        assert len(told.strip().splitlines()) == 1
    assert contents(run) == left


def test_after_a_sync_and_after_the_end_the_file_alone_is_a_backup(tmp_path: Path) -> None:
    """All history lay in ledger.db-wal, and ledger.db was 4,096 empty bytes."""
    ledger = open_ledger(tmp_path / "run")
    train(ledger, 0)
    ledger.sync()
    (tmp_path / "copy").mkdir()
    shutil.copy(tmp_path / "run" / "ledger.db", tmp_path / "copy")
    assert checked(tmp_path / "copy", checkpoint_round=0).groups == {"trained": 2}
    train(ledger, 1)
    ledger.close()
    assert not (tmp_path / "run" / "ledger.db-wal").exists()
    shutil.copy(tmp_path / "run" / "ledger.db", tmp_path / "copy")
    assert checked(tmp_path / "copy", checkpoint_round=1).groups == {"trained": 4}
    again = open_ledger(tmp_path / "copy")
    assert train(again, 2) == [4, 5]
    again.close()


def test_a_reader_holds_up_no_sync_and_its_log_is_folded_in_the_next_time(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path)
    train(ledger, 0)
    reader = sqlite3.connect(f"file:{tmp_path / 'ledger.db'}?mode=ro", uri=True, isolation_level=None)
    reader.execute("begin")
    reader.execute("select count(*) from history").fetchall()
    train(ledger, 1)
    began = time.monotonic()
    ledger.sync()
    assert time.monotonic() - began < 9  # a reader may take ten seconds, which nobody waits for here
    assert (tmp_path / "ledger.db-wal").stat().st_size > 0
    reader.close()
    ledger.sync()
    assert (tmp_path / "ledger.db-wal").stat().st_size == 0
    ledger.close()


def test_a_log_cut_off_anywhere_by_a_kill_is_gone_on_with(killed: Path) -> None:
    """The last frame may be half there; whole frames before it count up to the last whole transaction."""
    size = (killed / "ledger.db-wal").stat().st_size
    for cut in (1, 100, FRAME_BYTES - 1, FRAME_BYTES, 3 * FRAME_BYTES + 7, size - 40, size - 32, size):
        copy = killed.with_name(f"cut-{cut}")
        shutil.copytree(killed, copy)
        os.truncate(copy / "ledger.db-wal", size - cut)
        ledger = open_ledger(copy)
        assert ledger.rounds.restore(0, lambda task, checksum: True).replayed_rounds in ((1,), ())
        ledger.close()
        checked(copy, checkpoint_round=0)


def test_the_checksums_of_a_log_are_those_of_sqlite(killed: Path) -> None:
    """Every frame is whole as sqlite wrote it, and one flipped bit anywhere in any of them is found."""
    log = (killed / "ledger.db-wal").read_bytes()
    assert find_damage(log) is None
    for at in [*range(56), *range(56, 32 + 2 * FRAME_BYTES, 97), *range(len(log) - FRAME_BYTES, len(log), 197)]:
        damaged = bytearray(log)
        damaged[at] ^= 1 << (at % 8)
        assert find_damage(bytes(damaged)) is not None, at


def test_frames_of_a_transaction_that_never_ended_may_be_anything(killed: Path) -> None:
    """sqlite writes frames of a long transaction again before its commit, and may be killed in between."""
    log = bytearray((killed / "ledger.db-wal").read_bytes())
    frames = range(32, len(log), FRAME_BYTES)
    commits = [at for at in frames if log[at + 4 : at + 8] != bytes(4)]
    before, last = commits[-2] + FRAME_BYTES, commits[-1]
    assert last > before + FRAME_BYTES  # the last transaction has three frames or more
    log[before + 100] ^= 1
    assert find_damage(bytes(log)) is not None
    assert find_damage(bytes(log[:last])) is None


def test_a_long_log_is_folded_in_without_a_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vime.handoff.ledger_store.MAX_LOG_BYTES", 100_000)
    ledger = Ledger(tmp_path / "ledger.db", RULES, clock=Clock())
    sizes = []
    for round_id in range(60):
        train(ledger, round_id)
        sizes.append((tmp_path / "ledger.db-wal").stat().st_size)
    # a look every 64 transactions, each of up to ten pages of 4 KiB
    assert max(sizes) < 100_000 + 64 * 10 * FRAME_BYTES
    assert sizes != sorted(sizes)
    ledger.close()
    checked(tmp_path)


def test_an_imported_queue_takes_the_place_of_a_lost_one(ended: Path, tmp_path: Path) -> None:
    """Also where the lock file and the log of the lost one still lie."""
    ledger = open_ledger(ended)
    for task in ledger.prompts.heartbeat("p"):
        ledger.prompts.drop(task, "none")
    ledger.rounds.durable(1)
    ledger.close()
    export_queue(ended, tmp_path / "queue.tar")
    shutil.rmtree(ended / "spool")
    (ended / "ledger.db").unlink()
    (ended / "ledger.db-wal").write_bytes(b"of the lost one")
    import_queue(ended, tmp_path / "queue.tar")
    checked(ended, checkpoint_round=1)
    open_ledger(ended).close()


def test_a_lease_is_not_lost_by_looking_at_the_ledger_of_a_killed_run(
    killed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["queue", "ls", str(killed)]) == 0
    assert "trained" in capsys.readouterr().out
    ledger = open_ledger(killed)
    assert ledger.rounds.restore(0, lambda task, checksum: True).replayed_rounds == (1,)
    assert lease(ledger, 1).is_replay
    with pytest.raises(LedgerFileError):
        Ledger(killed / "ledger.db", RULES, clock=Clock())
    ledger.close()
    assert payload().num_rows == 2
