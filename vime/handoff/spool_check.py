"""Checks, before the unreadable end of the spool is cut off, whether it is a record that the ledger knows.

A kill leaves a half-written record that the ledger does not know: it is cut off silently. A record that the ledger
knows was whole once, so a fault in it is damage and is reported. With --transferqueue-fsync never a power cut may cut
off records that the ledger knows; their groups are generated again, with a warning.
"""

from __future__ import annotations

import logging
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from vime.handoff.ledger import needed_payloads
from vime.handoff.ledger_schema import open_for_reading
from vime.handoff.ledger_types import SPOOL_NAME, Task
from vime.handoff.spool import Spools
from vime.handoff.spool_format import SpoolDamageError, Tail

logger = logging.getLogger(__name__)
_ROW = """select state in ('ready', 'leased', 'trained', 'durable'), attempt, checksum, partial_attempt,
    partial_checksum from prompt_group where partition = (select id from partition where name = ?) and grp = ?"""
_BY_CHECKSUM = """select p.name, g.grp, g.attempt from prompt_group g join partition p on p.id = g.partition
    where g.state in ('ready', 'leased', 'trained', 'durable') and g.checksum = ?1 union
    select p.name, g.grp, g.partial_attempt from prompt_group g join partition p on p.id = g.partition
    where g.partial_checksum = ?1"""


@dataclass(frozen=True, slots=True)
class KnownTail:
    """The unreadable end of a spool, and which record of the ledger it is."""

    tail: Tail
    name: str  # of the group, or of the groups that it may be

    def __str__(self) -> str:
        return f"{self.tail.path.name}, offset {self.tail.offset}: {self.tail.what}; the ledger knows it as stored"


def check_spool(run: Path, ledger: Path, *, train: str, may_be_torn: bool) -> None:
    """Raise SpoolDamageError when the spool's last record is damaged and the ledger knows it. `may_be_torn`: for a
    record that is cut off only warn."""
    if not (run / SPOOL_NAME).is_dir():
        return
    with closing(open_for_reading(ledger)) as connection:
        found = find_known_tail(Spools(run / SPOOL_NAME), connection, train=train)
    if found is None:
        return
    if may_be_torn and found.tail.is_torn:
        logger.warning("%s, group %s. It is generated again (--transferqueue-fsync never).", found, found.name)
        return
    what = f"{found.tail.what}, and the ledger knows the record as stored, so this is no torn end of a kill"
    raise SpoolDamageError(found.tail.path, found.tail.offset, found.name, what)


def find_known_tail(spool: Spools, connection: sqlite3.Connection, *, train: str) -> KnownTail | None:
    """Return the unreadable end of a spool if it is, or may be, a record that the ledger knows."""
    found = [_known_tail(tail, spool, connection, train) for tail in spool.tails()]
    return next((known for known in found if known is not None), None)


def _known_tail(tail: Tail, spool: Spools, connection: sqlite3.Connection, train: str) -> KnownTail | None:
    task = tail.task
    if task is not None:
        known = connection.execute(_ROW, (task.partition, task.group)).fetchone()
        if known is None:
            return None
        is_stored, attempt, checksum, partial_attempt, partial_checksum = known
        held = [(attempt, checksum)] if is_stored else []
        held += [(partial_attempt, partial_checksum)] if partial_attempt is not None else []
        matches = [found for found in held if found[0] == task.attempt and tail.checksum in (None, found[1])]
        return KnownTail(tail, str(task)) if any(not spool.has(task, found[1]) for found in matches) else None
    if tail.checksum is not None:  # the start is whole, the name is damaged
        rows = connection.execute(_BY_CHECKSUM, (tail.checksum,)).fetchall()
        names = [str(Task(*row)) for row in rows if not spool.has(Task(*row), tail.checksum)]
        return KnownTail(tail, " or ".join(names)) if names else None
    needed = needed_payloads(connection, train)
    missing = [str(task) for task, checksum in needed.items() if checksum is not None and not spool.has(task, checksum)]
    return KnownTail(tail, " or ".join(missing[:5])) if missing else None
