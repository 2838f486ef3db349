"""Run directories on file systems that lack what their files need: no locks, no memory shared through a file."""

from __future__ import annotations

import errno
import fcntl
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.ledger_cases import issue, open_ledger
from vime.gateway.tokens import TokenFile
from vime.handoff import ledger_schema
from vime.handoff.ledger_file import begin_log
from vime.handoff.ledger_schema import open_for_reading
from vime.handoff.ledger_types import LedgerFileError
from vime.handoff.spool import Spool
from vime.observability.run_dir import RunDir, claimed_checkpoints, is_alive
from vime.types import ConfigError, HandoffError, VimeError


def hold_checkpoints(path: Path) -> None:
    with claimed_checkpoints(str(path)):
        pass


def make_run(path: Path) -> None:
    RunDir.create(str(path), "{}").close()


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
@pytest.mark.parametrize(
    ("opening", "kind", "begins"),
    [
        (make_run, ConfigError, "--run-dir "),
        (hold_checkpoints, ConfigError, "--save "),
        (open_ledger, LedgerFileError, ""),
        (Spool, HandoffError, ""),
        (TokenFile, ConfigError, ""),
    ],
)
def test_a_file_system_without_locks_is_refused_with_what_to_do(
    opening: Callable[[Path], object],
    kind: type[VimeError],
    begins: str,
    number: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Lustre without its mount option says ENOSYS, NFS without a lock manager ENOLCK, others EOPNOTSUPP."""

    def refused(descriptor: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refused)
    with pytest.raises(kind) as caught:
        opening(tmp_path)
    said = str(caught.value)
    assert said.startswith(f"{begins}{tmp_path}")
    got = f"{errno.errorcode[number]} ({os.strerror(number)})"
    assert f": the file system has no file locks: flock got {got}, expected a lock, which keeps a second" in said
    assert "Choose a directory on another file system" in said


def test_another_error_of_a_lock_is_not_taken_for_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(descriptor: int, operation: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(fcntl, "flock", broken)
    with pytest.raises(ConfigError, match=r"cannot be made: \[Errno 5\]"):
        make_run(tmp_path)


def test_where_there_are_no_locks_a_run_is_alive_that_touches_its_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node may see the files of a run on another node without their locks."""

    def refused(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    with RunDir.create(str(tmp_path), "{}"):
        assert is_alive(tmp_path)
        monkeypatch.setattr(fcntl, "flock", refused)
        assert not is_alive(tmp_path)
        (tmp_path / "waits").mkdir(exist_ok=True)
        touched = tmp_path / "waits" / "driver.json"
        touched.write_text("{}")
        assert is_alive(tmp_path)
        old = touched.stat().st_mtime - 3600
        os.utime(touched, (old, old))
        assert not is_alive(tmp_path), "a copy, or a run that ended an hour ago"


def test_a_ledger_is_refused_where_sqlite_goes_on_without_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where its build or the file system has no shared memory: it says so only when it is asked."""
    connect = ledger_schema._connect

    class WithoutLog(sqlite3.Connection):
        def execute(self, sql: str, *more: object) -> sqlite3.Cursor:
            return super().execute("select 'delete'" if sql == "pragma journal_mode = wal" else sql, *more)

    def connected(path: Path, mode: str = "") -> sqlite3.Connection:
        return sqlite3.connect(path, factory=WithoutLog, isolation_level=None)

    monkeypatch.setattr(ledger_schema, "_connect", connected)
    with pytest.raises(LedgerFileError, match=r"got journal mode delete, expected journal mode wal .*\(--run-dir\) on"):
        open_ledger(tmp_path)
    monkeypatch.setattr(ledger_schema, "_connect", connect)
    open_ledger(tmp_path).close()  # nothing was left behind that is in the way


def test_a_ledger_is_refused_where_a_first_write_to_its_log_fails(tmp_path: Path) -> None:
    """Sqlite takes the mode and cannot make the shared file: its place is taken."""
    (tmp_path / "ledger.db-shm").mkdir()
    with pytest.raises(LedgerFileError, match=r"cannot keep its write-ahead log here: got .* \(SQLITE_\w+\), expected"):
        open_ledger(tmp_path)
    (tmp_path / "ledger.db-shm").rmdir()
    assert not (tmp_path / "ledger.db-wal").exists() or (tmp_path / "ledger.db-wal").stat().st_size == 0, (
        "a log with bytes and no table would be taken for a lost ledger"
    )
    open_ledger(tmp_path).close()


def test_the_trial_of_the_log_writes_nothing(tmp_path: Path) -> None:
    """A kill behind it, before the first migration, leaves a ledger that was never made."""
    path = tmp_path / "ledger.db"
    connection = sqlite3.connect(path, isolation_level=None)
    begin_log(connection, path)
    assert (tmp_path / "ledger.db-wal").stat().st_size == 0
    connection.close()
    open_ledger(tmp_path).close()


def test_a_directory_that_may_not_be_written_is_not_called_a_network_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    (tmp_path / "ledger.db-shm").mkdir()
    with pytest.raises(LedgerFileError) as caught:
        open_ledger(tmp_path)
    assert "network" not in str(caught.value)


def test_a_ledger_that_is_read_where_its_log_cannot_be_shared_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = open_ledger(tmp_path)
    issue(ledger, 1)
    ledger.close()

    def failing(connection: sqlite3.Connection, path: Path, newest: int) -> None:
        error = sqlite3.OperationalError("disk I/O error")
        error.sqlite_errorname = "SQLITE_IOERR_SHMMAP"  # as sqlite sets it when `mmap` is refused
        raise error

    monkeypatch.setattr(ledger_schema, "_check_identity", failing)
    for opening in (lambda: open_for_reading(tmp_path / "ledger.db"), lambda: open_ledger(tmp_path)):
        with pytest.raises(LedgerFileError) as caught:
            opening()
        assert "got disk I/O error (SQLITE_IOERR_SHMMAP), expected journal mode wal" in str(caught.value)
        assert "backup" not in str(caught.value)
