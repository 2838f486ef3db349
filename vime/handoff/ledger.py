"""The ledger: the single record of which prompt groups exist, the state of each, and which round trained it.

A class over one sqlite file: no thread, no clock of its own, one writer. Every transition is one transaction, so a kill
at any moment leaves the file before or after it, never between. Every call may be repeated after a lost response. A
call that is not allowed raises a HandoffError by name and changes nothing. docs/ledger.md has the states and the
guarantee.

    ledger.prompts   producers: issue, admit, commit, drop, retry, heartbeat, abandon     (prompt_ledger.py)
    ledger.rounds    trainers: lease, heartbeat, trained, release, durable, restore       (round_ledger.py)

Payload bytes are not here: they are in TransferQueue and in the spool, written before `commit`. A crash between the two
leaves an orphan payload, never a visible group without data.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from vime.handoff.ledger_file import fold_in
from vime.handoff.ledger_schema import MOVING_ROUNDS
from vime.handoff.ledger_store import LedgerStore
from vime.handoff.ledger_types import (
    CommitOutcome,
    LedgerMark,
    LedgerRules,
    Lent,
    Payload,
    State,
    Task,
    TransitionError,
)
from vime.handoff.prompt_ledger import PromptLedger
from vime.handoff.round_ledger import RoundLedger, num_ready_of_round

_NEEDED = """select p.name, g.grp, g.attempt, g.checksum, g.partial_attempt, g.partial_checksum, g.state
    from prompt_group g indexed by open_group join partition p on p.id = g.partition
    where g.state in ('issued', 'retry', 'ready')"""
_NEEDED_BY_ROUNDS = (
    "select grp, attempt, checksum from prompt_group indexed by round_group "
    f"where round in (select id from {MOVING_ROUNDS})"
)
_UNREAD = """select grp, attempt, checksum, state from prompt_group indexed by open_group
    where partition = ? and state in ('issued', 'retry', 'ready') and state != 'retry'"""
_UNREAD_BY_ROUNDS = (
    "select grp, attempt, checksum from prompt_group indexed by round_group "
    f"where round in (select id from {MOVING_ROUNDS} and state = 'leased')"
)
_NUM_READY = (
    "select count(*) from prompt_group indexed by ready_group where partition = ? and state = 'ready' and round is null"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerStatus:
    """A summary of the ledger, for metrics and for `vime why-stuck`."""

    active: int  # groups that hold a slot
    ready: int
    retry: int
    too_old: int  # groups dropped or sent back at lease since the ledger was opened
    held_groups: int
    held_tokens: int
    held_bytes: int
    producers: dict[str, int]  # attempts in flight by producer
    trainers: dict[int, str]  # holder by leased round
    waiting_for_room: tuple[Task, ...]
    is_over: bool  # every round was trained, and its weights are served


class Ledger:
    """Open it once per run, in one process; a second writer is refused. One call at a time: two threads that call it
    at once can wait for each other for ever, because SQLite holds its lock while it asks Python for the checksum of
    a row (ledger_checksums.py). Threads share it through a `LedgerPort`."""

    def __init__(
        self, path: Path, rules: LedgerRules, *, clock: Callable[[], float], synchronous: str = "NORMAL"
    ) -> None:
        """`clock` counts seconds; it need not know the date: `time.monotonic`. For `synchronous` (what a power cut may
        lose) see ledger_schema.py."""
        self._store = LedgerStore(path, rules, clock, synchronous)
        self._synchronous = synchronous
        self._prompts, self._rounds = PromptLedger(self._store), RoundLedger(self._store)

    @property
    def prompts(self) -> PromptLedger:
        """The producers' calls. Overdue attempts and rounds are taken back first."""
        self.expire()
        return self._prompts

    @property
    def rounds(self) -> RoundLedger:
        """The trainers' calls. Overdue attempts and rounds are taken back first."""
        self.expire()
        return self._rounds

    def expire(self) -> None:
        """Take back attempts and rounds whose holders missed their deadline. Call it now and then when nothing else
        calls."""
        memory, now = self._store.memory, self._store.clock.now()
        if now < memory.soonest:
            return
        self._prompts.expire(now)
        self._rounds.expire(now)
        deadlines = [flight.deadline for flight in memory.flights.values()]
        deadlines += [holding.deadline for holding in memory.holdings.values()]
        memory.soonest = min(deadlines, default=float("inf"))

    def sync(self) -> LedgerMark:
        """Write everything returned so far to disk: into the file alone, unless a reader has it open just now. Call it
        before a checkpoint is made visible, and keep the result in the checkpoint."""
        store = self._store
        store.connection.execute("pragma synchronous = FULL")
        try:
            with store.transaction():
                store.set_meta("synced", store.meta("synced", 0) + 1)
        finally:
            store.connection.execute(f"pragma synchronous = {self._synchronous}")
        fold_in(store.connection)
        return store.mark

    @property
    def sequence(self) -> int:
        """Number of the newest line of the history: it grows with every change, also over restarts."""
        return self._store.mark.sequence

    def status(self) -> LedgerStatus:
        self.expire()
        memory = self._store.memory
        producers: dict[str, int] = {}
        for flight in memory.flights.values():
            producers[flight.producer] = producers.get(flight.producer, 0) + 1
        usage = memory.usage
        return LedgerStatus(
            active=usage.active,
            ready=int(self._store.one(_NUM_READY, self._store.train_id)[0]),
            retry=usage.retry,
            too_old=memory.too_old,
            held_groups=usage.groups,
            held_tokens=usage.tokens,
            held_bytes=usage.num_bytes,
            producers=producers,
            trainers={round_id: holding.holder for round_id, holding in memory.holdings.items()},
            waiting_for_room=tuple(memory.waiting),
            is_over=self._store.is_over(),
        )

    def lent(self) -> list[Lent]:
        """Return what each producer makes. Its leases end `lease_timeout_s` after it was heard of."""
        store = self._store
        now, groups, heard = store.clock.now(), dict[str, list[int]](), dict[str, float]()
        for flight in store.memory.flights.values():
            if flight.task.partition == store.rules.partition:
                groups.setdefault(flight.producer, []).append(flight.task.group)
                since = flight.deadline - store.rules.lease_timeout_s
                heard[flight.producer] = max(since, heard.get(flight.producer, since))
        return [
            Lent(producer=producer, groups=tuple(sorted(held)), silent_s=max(0.0, now - heard[producer]))
            for producer, held in groups.items()
        ]

    def commit_each(self, groups: Sequence[tuple[Task, Payload]]) -> list[CommitOutcome | TransitionError]:
        """Run `prompts.commit` for one group after the other; a refusal takes the group's place and stops no other."""
        outcomes: list[CommitOutcome | TransitionError] = []
        for task, payload in groups:
            try:
                outcomes.append(self.prompts.commit(task, payload))
            except TransitionError as error:
                outcomes.append(error)
        return outcomes

    def has(self, *, ready: int = 0, slots: int = 0, round_of: int = 0, at_least: int = 0) -> bool:
        """Return whether at least so many groups are ready, so many slots are free (or none will be again), and a round
        of so many groups is complete, or `at_least` so many of it are ready. It is checked at every change for waiting
        callers, where `lease` and `issue` would cost a call between processes each."""
        store = self._store
        is_free = not slots or store.is_over() or store.num_slots() - store.memory.usage.active >= slots
        is_ready = not ready or int(store.one(_NUM_READY, store.train_id)[0]) >= ready
        return is_free and is_ready and (not round_of or num_ready_of_round(store, round_of) >= (at_least or round_of))

    def needed_payloads(self) -> dict[Task, int | None]:
        """Return the payloads that the spool must keep, with checksum; None: whatever the attempt in progress
        stores."""
        return needed_payloads(self._store.connection, self._store.rules.partition)

    def unread_payloads(self) -> dict[Task, int | None]:
        """Return the payloads that trainers may still read, with checksum; None: whatever the attempt in progress
        stores."""
        store, train = self._store, self._store.rules.partition
        unread: dict[Task, int | None] = {
            Task(train, group, attempt): checksum if state == State.READY else None
            for group, attempt, checksum, state in store.query(_UNREAD, store.train_id)
        }
        for group, attempt, checksum in store.query(_UNREAD_BY_ROUNDS):
            unread[Task(train, group, attempt)] = checksum
        return unread

    def close(self) -> None:
        """Close the file: it alone is the ledger then. Calling it again does nothing."""
        self._store.close()


def needed_payloads(connection: sqlite3.Connection, train: str) -> dict[Task, int | None]:
    """Return what `Ledger.needed_payloads` returns; also for readers of the file."""
    needed: dict[Task, int | None] = {}
    for name, group, attempt, checksum, partial_attempt, partial_checksum, state in connection.execute(_NEEDED):
        if state != State.RETRY:
            needed[Task(name, group, attempt)] = checksum if state == State.READY else None
        if partial_attempt is not None:
            needed[Task(name, group, partial_attempt)] = partial_checksum
    for group, attempt, checksum in connection.execute(_NEEDED_BY_ROUNDS):
        needed[Task(train, group, attempt)] = checksum
    return needed
