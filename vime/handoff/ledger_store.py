"""The storage of the ledger: one transaction per change, its line of history, the counts in use, and the deadlines.

Counts and deadlines are in memory and are rebuilt from the file when it is opened. Deadlines are never written, because
the clock of one boot means nothing after the next. So a reopened ledger gives every holder one full timeout.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from vime.handoff.ledger_file import fold_in, wal_path
from vime.handoff.ledger_identity import LINE, next_link, read_mark
from vime.handoff.ledger_schema import MOVING_ROUNDS, close_for_writing, open_for_writing
from vime.handoff.ledger_types import (
    LedgerFileError,
    LedgerMark,
    LedgerRules,
    PartitionError,
    State,
    Task,
    TransitionError,
)
from vime.handoff.slot_line import SlotLine

MAX_LOG_BYTES, COMMITS_BETWEEN_LOOKS = 16 << 20, 64
_EVENT = f"insert into history({LINE}, link) values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"


class LedgerClock:
    """Time for leases, from a given clock (`time.monotonic` in a run).

    A step back counts as no time, and one step counts as `max_step_s` at most: while the ledger itself was stopped, or
    the clock jumped, no holder could be heard, so that time must not expire a lease.
    """

    def __init__(self, clock: Callable[[], float], max_step_s: float) -> None:
        self._clock, self._max_step_s = clock, max_step_s
        self._last, self._now = clock(), 0.0

    def now(self) -> float:
        seen = self._clock()
        self._now += min(max(seen - self._last, 0.0), self._max_step_s)
        self._last = seen
        return self._now


@dataclass(slots=True)
class Usage:
    """The current use of the train partition."""

    active: int = 0  # groups issued, ready or leased, and trained ones whose weights the engines do not serve yet
    retry: int = 0
    groups: int = 0  # payloads admitted, ready or leased
    tokens: int = 0
    num_bytes: int = 0

    def hold(self, tokens: int, num_bytes: int, groups: int = 1) -> None:
        self.groups += groups
        self.tokens += tokens
        self.num_bytes += num_bytes


@dataclass(slots=True)
class Flight:
    """An attempt in progress at a producer. A heartbeat sets the deadline of each that the producer has."""

    task: Task
    producer: str
    request: str
    deadline: float


@dataclass(frozen=True, slots=True)
class Holding:
    """A leased round in progress at a trainer."""

    holder: str
    fence: int
    deadline: float


@dataclass(slots=True)
class Memory:
    """The state outside the file: derived from the file, except for deadlines and the queue of waiting tasks."""

    usage: Usage = field(default_factory=Usage)
    flights: dict[tuple[str, int], Flight] = field(default_factory=dict)
    requests: dict[tuple[str, str], list[Task]] = field(default_factory=dict)  # (producer, request): in flight
    holdings: dict[int, Holding] = field(default_factory=dict)
    too_old: int = 0  # groups refused at lease since the file was opened
    waiting: dict[Task, None] = field(default_factory=dict)  # tasks that wait for capacity, first come first
    line: SlotLine = field(default_factory=SlotLine)  # who waits for a slot
    soonest: float = float("inf")  # the earliest deadline, or a time before it

    def fly(self, flight: Flight) -> None:
        self.flights[flight.task.partition, flight.task.group] = flight
        self.requests.setdefault((flight.producer, flight.request), []).append(flight.task)
        self.soonest = min(self.soonest, flight.deadline)

    def land(self, task: Task) -> None:
        self.waiting.pop(task, None)
        flight = self.flights.pop((task.partition, task.group), None)
        if flight is not None:
            tasks = self.requests[flight.producer, flight.request]
            tasks.remove(task)
            if not tasks:
                del self.requests[flight.producer, flight.request]

    def hold(self, round_id: int, holding: Holding) -> None:
        self.holdings[round_id] = holding
        self.soonest = min(self.soonest, holding.deadline)


class LedgerStore:
    """The file and the memory of one ledger. Every change runs inside `transaction`."""

    def __init__(self, path: Path, rules: LedgerRules, clock: Callable[[], float], synchronous: str) -> None:
        self.path, self.rules = path, rules
        self._num_commits = 0
        self.clock = LedgerClock(clock, rules.lease_timeout_s / 2)
        self.connection, self._lock = open_for_writing(path, synchronous=synchronous)
        try:
            self.reload()
        except BaseException:
            self.close()
            raise

    def reload(self) -> None:
        """Read the state from the file, and write the rules of this run into it when they differ."""
        self._mark = read_mark(self.connection)
        with self.transaction():
            self.train_id = self.partition_id(self.rules.partition)
            note = json.dumps(dataclasses.asdict(self.rules))
            if self.query("select note from history where event = 'opened' order by sequence desc limit 1") != [
                (note,)
            ]:
                self.write("opened", note=note)
        self.memory = self.recall()

    def close(self) -> None:
        """Close the file. Calling it again does nothing."""
        if self._lock >= 0:
            lock, self._lock = self._lock, -1
            close_for_writing(self.connection, lock, self.path)

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Change everything or nothing, on disk and in memory: an error, also a full disk, leaves both as they were."""
        mark = self._mark
        memory = getattr(self, "memory", None)
        usage = dataclasses.replace(memory.usage) if memory else None
        try:
            self._fold_in_when_long()  # before anything is changed: it may fail
            self.connection.execute("begin immediate")
            yield
            self.connection.execute("commit")
        except BaseException as error:
            if self.connection.in_transaction:
                self.connection.execute("rollback")
            self._mark = mark
            if memory is not None and usage is not None:
                memory.usage = usage
            if isinstance(error, sqlite3.Error | OSError):
                raise LedgerFileError(
                    f"{self.path}: the change was refused and nothing was changed: {error}. Free disk space or check "
                    "the file (vime audit RUN), then repeat."
                ) from error
            raise
        self._num_commits += 1

    def _fold_in_when_long(self) -> None:
        """Move the file's log into it. Looks now and then how long it is."""
        is_time = self._num_commits % COMMITS_BETWEEN_LOOKS == 0 and self._num_commits > 0
        if is_time and wal_path(self.path).stat().st_size > MAX_LOG_BYTES:
            fold_in(self.connection)

    @property
    def mark(self) -> LedgerMark:
        """The newest line of the history."""
        return self._mark

    def query(self, sql: str, *values: object) -> list[Any]:
        """Return rows of whatever types the statement selects; sqlite gives no static types."""
        return self.connection.execute(sql, values).fetchall()

    def one(self, sql: str, *values: object) -> Any:
        """Return the first row, or None."""
        return self.connection.execute(sql, values).fetchone()

    def change(self, sql: str, *values: object) -> int:
        """Run one statement; return how many rows it changed."""
        return self.connection.execute(sql, values).rowcount

    def write(
        self,
        event: str,
        partition: int | None = None,
        group: int | None = None,
        attempt: int | None = None,
        *,
        round_id: int | None = None,
        tokens: int | None = None,
        num_bytes: int | None = None,
        note: str | None = None,
    ) -> int:
        """Write one line of history; return its number, which is also the order of commits."""
        sequence = self._mark.sequence + 1
        line = (sequence, event, partition, group, attempt, round_id, tokens, num_bytes, note)
        link = next_link(self._mark.link, line)
        self.connection.execute(_EVENT, (*line, link))
        self._mark = dataclasses.replace(self._mark, sequence=sequence, link=link)
        return sequence

    def partition_id(self, name: str) -> int:
        """Return the number of a partition, made when it is new. Inside a transaction."""
        row = self.one("select id from partition where name = ?", name)
        if row is not None:
            return int(row[0])
        self.change("insert into partition(name) values (?)", name)
        return int(self.one("select last_insert_rowid()")[0])

    def meta(self, name: str, default: int) -> int:
        row = self.one("select value from meta where name = ?", name)
        return default if row is None else int(row[0])

    def set_meta(self, name: str, value: int) -> None:
        self.change("insert or replace into meta(name, value) values (?, ?)", name, value)

    def num_slots(self) -> int:
        """Return how many groups may hold a slot now: towards the end of the run only as many as it still trains."""
        rules = self.rules
        if rules.num_rounds is None:
            return rules.max_slots
        rounds_left = max(0, rules.num_rounds - self.meta("serving", 0))
        return min(rules.max_slots, rounds_left * rules.groups_per_round)

    def is_over(self) -> bool:
        """Return whether every round was trained and its weights are served: no prompt will be needed again."""
        return self.rules.num_rounds is not None and self.meta("serving", 0) >= self.rules.num_rounds

    def deadline(self) -> float:
        """Return when a lease given now ends."""
        return self.clock.now() + self.rules.lease_timeout_s

    def recall(self) -> Memory:
        """Return the memory that follows from the file, every deadline a full timeout from now."""
        memory, deadline = Memory(), self.deadline()
        flights = self.query(
            "select p.name, g.grp, g.attempt, g.producer, g.request from prompt_group g indexed by open_group join "
            "partition p on p.id = g.partition where g.state in ('issued', 'retry', 'ready') and g.state = 'issued'"
        )
        for name, group, attempt, producer, request in flights:
            memory.fly(Flight(Task(name, group, attempt), producer, request, deadline))
        for round_id, holder, fence in self.query(
            f"select id, holder, fence from {MOVING_ROUNDS} and state = 'leased'"
        ):
            memory.hold(round_id, Holding(holder, fence, deadline))
        memory.usage = count_usage(self.connection, self.train_id)
        return memory


def count_usage(connection: sqlite3.Connection, train_id: int) -> Usage:
    """Count the usage of the train partition from rows; the running counts must always equal it."""
    usage, total = Usage(), "count(*), coalesce(sum(admitted * num_tokens), 0), coalesce(sum(admitted * num_bytes), 0)"
    states = connection.execute(
        f"select state, coalesce(sum(admitted), 0), {total} from prompt_group indexed by open_group "
        "where partition = ? and state in ('issued', 'retry', 'ready') group by state",
        (train_id,),
    ).fetchall()
    leased = connection.execute(
        f"select 'leased', coalesce(sum(admitted), 0), {total} from prompt_group indexed by round_group where round in "
        f"(select id from {MOVING_ROUNDS} and state = 'leased')"
    ).fetchall()
    for state, admitted, count, tokens, num_bytes in states + leased:
        if state == State.RETRY:
            usage.retry += count
        else:
            usage.active += count
            usage.hold(tokens, num_bytes, admitted)
    serving = connection.execute("select value from meta where name = 'serving'").fetchone()
    usage.active += connection.execute(
        "select coalesce(sum(num_groups), 0) from round indexed by round_version "
        "where version >= ? and state in ('trained', 'durable')",
        (serving[0] if serving else 0,),
    ).fetchone()[0]
    return usage


def known_partition(store: LedgerStore, name: str) -> int:
    row = store.one("select id from partition where name = ?", name)
    if row is None:
        raise PartitionError(f"partition {name!r}: nothing was ever issued in it.")
    return int(row[0])


class GroupRow(NamedTuple):
    """The columns of a group that a change of it needs."""

    partition: int
    state: str
    attempt: int
    admitted: int
    num_tokens: int
    num_bytes: int
    reason: str | None
    partial_attempt: int | None
    partial_checksum: int | None
    own_key: str | None  # of the job that brought the prompt


def find_group(store: LedgerStore, task: Task) -> GroupRow:
    row = store.one(
        f"select {', '.join(GroupRow._fields)} from prompt_group "
        "where partition = (select id from partition where name = ?) and grp = ?",
        task.partition,
        task.group,
    )
    if row is None:
        raise TransitionError(f"group {task}: was never issued by this ledger. Take prompts with `issue` only.")
    return GroupRow(*row)


def lack_of_room(usage: Usage, rules: LedgerRules, num_tokens: int, num_bytes: int) -> str:
    """Return which bound one more payload of this size would break; empty when none."""
    needs = (
        ("groups", usage.groups, 1, rules.max_groups),
        ("tokens", usage.tokens, num_tokens, rules.max_tokens),
        ("bytes", usage.num_bytes, num_bytes, rules.max_bytes),
    )
    broken = [need for need in needs if need[3] is not None and need[1] + need[2] > need[3]]
    return "; ".join(f"{held} of {most} {what} held, {more} more asked" for what, held, more, most in broken)
