"""Read the ledger's file: an overview, one group's history, and a copy of the whole queue.

It may run beside a live run. The copy (`export_queue`) is a tar file of the ledger at one moment and of the payloads
that it may still need; `import_queue` makes the queue of a run directory from it, on another machine or after a lost
disk.
"""

from __future__ import annotations

import io
import json
import os
import sqlite3
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from vime.handoff.ledger import needed_payloads
from vime.handoff.ledger_file import lock_path, wal_path
from vime.handoff.ledger_schema import open_for_reading
from vime.handoff.ledger_types import LEDGER_NAME, SPOOL_NAME, LedgerFileError, Task
from vime.handoff.receipts import RECEIPTS_NAME
from vime.handoff.spool import Spool, Spools
from vime.types import HandoffError
from vime.utils.files import sync, sync_tree

MARK = "vime-queue-1"  # first member of an exported file: its format
SEGMENT = "segment-00000001.vsp"
GROUP_FIELDS = (
    "attempt", "state", "producer", "round", "position", "num_rows", "num_tokens", "num_bytes", "min_version",
    "max_version", "checksum", "partial_attempt", "reason", "own_key",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueOverview:
    """`groups` counts by (partition, state); `rounds` are those that are not durable: (id, state, groups, holder)."""

    groups: dict[tuple[str, str], tuple[int, int]]  # -> groups, tokens
    dropped: dict[str, int]  # reason -> groups
    rounds: tuple[tuple[int, str, int, str], ...]
    in_flight: dict[str, int]  # producer -> groups
    serving: int
    spool_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupView:
    """One group: its row, and its lines of history as (sequence, event, attempt, round, note)."""

    fields: dict[str, object]
    history: tuple[tuple[int, str, int, int | None, str], ...]


def read_overview(run: Path) -> QueueOverview:
    with _reading(run) as connection:
        counts = connection.execute(
            "select p.name, state, count(*), sum(num_tokens) from prompt_group g "
            "join partition p on p.id = g.partition group by p.id, state order by p.id, state"
        ).fetchall()
        dropped = connection.execute(
            "select reason, count(*) from prompt_group where state = 'dropped' group by reason order by reason"
        ).fetchall()
        rounds = connection.execute(
            "select id, state, num_groups, holder from round where state in ('leased', 'replay', 'trained') order by id"
        ).fetchall()
        flights = connection.execute(
            "select producer, count(*) from prompt_group where state = 'issued' group by producer order by producer"
        ).fetchall()
        serving = connection.execute("select value from meta where name = 'serving'").fetchone()
    return QueueOverview(
        groups={(name, state): (count, tokens) for name, state, count, tokens in counts},
        dropped=dict(dropped),
        rounds=tuple(rounds),
        in_flight=dict(flights),
        serving=serving[0] if serving else 0,
        spool_bytes=sum(path.stat().st_size for path in (run / SPOOL_NAME).rglob("segment-*")),
    )


def read_group(run: Path, partition: str, group: int) -> GroupView:
    place = "partition = (select id from partition where name = ?) and grp = ?"
    with _reading(run) as connection:
        sql = f"select {', '.join(GROUP_FIELDS)} from prompt_group where {place}"
        row = connection.execute(sql, (partition, group)).fetchone()
        if row is None:
            raise HandoffError(f"{run}: no group {partition}/{group} was issued; see `vime queue ls {run}`.")
        lines = connection.execute(
            f"select sequence, event, attempt, round, coalesce(note, '') from history where {place} "
            "or (grp is null and round = ? and event != 'released') order by sequence",
            (partition, group, row[GROUP_FIELDS.index("round")]),
        ).fetchall()
    return GroupView(fields=dict(zip(GROUP_FIELDS, row, strict=True)), history=tuple(lines))


def ledger_fates(run: Path) -> dict[str, dict[int | None, list[int]]]:
    """Return groups by what became of them: `dropped: reason` or the state, then by round (None: of no round). Empty
    where the run has no ledger."""
    if not (run / LEDGER_NAME).is_file():
        return {}
    found: dict[str, dict[int | None, list[int]]] = {}
    with _reading(run) as connection:
        rows = connection.execute("select state, reason, round, grp from prompt_group order by grp")
        for state, reason, round_id, group in rows:
            name = f"{state}: {reason}" if state == "dropped" and reason else state
            found.setdefault(name, {}).setdefault(round_id, []).append(group)
    return found


def export_queue(run: Path, target: Path) -> int:
    """Write the queue of `run` to the file `target`; return how many payloads it holds. The run may be live."""
    if target.exists():
        raise HandoffError(f"{target}: is there already. Choose another name.")
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise HandoffError(f"{target}: no directory {target.parent} that can be written. Make it, or choose another.")
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".vime-queue-") as name:
        directory = Path(name)
        with _reading(run) as connection, closing(sqlite3.connect(directory / LEDGER_NAME)) as copy:
            connection.backup(copy)
            copy.execute("pragma journal_mode = delete")
            train = json.loads(connection.execute(_RULES).fetchone()[0])["partition"]
            needed = {
                task: checksum for task, checksum in needed_payloads(connection, train).items() if checksum is not None
            }
        source, spool = Spools(run / SPOOL_NAME), Spool(directory / SPOOL_NAME, segment_bytes=1 << 62)
        stored = [(task, checksum) for task, checksum in needed.items() if checksum is not None]
        for task, checksum in stored:
            spool.append([(task, source.read(task, checksum))])
        spool.close()
        partial = directory / "queue.tar"
        with tarfile.open(partial, "w") as archive:
            archive.addfile(tarfile.TarInfo(MARK), io.BytesIO())
            archive.add(directory / LEDGER_NAME, LEDGER_NAME)
            if stored:
                archive.add(directory / SPOOL_NAME / SEGMENT, SEGMENT)
            if (run / RECEIPTS_NAME).is_file():  # read after the ledger: it has the receipt of each trained round
                archive.add(run / RECEIPTS_NAME, RECEIPTS_NAME)
        sync(partial)
        os.replace(partial, target)
        sync(target.parent)
    return len(stored)


def import_queue(run: Path, source: Path) -> int:
    """Make the queue of the run directory `run` from an exported file; return the number of its payloads. `run` must
    have no queue yet; checkpoints and metrics are not part of the file."""
    if (run / LEDGER_NAME).exists() or any((run / SPOOL_NAME).rglob("segment-*")):
        raise HandoffError(f"{run}: has a queue already, which an import would overwrite. Import into a new directory.")
    run.mkdir(parents=True, exist_ok=True)
    try:
        with tarfile.open(source) as archive, tempfile.TemporaryDirectory(dir=run, prefix=".import-") as name:
            if archive.getnames()[:2] != [MARK, LEDGER_NAME]:
                raise HandoffError(f"{source}: is no exported queue of this format ({MARK}).")
            directory = Path(name)
            for member in (LEDGER_NAME, SEGMENT, RECEIPTS_NAME):
                place = directory / (SPOOL_NAME if member == SEGMENT else "") / member
                if member in archive.getnames():
                    place.parent.mkdir(exist_ok=True)
                    file = archive.extractfile(member)
                    if file is None:
                        raise HandoffError(f"{source}: {member} is no file in it.")
                    place.write_bytes(file.read())
            entries = _check_complete(directory)
            sync_tree(directory)
            for path in (directory / SPOOL_NAME).glob("segment-*"):
                (run / SPOOL_NAME).mkdir(exist_ok=True)
                os.replace(path, run / SPOOL_NAME / path.name)
                sync(run / SPOOL_NAME)
            if (directory / RECEIPTS_NAME).is_file():
                os.replace(directory / RECEIPTS_NAME, run / RECEIPTS_NAME)
            _forget_lost_ledger(run / LEDGER_NAME)
            os.replace(directory / LEDGER_NAME, run / LEDGER_NAME)  # last: from this point the run has a queue
            sync(run)
    except (OSError, tarfile.TarError) as error:
        raise HandoffError(f"{source}: cannot be imported into {run}: {error}") from error
    return entries


def copy_queue(origin: Path, run: Path) -> int:
    """Copy ledger and needed payloads of one run directory into another that has none; return the number of
    payloads."""
    with tempfile.TemporaryDirectory(dir=run, prefix=".copy-") as name:
        export_queue(origin, Path(name) / "queue")
        return import_queue(run, Path(name) / "queue")


def _forget_lost_ledger(ledger: Path) -> None:
    """Remove files beside a ledger that is gone and that belong to no other."""
    for left in (wal_path(ledger), ledger.with_name(f"{ledger.name}-shm"), lock_path(ledger)):
        left.unlink(missing_ok=True)


_RULES = "select note from history where event = 'opened' order by sequence desc limit 1"


def _check_complete(directory: Path) -> int:
    """Check that every payload that the ledger needs is in the spool beside it, whole; return the number of records."""
    spool = Spools(directory / SPOOL_NAME)
    with _reading(directory) as connection:
        train = json.loads(connection.execute(_RULES).fetchone()[0])["partition"]
        needed: dict[Task, int | None] = needed_payloads(connection, train)
    for task, checksum in needed.items():
        if checksum is not None:
            spool.read(task, checksum)
    return sum(1 for _ in spool.entries())


@contextmanager
def _reading(run: Path) -> Iterator[sqlite3.Connection]:
    path = run / LEDGER_NAME
    connection = open_for_reading(path)
    try:
        yield connection
    except sqlite3.Error as error:
        raise LedgerFileError(f"{path}: cannot be read: {error}") from error
    finally:
        connection.close()
