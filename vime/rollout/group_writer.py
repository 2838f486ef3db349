"""Stores and commits finished groups, several at once when no round has to wait for that.

A write costs the same few round trips and one fsync whether it carries one group or ten. So groups that finish during a
write are written together by the next one. A group that no round can use yet, because an earlier group is still being
generated, waits up to LINGER_S for others to be written with.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import NamedTuple, TypeVar

from vime.handoff.group_store import EncodedGroup, GroupStore
from vime.handoff.ledger import Ledger, LedgerPort
from vime.handoff.ledger_types import CommitOutcome, Payload, Task, TransitionError
from vime.observability.events import span
from vime.utils.failpoints import Point, failpoint
from vime.utils.waits import waiting

Result = TypeVar("Result")
LINGER_S = 1.0
"""A kill loses the completions that wait here; they are generated again, like those in progress."""


class Entry(NamedTuple):
    """A finished group, and the future of the seconds that storing it took."""

    task: Task
    group: EncodedGroup
    payload: Payload  # without its checksum
    is_written: asyncio.Future[float]


class GroupWriter:
    """Owned by the worker, on its loop, with one thread of its own for the store's blocking calls."""

    def __init__(self, store: GroupStore, ledger: LedgerPort, *, lingers: bool = False) -> None:
        """`lingers`: rounds take groups in the order of their numbers, so it is known which ones can wait."""
        self._store, self._ledger, self._lingers = store, ledger, lingers
        self._waiting: list[Entry] = []
        self._expected: set[Task] = set()
        self._changed = asyncio.Event()  # of the two above
        self._write_lock = asyncio.Lock()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="vime-group-writer")

    @contextlib.contextmanager
    def expecting(self, task: Task) -> Iterator[None]:
        """Mark the group as being generated; later groups may wait to be written with it."""
        self._expected.add(task)
        try:
            yield
        finally:
            self._expected.discard(task)
            self._changed.set()

    async def put(self, task: Task, group: EncodedGroup, payload: Payload) -> float:
        """Store and commit; return the seconds that storing took. Waits for: the write in progress, groups to be
        written with, then its own write. The entry that has waited longest writes for all. When that write fails or is
        cancelled, the others write again: no group fails because of another's payload. Raises TransitionError for a
        group that comes too late."""
        mine = Entry(task, group, payload, asyncio.get_running_loop().create_future())
        self._waiting.append(mine)
        self._changed.set()
        try:
            async with self._write_lock:
                if not mine.is_written.done():
                    await self._linger()
                    await self._write(mine)
        except BaseException:  # boundary: raised again; a group whose caller is gone is not stored
            mine.is_written.cancel()
            self._waiting = [entry for entry in self._waiting if entry is not mine]
            raise
        return mine.is_written.result()

    async def run(self, call: Callable[..., Result], *arguments: object) -> Result:
        """Run another call of the store, after the writes before it."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, call, *arguments)

    def close(self) -> None:
        self._thread.shutdown(wait=True)

    async def _linger(self) -> None:
        """Wait until no group is being generated that comes before those that wait."""
        if not self._lingers:
            return
        with (
            waiting("groups to be stored with", "engine", deadline_s=LINGER_S),
            contextlib.suppress(TimeoutError),
        ):
            async with asyncio.timeout(LINGER_S):
                while self._is_earlier_expected():
                    self._changed.clear()
                    await self._changed.wait()

    def _is_earlier_expected(self) -> bool:
        first = min(entry.task.group for entry in self._waiting)
        return any(task.group < first for task in self._expected)

    async def _write(self, mine: Entry) -> None:
        batch, self._waiting = self._waiting, []
        try:
            seconds, outcomes = await self._store_and_commit(batch)
        except BaseException:  # boundary: raised again; the other groups must still be written
            others = [entry for entry in batch if entry is not mine and not entry.is_written.cancelled()]
            self._waiting = others + self._waiting
            raise
        for entry, outcome in zip(batch, outcomes, strict=True):
            if entry.is_written.cancelled():
                continue
            if isinstance(outcome, TransitionError):
                entry.is_written.set_exception(outcome)
            else:
                entry.is_written.set_result(seconds)

    async def _store_and_commit(self, batch: list[Entry]) -> tuple[float, list[CommitOutcome | TransitionError]]:
        began = time.monotonic()
        checksums = await self.run(self._store.put, [(entry.task, entry.group) for entry in batch])
        seconds = time.monotonic() - began
        failpoint(Point.COMMIT)
        groups = [
            (entry.task, replace(entry.payload, checksum=checksum))
            for entry, checksum in zip(batch, checksums, strict=True)
        ]
        with span("commit_groups", num_groups=len(batch)):
            outcomes = await self._ledger.call_async(Ledger.commit_each, groups)
        failpoint(Point.COMMITTED)
        return seconds, outcomes
