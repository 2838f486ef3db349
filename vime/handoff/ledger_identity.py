"""The identity of a ledger: a random id, and a chain of hashes over its history, of which a checkpoint keeps one link.

A path does not identify a ledger: a directory moves, and another run is started where an old one was. The id tells
ledgers apart. The chain tells apart two runs that continued copies of one ledger, and detects a copy that is too old:
the link that a checkpoint kept (`LedgerMark`) is in the history of the one ledger that knows the checkpoint's rounds.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import struct
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from vime.handoff.ledger_file import NEXT
from vime.handoff.ledger_types import LedgerMark

LINE = "sequence, event, partition, grp, attempt, round, num_tokens, num_bytes, note"
"""Columns of the table `history` that a link covers, in this order."""
encode_values = json.JSONEncoder(default=repr).encode  # a damaged file may hold bytes
_CHUNK = 10_000  # lines


def first_link(ledger_id: str) -> int:
    """Return the link before the first line."""
    return next_link(0, (ledger_id,))


def next_link(link: int, line: Sequence[object]) -> int:
    """Return the link of a line of history (columns of LINE) that follows `link`: 64 bits, as sqlite keeps integers."""
    data = struct.pack("<q", link) + encode_values(line).encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True)


def make_identity(connection: sqlite3.Connection) -> None:
    """Give a ledger its id, and its history the links. Inside a transaction, once."""
    connection.execute("create table identity(ledger text not null)")
    connection.execute("insert into identity values (?)", (uuid.uuid4().hex,))
    connection.execute("alter table history add column link integer")
    link_history(connection)


def link_history(connection: sqlite3.Connection) -> None:
    """Write the link of every line again."""
    link = first_link(read_id(connection))
    for lines in _chunks(connection, LINE):
        links = []
        for line in lines:
            link = next_link(link, line)
            links.append((link, line[0]))
        connection.executemany("update history set link = ? where sequence = ?", links)


def find_broken_link(connection: sqlite3.Connection) -> int | None:
    """Return the number of the first line that is not linked to the one before it; None when all are."""
    link = first_link(read_id(connection))
    for lines in _chunks(connection, f"{LINE}, link"):
        for *line, found in lines:
            link = next_link(link, line)
            if link != found:
                return int(line[0])
    return None


def read_id(connection: sqlite3.Connection) -> str:
    ids = connection.execute("select ledger from identity").fetchall()
    return str(ids[0][0]) if len(ids) == 1 else repr(ids)


def read_mark(connection: sqlite3.Connection) -> LedgerMark:
    """Return the newest line of the history."""
    newest = connection.execute("select sequence, link from history order by sequence desc limit 1").fetchone()
    ledger_id = read_id(connection)
    sequence, link = newest or (0, first_link(ledger_id))
    return LedgerMark(ledger_id=ledger_id, sequence=sequence, link=link)


def find_difference(connection: sqlite3.Connection, mark: LedgerMark, checkpoint_round: int) -> str | None:
    """Return why this is not the ledger of a checkpoint with this mark; None when it is."""
    now = read_mark(connection)
    if now.ledger_id != mark.ledger_id:
        return f"is ledger {now.ledger_id}, but the checkpoint belongs to ledger {mark.ledger_id}"
    if now.sequence < mark.sequence:
        return (
            f"ends at line {now.sequence} of its history, and the checkpoint was written behind line {mark.sequence}: "
            "it is an older copy, or its last lines were lost"
        )
    [link] = connection.execute("select link from history where sequence = ?", (mark.sequence,)).fetchone() or (None,)
    if link != mark.link:
        return (
            f"went another way before line {mark.sequence} of its history, behind which the checkpoint was written: "
            "another run went on from a copy of this ledger, and wrote the checkpoint"
        )
    undone = connection.execute(
        "select sequence, round from history where sequence > ? and event = 'loosened' and round <= ? limit 1",
        (mark.sequence, checkpoint_round),
    ).fetchone()
    if undone is not None:
        return (
            f"has undone round {undone[1]} (line {undone[0]} of its history), which the checkpoint carries: the "
            "run went back to an earlier checkpoint and on from there"
        )
    return None


def find_obstacle(connection: sqlite3.Connection, mark: LedgerMark | None, checkpoint_round: int) -> str | None:
    """Return why a run cannot continue from this checkpoint with this ledger, and what to do; None when it can.

    -1: from the initial weights. A checkpoint of a round that is not trained in the ledger would train its groups a
    second time.
    """
    difference = None if mark is None else find_difference(connection, mark, checkpoint_round)
    if difference is not None:
        return f"{difference}. Load a checkpoint that this ledger knows."
    [newest] = connection.execute("select max(id) from round where state in ('trained', 'durable')").fetchone()
    [untrained] = connection.execute("select min(id) from round where state in ('leased', 'replay')").fetchone()
    found = f"the checkpoint is of round {checkpoint_round}, but"
    if checkpoint_round < 0:
        return None
    if newest is None:
        return f"{found} this ledger has seen no round trained: it is not that of the run that wrote it. {NEXT}"
    if newest >= checkpoint_round and (untrained is None or untrained > checkpoint_round):
        return None
    line, back = connection.execute(
        "select sequence, round from history where event = 'restored' order by sequence desc limit 1"
    ).fetchone() or (0, checkpoint_round)
    if back < checkpoint_round:
        name = "the initial weights" if back < 0 else f"the checkpoint of round {back}"
        return (
            f"{found} the run went back to {name} (line {line} of the ledger's history) and has not trained round "
            f"{newest + 1 if untrained is None else untrained} again. Load {name}, or one that was written since."
        )
    return (
        f"{found} the ledger's newest trained round is {newest}: its last lines are lost (a power cut before `sync`?). "
        "Load a checkpoint that is not newer."
    )


def _chunks(connection: sqlite3.Connection, columns: str) -> Iterator[list[Any]]:
    """Yield lines of the history in their order, never all of them at once."""
    last = None
    while True:
        after = "" if last is None else "where sequence > ?"
        values = (_CHUNK,) if last is None else (last, _CHUNK)
        lines = connection.execute(
            f"select {columns} from history {after} order by sequence limit ?", values
        ).fetchall()
        if not lines:
            return
        yield lines
        last = lines[-1][0]
