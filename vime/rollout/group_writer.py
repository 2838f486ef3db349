"""Stores finished groups, those together that finish while a write is under way.

A write costs the same few round trips and one fsync whether it carries one group or ten, and groups of a round tend to
finish together: one by one, the last of them would wait for all the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from vime.handoff.group_store import GroupStore
from vime.handoff.ledger_types import Task

Waiting = tuple[Task, bytes, asyncio.Future[int]]


class GroupWriter:
    """Owned by the producer, on its loop, with one thread of its own for the store's blocking calls."""

    def __init__(self, store: GroupStore) -> None:
        self._store = store
        self._waiting: list[Waiting] = []
        self._turn = asyncio.Lock()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="vime-group-writer")

    async def put(self, task: Task, data: bytes) -> int:
        """The checksum of the payload, when it is stored. Waits for: the write under way, then its own, which whoever
        waits longest does for all. When that one fails or is cancelled, the others write again: nobody fails for
        another's payload, and what is stored already is not stored twice."""
        stored: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.append((task, data, stored))
        async with self._turn:
            if not stored.done():
                await self._write(stored)
        return stored.result()

    async def run(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Another call of the store, after the writes before it."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, call, *arguments)

    def close(self) -> None:
        self._thread.shutdown(wait=True)

    async def _write(self, mine: asyncio.Future[int]) -> None:
        batch, self._waiting = self._waiting, []
        groups = [(task, data) for task, data, _ in batch]
        try:
            checksums: list[int] = await self.run(self._store.put, groups)
        except BaseException:  # boundary: raised again; the groups of the others are still to be written
            self._waiting = [entry for entry in batch if entry[2] is not mine] + self._waiting
            raise
        for (_, _, stored), checksum in zip(batch, checksums, strict=True):
            stored.set_result(checksum)
