"""The ledger: the single record of which prompt groups exist, the state of each, and which round trained it.

A class over one sqlite file: no thread, no clock of its own, one writer. Every transition is one transaction, so a kill
at any moment leaves the file before or after it, never between. Every call may be repeated after a lost response. A
call that is not allowed raises a HandoffError by name and changes nothing. docs/ledger.md has the states and the
guarantee.

    ledger.prompts   producers: issue, admit, commit, drop, retry, heartbeat, abandon     (prompt_ledger.py)
    ledger.rounds    trainers: lease, heartbeat, trained, release, durable, restore       (round_ledger.py)

Payload bytes are not here: they are in TransferQueue and in the spool, written before `commit`. A crash between the two
leaves an orphan payload, never a visible group without data.

`LedgerPort` is how producers and readers call it, in any process: the ledger's methods, type-checked as if they were
called directly, and a way to wait for a change instead of polling. `LocalLedgerPort` is the ledger in this process, for
tests and examples; `ray/ledger_actor.py` is the one of a run.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Concatenate, ParamSpec, Protocol, TypeVar, cast

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


Part = TypeVar("Part", Ledger, PromptLedger, RoundLedger)
P = ParamSpec("P")
R = TypeVar("R")

CALLS: dict[str, Callable[..., object]] = {
    method.__qualname__: method
    for method in (
        *(PromptLedger.issue, PromptLedger.admit, PromptLedger.commit, PromptLedger.drop, PromptLedger.retry),
        *(PromptLedger.issued, PromptLedger.heartbeat, PromptLedger.abandon),
        *(PromptLedger.issue_own, PromptLedger.known_own, PromptLedger.abandon_own),
        *(RoundLedger.lease, RoundLedger.ready, RoundLedger.heartbeat, RoundLedger.trained, RoundLedger.release),
        RoundLedger.durable,
        *(Ledger.status, Ledger.sync, Ledger.commit_each, Ledger.needed_payloads, Ledger.unread_payloads),
    )
}
"""What another process may call, by name. Not `restore`: only the owner of the ledger has the spool."""


def call_ledger(ledger: Ledger, name: str, arguments: Sequence[object], options: Mapping[str, object]) -> object:
    """Run one of CALLS by its name; any other name is refused."""
    if name not in CALLS:
        raise TransitionError(f"the ledger has no call {name}; expected one of {', '.join(sorted(CALLS))}.")
    part = name.partition(".")[0]
    owner = ledger.prompts if part == "PromptLedger" else ledger.rounds if part == "RoundLedger" else ledger
    return CALLS[name](owner, *arguments, **options)


class LedgerPort(Protocol):
    """`call(PromptLedger.issue, "p", 3, request="r")` is `ledger.prompts.issue("p", 3, request="r")`; a method of
    RoundLedger is called on `ledger.rounds`, one of Ledger on the ledger itself. Each must be one of CALLS.

    Every call has a deadline of its own and raises the ledger's refusals.
    """

    def call(self, method: Callable[Concatenate[Part, P], R], *arguments: P.args, **options: P.kwargs) -> R: ...

    async def call_async(
        self, method: Callable[Concatenate[Part, P], R], *arguments: P.args, **options: P.kwargs
    ) -> R: ...

    def wait_for_news(self, seen: int, timeout_s: float, **has: int) -> int:
        """Wait until the ledger has written more than line `seen` of its history and `Ledger.has(**has)` holds, or
        `timeout_s` is over; return the newest line.

        Pass the number returned before the call that could not be granted, at first -1: no change is missed in between.
        """
        ...

    async def wait_for_news_async(self, seen: int, timeout_s: float, **has: int) -> int: ...


class LocalLedgerPort:
    """A ledger in this process, called from any thread or loop, one call at a time."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._changed = threading.Condition()
        self._wakers: dict[asyncio.Event, asyncio.AbstractEventLoop] = {}  # of coroutines that wait for a change

    def call(self, method: Callable[Concatenate[Part, P], R], *arguments: P.args, **options: P.kwargs) -> R:
        with self._changed:
            try:
                return cast("R", call_ledger(self._ledger, method.__qualname__, arguments, options))
            finally:
                self._changed.notify_all()
                for woken, loop in self._wakers.items():
                    loop.call_soon_threadsafe(woken.set)

    async def call_async(self, method: Callable[Concatenate[Part, P], R], *arguments: P.args, **options: P.kwargs) -> R:
        return self.call(method, *arguments, **options)

    def wait_for_news(self, seen: int, timeout_s: float, **has: int) -> int:
        with self._changed:
            self._changed.wait_for(lambda: self._is_news(seen, has), timeout_s)
            return self._ledger.sequence

    async def wait_for_news_async(self, seen: int, timeout_s: float, **has: int) -> int:
        """Wait without a thread, so that a loop that is stopped leaves nothing behind that keeps its process alive."""
        woken = asyncio.Event()
        with self._changed:
            self._wakers[woken] = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout_s):
                while not self._is_news(seen, has):
                    await woken.wait()
                    woken.clear()
        except TimeoutError:
            pass  # no change is a result too
        finally:
            with self._changed:
                del self._wakers[woken]
        return self._ledger.sequence

    def _is_news(self, seen: int, has: dict[str, int]) -> bool:
        with self._changed:
            return self._ledger.sequence > seen and self._ledger.has(**has)
