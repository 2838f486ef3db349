"""A checksum in each row of the ledger's tables, so that one flipped bit in the data that sqlite reads is found.

The chain (ledger_identity.py) covers the history and `pragma integrity_check` the structure of the file; a changed
number or name in a row of the other tables would pass both. Triggers of the one writer's connection seal every row that
it writes; they are not in the file, so that any sqlite program can still read and change it, but not unnoticed.
"""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Sequence

from vime.handoff.ledger_identity import encode_values, find_broken_link

SEALED = {
    "meta": (("name",), ("name", "value")),
    "partition": (("id",), ("id", "name", "next_group")),
    "round": (("id",), ("id", "state", "fence", "holder", "version", "num_groups", "is_final")),
    "prompt_group": (
        ("partition", "grp"),
        (
            *("partition", "grp", "attempt", "state", "producer", "request", "admitted", "round", "position"),
            *("ready_sequence", "checksum", "num_bytes", "num_tokens", "num_rows", "min_version", "max_version"),
            *("partial_attempt", "partial_checksum", "reason", "facts", "own_key", "own_content"),
        ),
    ),
}
"""For each table: its key, and the columns that the seal covers."""
_MAX_FAULTS = 5
Schema = Sequence[tuple[str, str, str]]


def make_seals(connection: sqlite3.Connection) -> None:
    """Give every row a seal. Inside a transaction, once."""
    for table in SEALED:
        connection.execute(f"alter table {table} add column seal integer")


def add_facts(connection: sqlite3.Connection) -> None:
    """Add a column to groups for the numbers that a round is planned from. Inside a transaction, once."""
    connection.execute("alter table prompt_group add column facts blob")


def add_own_keys(connection: sqlite3.Connection) -> None:
    """Add columns for groups whose prompt a rollout job brought itself: its key for the group, and the hash of what it
    put. Give every row a seal that covers them. Inside a transaction, once."""
    connection.execute("alter table prompt_group add column own_key text")
    connection.execute("alter table prompt_group add column own_content text")
    connection.execute("create index own_group on prompt_group(producer, own_key) where own_key is not null")
    _add_function(connection)
    for table, (_, columns) in SEALED.items():
        connection.execute(f"update {table} set seal = vime_seal({', '.join(columns)})")


def keep_sealed(connection: sqlite3.Connection) -> None:
    """Seal each row that this connection writes from now on."""
    _add_function(connection)
    for table, (key, columns) in SEALED.items():
        values = ", ".join(f"new.{column}" for column in columns)
        place = " and ".join(f"{column} = new.{column}" for column in key)
        for event in ("insert", f"update of {', '.join(columns)}"):
            connection.execute(
                f"create temp trigger seal_{table}_{event.split()[0]} after {event} on main.{table} "
                f"begin update {table} set seal = vime_seal({values}) where {place}; end"
            )


def find_faults(connection: sqlite3.Connection, expected: Schema) -> list[str]:
    """Return what is wrong with a ledger's file; empty when structure, tables and history are as they were written.

    Reads all of it. `expected`: what `read_schema` returns for a new ledger.
    """
    try:
        faults = [str(line) for [line] in connection.execute(f"pragma integrity_check({_MAX_FAULTS})") if line != "ok"]
        if read_schema(connection) != expected:
            faults.append("the definitions of its tables are not those of a ledger")
        _add_function(connection)
        for table, (key, columns) in SEALED.items():
            rows = connection.execute(
                f"select {', '.join(key)} from {table} where seal is not vime_seal({', '.join(columns)}) limit ?",
                (_MAX_FAULTS,),
            )
            faults += [f"table {table}, row {'/'.join(map(str, row))}: does not fit its checksum" for row in rows]
        line = find_broken_link(connection)
        if line is not None:
            faults.append(f"line {line} of the history is not linked to the line before it: one of them changed")
    except (sqlite3.Error, ValueError, TypeError) as error:  # a damaged file may hold anything
        faults = [f"cannot be read: {type(error).__name__}: {error}"]
    return faults


def read_schema(connection: sqlite3.Connection) -> Schema:
    """Return tables and indices, with the SQL that made them."""
    lines = connection.execute("select type, name, sql from sqlite_master order by name").fetchall()
    return [(kind, name, " ".join((sql or "").split())) for kind, name, sql in lines]


def _seal(*values: object) -> int:
    return zlib.crc32(encode_values(values).encode())


def _add_function(connection: sqlite3.Connection) -> None:
    connection.create_function("vime_seal", -1, _seal, deterministic=True)
