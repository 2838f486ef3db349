"""Stores finished groups, several at once where nobody has to wait for it.

A write costs the same few round trips and one fsync whether it carries one group or ten. So groups that finish while a
write is under way are written together by the next; and a group of which no round can become whole yet, because one
before it is still being answered, waits for company, LINGER_S at most.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from vime.handoff.group_store import GroupStore
from vime.handoff.ledger_types import Task
from vime.utils.waits import waiting

LINGER_S = 1.0
"""A kill costs the answers that wait; they are asked for again, as those under way are."""


class Stored(NamedTuple):
    """A payload is stored: what the ledger is told, and how long the write took."""

    checksum: int
    seconds: float


Waiting = tuple[Task, bytes, asyncio.Future[Stored]]


class GroupWriter:
    """Owned by the producer, on its loop, with one thread of its own for the store's blocking calls."""

    def __init__(self, store: GroupStore, *, lingers: bool = False) -> None:
        """`lingers`: rounds take groups in the order of their numbers, so that it is known which ones can wait."""
        self._store, self._lingers = store, lingers
        self._waiting: list[Waiting] = []
        self._expected: set[Task] = set()
        self._changed = asyncio.Event()  # of the two above
        self._turn = asyncio.Lock()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="vime-group-writer")

    @contextlib.contextmanager
    def expecting(self, task: Task) -> Iterator[None]:
        """This group is being answered; whoever is behind it may wait for it."""
        self._expected.add(task)
        try:
            yield
        finally:
            self._expected.discard(task)
            self._changed.set()

    async def put(self, task: Task, data: bytes) -> Stored:
        """The payload is stored. Waits for: the write under way, company, then its own write, which whoever waits
        longest does for all. When that one fails or is cancelled, the others write again: nobody fails for another's
        payload, and what is stored already is not stored twice."""
        entry = (task, data, asyncio.get_running_loop().create_future())
        self._waiting.append(entry)
        self._changed.set()
        try:
            async with self._turn:
                if not entry[2].done():
                    await self._wait_for_company()
                    await self._write(entry[2])
        except BaseException:  # boundary: raised again; nobody stores what nobody waits for
            self._waiting = [other for other in self._waiting if other is not entry]
            raise
        return entry[2].result()

    async def run(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Another call of the store, after the writes before it."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, call, *arguments)

    def close(self) -> None:
        self._thread.shutdown(wait=True)

    async def _wait_for_company(self) -> None:
        """Until no group is being answered that comes before those that wait."""
        if not self._lingers:
            return
        with (
            waiting("groups to be stored with", "engine", deadline_s=LINGER_S),
            contextlib.suppress(TimeoutError),
        ):
            async with asyncio.timeout(LINGER_S):
                while self._has_one_before():
                    self._changed.clear()
                    await self._changed.wait()

    def _has_one_before(self) -> bool:
        first = min(task.group for task, _, _ in self._waiting)
        return any(task.group < first for task in self._expected)

    async def _write(self, mine: asyncio.Future[Stored]) -> None:
        batch, self._waiting = self._waiting, []
        groups = [(task, data) for task, data, _ in batch]
        began = time.monotonic()
        try:
            checksums: list[int] = await self.run(self._store.put, groups)
        except BaseException:  # boundary: raised again; the groups of the others are still to be written
            self._waiting = [entry for entry in batch if entry[2] is not mine] + self._waiting
            raise
        for (_, _, stored), checksum in zip(batch, checksums, strict=True):
            stored.set_result(Stored(checksum, time.monotonic() - began))
