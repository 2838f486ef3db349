"""The ledger's file: tables, schema versions, and how it is opened by its one writer and by readers.

One row per group in `prompt_group`, one per round in `round`, one per transition in `history`; the partial indices hold
only groups that are still moving, and statements name the one they use (`indexed by`: left alone, sqlite walks the
whole partition instead), so that no query grows with the length of the run. `pragma user_version` is the
schema's version: each entry of MIGRATIONS takes a file one version further, in one transaction; the first makes it.

What may be lost: kill -9 of any process loses nothing (every transition is a committed transaction in the write-ahead
log). With `synchronous` FULL a power cut loses nothing that was returned to a caller; with NORMAL, the default, it may
lose the last transitions, never the file's consistency. A lost commit is generated again, a lost lease is leased again.
Only a lost `trained` would train a group twice, which is why `Ledger.sync` comes before a checkpoint is made visible.
Any other loss (the file, its log, a part of one) is refused by name: ledger_file.py.
"""

from __future__ import annotations

import fcntl
import functools
import os
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

from vime.handoff.ledger_checksums import (
    Schema,
    add_facts,
    add_own_keys,
    find_faults,
    keep_sealed,
    make_seals,
    read_schema,
)
from vime.handoff.ledger_file import (
    OLD_COPY,
    Note,
    begin_log,
    check_is_there,
    check_log,
    fold_in,
    lock_path,
    no_log,
    read_note,
    refuse_empty,
    wal_path,
    write_note,
)
from vime.handoff.ledger_identity import make_identity
from vime.handoff.ledger_types import LedgerFileError
from vime.utils.files import NoLocksError, lock_file

APPLICATION_ID = 0x56494D45  # "VIME"
UNREADABLE = (sqlite3.Error, OSError, UnicodeDecodeError)  # the last: a name in a damaged file that sqlite repeats
BUSY_TIMEOUT_S = 10.0  # a reader that copies the file may block the writer for a moment

CREATE = """
create table meta(name text primary key, value integer not null) without rowid;
create table partition(id integer primary key, name text not null unique, next_group integer not null default 0);
create table prompt_group(
    partition integer not null, grp integer not null, attempt integer not null, state text not null,
    producer text, request text, admitted integer not null default 0,
    round integer, position integer, ready_sequence integer,
    checksum integer, num_bytes integer not null default 0, num_tokens integer not null default 0,
    num_rows integer not null default 0, min_version integer, max_version integer,
    partial_attempt integer, partial_checksum integer, reason text,
    primary key(partition, grp)) without rowid;
create index open_group on prompt_group(partition, grp) where state in ('issued', 'retry', 'ready');
create index retry_group on prompt_group(partition, grp) where state = 'retry';
create index ready_group on prompt_group(partition, ready_sequence) where state = 'ready';
create index round_group on prompt_group(round, position) where round is not null;
create table round(
    id integer primary key, state text not null, fence integer not null, holder text not null,
    version integer not null, num_groups integer not null, is_final integer not null default 0);
create index round_version on round(version);
create index moving_round on round(id) where state in ('leased', 'replay', 'trained');
create table history(
    sequence integer primary key, event text not null, partition integer, grp integer, attempt integer, round integer,
    num_tokens integer, num_bytes integer, note text)
"""
MOVING_ROUNDS = "round indexed by moving_round where state in ('leased', 'replay', 'trained')"
"""Rounds that are not durable, to be followed by further conditions: few, however long the run is."""
Migration = str | Callable[[sqlite3.Connection], None]
"""SQL, or a function that is called inside a transaction."""
MIGRATIONS: tuple[Migration, ...] = (CREATE, make_identity, make_seals, add_facts, add_own_keys)


def open_for_writing(
    path: Path, *, synchronous: str = "NORMAL", migrations: Sequence[Migration] = MIGRATIONS
) -> tuple[sqlite3.Connection, int]:
    """Return the writer's connection and the file lock that it holds, which ends with the process."""
    if synchronous not in ("NORMAL", "FULL"):
        raise LedgerFileError(f"{path}: synchronous {synchronous!r}; expected NORMAL or FULL.")
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(lock_path(path), os.O_RDWR | os.O_CREAT, 0o644)
    connection = None
    try:
        lock_file(lock, fcntl.LOCK_EX | fcntl.LOCK_NB, path)
        check_is_there(path)
        check_log(path)
        if read_note(path) is Note.OPEN:  # a clean end leaves nothing half-written
            with closing(_connect(path, "?mode=ro")) as reader:
                check_content(reader, path)
        connection = _connect(path)
        _check_identity(connection, path, len(migrations))
        begin_log(connection, path)
        connection.execute(f"pragma synchronous = {synchronous}")
        connection.execute("pragma wal_autocheckpoint = 0")  # `fold_in` does it, and leaves no old frames in the log
        _migrate(connection, migrations)
        keep_sealed(connection)
        fold_in(connection)
        write_note(lock, Note.OPEN)
    except BlockingIOError as error:
        os.close(lock)
        raise LedgerFileError(f"{path}: another process writes it. A ledger has one writer; end that run.") from error
    except NoLocksError as error:
        os.close(lock)
        raise LedgerFileError(str(error)) from error
    except BaseException as error:
        if connection is not None:
            connection.close()
            if read_note(path) is Note.OPEN and not wal_path(path).exists():
                write_note(lock, Note.CLOSED)  # closing it has folded in what a kill had left
        os.close(lock)
        if fault := no_log(error):
            raise LedgerFileError(f"{path}: {fault}") from error
        if isinstance(error, UNREADABLE):
            raise LedgerFileError(f"{path}: cannot be opened as a ledger: {error}. {OLD_COPY}.") from error
        raise
    return connection, lock


def close_for_writing(connection: sqlite3.Connection, lock: int, path: Path) -> None:
    """Close what `open_for_writing` returned of `path`: the file alone is then the ledger, unless somebody reads it
    just now."""
    try:
        is_whole = fold_in(connection)
        connection.close()  # the last connection folds in what a reader has held until now
        if is_whole or not wal_path(path).exists():
            write_note(lock, Note.CLOSED)
    finally:
        connection.close()
        os.close(lock)


def open_for_reading(path: Path) -> sqlite3.Connection:
    """Return a consistent view for the audit and the command line, also beside a live writer. Never changes the
    file."""
    check_is_there(path)
    if not path.is_file():
        raise LedgerFileError(f"{path}: there is no ledger; only runs in mode streaming or external keep one.")
    connection = None
    try:
        connection = _connect(path, "?mode=ro")
        connection.execute("begin")
        _check_identity(connection, path, len(MIGRATIONS))
        [version] = connection.execute("pragma user_version").fetchone()
        check_log(path)  # the log may grow, but is not truncated while this view lasts
        if version == 0:
            raise LedgerFileError(f"{path}: no ledger yet: a run that has just begun makes it.")
        if version != len(MIGRATIONS):
            raise LedgerFileError(
                f"{path}: schema {version}, this Vime reads {len(MIGRATIONS)}. Resuming the run migrates it."
            )
    except BaseException as error:
        if connection is not None:
            connection.close()
        if fault := no_log(error):
            raise LedgerFileError(f"{path}: {fault}") from error
        if isinstance(error, UNREADABLE):
            raise LedgerFileError(f"{path}: cannot be read as a ledger: {error}. {OLD_COPY}.") from error
        raise
    return connection


def check_content(connection: sqlite3.Connection, path: Path) -> None:
    """Refuse a ledger that is not as it was written. Reads all of it; of an older schema nothing."""
    try:
        [version] = connection.execute("pragma user_version").fetchone()
    except UNREADABLE as error:
        raise LedgerFileError(f"{path}: cannot be read as a ledger: {error}. {OLD_COPY}.") from error
    if version == len(MIGRATIONS) and (faults := find_faults(connection, expected_schema())):
        raise LedgerFileError(f"{path}: the ledger is damaged: {'; '.join(faults)}. {OLD_COPY}.")


@functools.cache
def expected_schema() -> Schema:
    """Return the schema of a new ledger."""
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        _migrate(connection, MIGRATIONS)
        return read_schema(connection)


def _connect(path: Path, mode: str = "") -> sqlite3.Connection:
    uri = path.resolve().as_uri() + mode
    return sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False, timeout=BUSY_TIMEOUT_S)


def _check_identity(connection: sqlite3.Connection, path: Path, newest: int) -> None:
    """Refuse another program's database and a schema of a later release, before anything is written."""
    version = connection.execute("pragma user_version").fetchone()[0]
    application = connection.execute("pragma application_id").fetchone()[0]
    is_empty = connection.execute("select count(*) from sqlite_master").fetchone()[0] == 0
    if is_empty:
        refuse_empty(path)
    elif application != APPLICATION_ID:
        raise LedgerFileError(f"{path}: is a database of another program. Choose another run directory.")
    if version > newest:
        raise LedgerFileError(f"{path}: schema {version}, this Vime knows up to {newest}. Use the Vime that wrote it.")


def _migrate(connection: sqlite3.Connection, migrations: Sequence[Migration]) -> None:
    version = connection.execute("pragma user_version").fetchone()[0]
    for number, migration in enumerate(migrations[version:], start=version + 1):
        connection.execute("begin immediate")
        try:
            if callable(migration):
                migration(connection)
            else:
                for statement in filter(str.strip, migration.split(";")):
                    connection.execute(statement)
            connection.execute(f"pragma application_id = {APPLICATION_ID}")
            connection.execute(f"pragma user_version = {number}")
            connection.execute("commit")
        except BaseException:
            connection.execute("rollback")
            raise
