"""Undoes a return to an older checkpoint when the run ends before its first trained round.

A restore changes rounds after its checkpoint: it takes them back, and missing payloads are generated again. Newer
checkpoints contain those rounds, and must stay valid until the run has really continued from the older one. So a copy
of the ledger from before the restore is kept beside it (`ledger.db.before`) until the first round is trained. A restore
from another checkpoint before that puts the copy back. The table `meta` records, in the same transactions, whether the
copy is valid.
"""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path

from vime.handoff.ledger_file import OLD_COPY
from vime.handoff.ledger_schema import UNREADABLE, open_for_reading
from vime.handoff.ledger_store import LedgerStore
from vime.handoff.ledger_types import LedgerFileError
from vime.utils.files import sync

_FLAG = "going_back"  # in meta: 1 from such a restore to the first trained round
_TO_ROUND = "select round from history where event = 'restored' order by sequence desc limit 1"


def before_path(path: Path) -> Path:
    return path.with_name(path.name + ".before")


def lasting_file(path: Path, checkpoint_round: int | None) -> Path:
    """Return the ledger with which a run from this checkpoint would continue: `path`, or the copy from before a restore
    to another checkpoint after which no round was trained yet."""
    if before_path(path).is_file():
        with closing(open_for_reading(path)) as connection:
            try:
                found = connection.execute("select value from meta where name = ?", (_FLAG,)).fetchone()
                is_another = connection.execute(_TO_ROUND).fetchone() != (_number(checkpoint_round),)
            except UNREADABLE as error:
                raise LedgerFileError(f"{path}: cannot be read as a ledger: {error}. {OLD_COPY}.") from error
        if found == (1,) and is_another:
            return before_path(path)
    return path


def undo_unless(store: LedgerStore, last: int) -> None:
    """Put the ledger back to before a restore without a trained round, unless that was to round `last` too."""
    path = before_path(store.path)
    if store.meta(_FLAG, 0) and store.one(_TO_ROUND) != (last,) and path.is_file():
        try:
            with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as source:
                source.backup(store.connection)  # in one transaction
        except sqlite3.Error as error:
            raise LedgerFileError(
                f"{path}: the ledger as it was before the run went back to an older checkpoint cannot be put back: "
                f"{error}. {store.path} was not changed; free disk space, or load that older checkpoint again."
            ) from error
        store.reload()
    if not store.meta(_FLAG, 0):
        _forget(path)


def keep_before(store: LedgerStore, last: int) -> bool:
    """Copy the ledger when a restore to round `last` takes back rounds that were trained. Return whether it did; then
    the transaction of the restore calls `note_going_back`."""
    if store.meta(_FLAG, 0):
        return True
    if store.one("select 1 from round where id > ? and is_final = 1 limit 1", last) is None:
        return False
    path = before_path(store.path)
    partial = path.with_name(path.name + ".partial")
    try:
        partial.unlink(missing_ok=True)
        with closing(sqlite3.connect(partial)) as copy:
            store.connection.backup(copy)
            copy.execute("pragma journal_mode = delete")
        sync(partial)
        os.replace(partial, path)
        sync(path.parent)
    except (sqlite3.Error, OSError) as error:
        raise LedgerFileError(
            f"{path}: the ledger could not be copied before it goes back to round {last}: {error}. Nothing was "
            "changed; free disk space, then repeat."
        ) from error
    return True


def note_going_back(store: LedgerStore) -> None:
    store.set_meta(_FLAG, 1)


def is_going_back(store: LedgerStore) -> bool:
    return bool(store.meta(_FLAG, 0))


def note_gone_on(store: LedgerStore) -> None:
    """Note that the first round is trained, in the transaction that marks it as trained."""
    store.set_meta(_FLAG, 0)


def forget_before(store: LedgerStore) -> None:
    """Delete the copy after that transaction."""
    _forget(before_path(store.path))


def _forget(path: Path) -> None:
    if path.exists():
        path.unlink()
        sync(path.parent)


def _number(checkpoint_round: int | None) -> int:
    return -1 if checkpoint_round is None else checkpoint_round
