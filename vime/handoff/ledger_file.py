"""Checks that the ledger's file is as its last writer left it: not lost, not emptied, its write-ahead log complete.

sqlite makes a new database in place of a lost or empty file, and drops everything after the first damaged frame of its
log, both silently. Either would train prompts a second time, so both are checked before sqlite opens the file.

`ledger.db.lock` records that a ledger was made here, and whether its writer is at work: `open` while it is and after a
kill (then `ledger.db-wal` belongs to the file), `closed` after a clean end (then the file alone is the ledger).
"""

from __future__ import annotations

import logging
import os
import sqlite3
import struct
from enum import StrEnum
from pathlib import Path

from vime.handoff.ledger_types import SPOOL_NAME, LedgerFileError

logger = logging.getLogger(__name__)
OLD_COPY = (
    "Put a copy of the file in its place (from a backup, or `vime queue import`; remove ledger.db-wal, ledger.db-shm "
    "and ledger.db.lock then), or begin anew in another run directory, with an export (--save-hf) as --hf-checkpoint"
)
NEXT = f"Continuing would train its prompts a second time. {OLD_COPY}."
_NO_LOG = (
    "sqlite cannot keep its write-ahead log here: got {}, expected journal mode wal and a file that processes of this "
    "node can map. Some network file systems have no such files. Put the run directory (--run-dir) on another file "
    "system, best on a disk of the node that owns the ledger (docs/gpu-launch.md)."
)
_UNSHARED = ("SQLITE_IOERR_SHMOPEN", "SQLITE_IOERR_SHMLOCK", "SQLITE_IOERR_SHMMAP", "SQLITE_PROTOCOL")
"""Not SHMSIZE, which a full disk is too."""
_WAL_HEADER = struct.Struct(">8I")  # magic, format, page size, number of resets, two salts, two checksums
_FRAME_HEADER = struct.Struct(">6I")  # page, pages of the database after a commit, two salts, two checksums
_BIG_ENDIAN, _LITTLE_ENDIAN = 0x377F0683, 0x377F0682


class Note(StrEnum):
    """What the lock file records about the ledger beside it."""

    NONE = ""  # none was ever made here, or its creation was interrupted
    OPEN = "open"
    CLOSED = "closed"


def lock_path(path: Path) -> Path:
    return path.with_name(path.name + ".lock")


def wal_path(path: Path) -> Path:
    return path.with_name(path.name + "-wal")


def write_note(lock: int, note: Note) -> None:
    """Write the note; it is on disk when this returns. `lock`: descriptor of the lock file."""
    text = f"{note}\n".encode()
    os.pwrite(lock, text, 0)
    os.ftruncate(lock, len(text))
    os.fsync(lock)


def read_note(path: Path) -> Note:
    lock = lock_path(path)
    try:
        text = lock.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return Note.NONE
    try:
        return Note(text.decode().removesuffix("\n"))
    except ValueError:
        raise LedgerFileError(
            f"{lock}: says {text[:40]!r}; expected '{Note.OPEN}' or '{Note.CLOSED}': the file is damaged. If "
            f"{path.name} and {wal_path(path).name} are whole, remove it."
        ) from None


def has_history(path: Path) -> bool:
    """Return whether something beside the file shows that a ledger was here: its lock file, its log, or payloads."""
    wal = wal_path(path)
    has_log = wal.is_file() and wal.stat().st_size > 0
    return has_log or any((path.parent / SPOOL_NAME).glob("segment-*")) or read_note(path) is not Note.NONE


def check_is_there(path: Path) -> None:
    """Refuse a ledger whose file is gone or without a byte, or whose log is gone, while its history is there."""
    size = path.stat().st_size if path.is_file() else None
    if not size:
        if has_history(path):
            what = "is gone" if size is None else "is empty"
            raise LedgerFileError(
                f"{path}: the ledger {what}, but the files beside it show that a run wrote it. {NEXT}"
            )
    elif read_note(path) is Note.OPEN and not wal_path(path).exists():
        raise LedgerFileError(
            f"{wal_path(path)}: is gone, but the process that wrote {path.name} did not end cleanly, so what it wrote "
            f"last is in that file. Put it back. If another sqlite program has folded it in, remove "
            f"{lock_path(path).name}; else: {OLD_COPY}."
        )


def refuse_empty(path: Path) -> None:
    """Refuse a database without a table: all that a lost log leaves of a ledger, unless none was ever made."""
    if has_history(path):
        raise LedgerFileError(
            f"{path}: the ledger is empty (no table in {path.stat().st_size} bytes), but the files beside it show "
            f"a run. {NEXT}"
        )


def check_log(path: Path) -> None:
    """Refuse a write-ahead log with damage that is no torn end: sqlite would drop the rest of it silently."""
    wal = wal_path(path)
    try:
        data = wal.read_bytes()
    except FileNotFoundError:
        return
    fault = find_damage(data)
    if fault is not None:
        raise LedgerFileError(
            f"{wal}: {fault}, so the ledger's last transitions cannot be read. Put a copy in its place. After a power "
            f"cut, or without a copy, {path.name} alone may be continued from the checkpoint that it knows: move "
            f"{wal.name}, {path.name}-shm and {lock_path(path).name} out of the directory."
        )


def begin_log(connection: sqlite3.Connection, path: Path) -> None:
    """Have sqlite write ahead, and try it with a transaction that writes nothing.

    It needs memory that is shared through a file beside the ledger, for which it maps that file. Some network file
    systems do not let it; then sqlite goes on without a log, or fails at the first write.
    """
    try:
        [mode] = connection.execute("pragma journal_mode = wal").fetchone()
        if mode != "wal":
            raise LedgerFileError(f"{path}: {_NO_LOG.format(f'journal mode {mode}')}")
        connection.execute("begin immediate")
        connection.execute("rollback")
    except sqlite3.OperationalError as error:
        is_ours = os.access(path, os.W_OK) and os.access(path.parent, os.W_OK)  # else it is a matter of permissions
        if is_ours and error.sqlite_errorname.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN")):
            raise LedgerFileError(f"{path}: {_NO_LOG.format(f'{error} ({error.sqlite_errorname})')}") from error
        raise


def no_log(error: BaseException) -> str:
    """Return what to say of an error of sqlite that could not share memory through a file; empty for any other."""
    name = getattr(error, "sqlite_errorname", "")
    return _NO_LOG.format(f"{error} ({name})") if name in _UNSHARED else ""


def find_damage(wal: bytes) -> str | None:
    """Return what is wrong with the bytes of a write-ahead log; None when each frame is whole up to where a kill cut
    it.

    The ledger's log is never overwritten (`fold_in` truncates it to nothing), so a complete frame that does not fit its
    checksum was damaged. A kill leaves an incomplete frame, a power cut also zeros. sqlite may also be killed while it
    writes frames of a long transaction again; no commit follows them, so nothing is lost. The format is sqlite's
    (https://www.sqlite.org/fileformat2.html, section 4).
    """
    if len(wal) <= _WAL_HEADER.size:
        return None  # no frame was written yet
    magic, _, page_size, _, *salts, first, second = _WAL_HEADER.unpack_from(wal)
    if magic not in (_BIG_ENDIAN, _LITTLE_ENDIAN):
        return "its header is damaged"
    pair = struct.Struct(">II" if magic == _BIG_ENDIAN else "<II")
    sums = _add(pair, wal[: _WAL_HEADER.size - 8], (0, 0))
    if sums != (first, second):
        return "its header is damaged"
    frame_bytes = _FRAME_HEADER.size + page_size
    frames = range(_WAL_HEADER.size, len(wal) - frame_bytes + 1, frame_bytes)
    for number, at in enumerate(frames, start=1):
        _, _, *found, first, second = _FRAME_HEADER.unpack_from(wal, at)
        if found[0] != salts[0] and found[1] != salts[1]:
            return None  # zeros, or left from an earlier log: the written part ends here
        sums = _add(pair, wal[at : at + 8], sums)
        sums = _add(pair, wal[at + _FRAME_HEADER.size : at + frame_bytes], sums)
        if found != salts or sums != (first, second):
            later = [_FRAME_HEADER.unpack_from(wal, other) for other in frames[number - 1 :]]
            is_lost = len(later) == 1 or any(commit and salt in salts for _, commit, salt, *_ in later)
            return f"frame {number} of {len(frames)} is damaged (offset {at})" if is_lost else None
    return None


def _add(pair: struct.Struct, data: bytes, sums: tuple[int, int]) -> tuple[int, int]:
    """Return sqlite's checksum of `data`, a multiple of 8 bytes, continued from `sums`."""
    first, second = sums
    for one, other in pair.iter_unpack(data):
        first = (first + one + second) & 0xFFFFFFFF
        second = (second + other + first) & 0xFFFFFFFF
    return first, second


def fold_in(connection: sqlite3.Connection) -> bool:
    """Move the write-ahead log into the file, both on disk, and truncate it: the file alone is then the ledger.

    It does not wait: while a reader uses an older snapshot, or on a full disk, only a part is moved, and it returns
    False. Nothing is lost then: the log stays.
    """
    [timeout_ms] = connection.execute("pragma busy_timeout").fetchone()
    connection.execute("pragma busy_timeout = 0")
    try:
        [is_busy, *_] = connection.execute("pragma wal_checkpoint(truncate)").fetchone()
    except sqlite3.OperationalError as error:
        logger.warning("the ledger's log could not be folded into its file: %s. It is tried again later.", error)
        is_busy = True
    finally:
        connection.execute(f"pragma busy_timeout = {timeout_ms}")
    return not is_busy
