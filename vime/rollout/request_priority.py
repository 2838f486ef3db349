"""The order of requests when all slots are taken: the group that training needs first.

With prefetched rounds the prompts of the next round are sent while the last completions of this one are decoded. First
come, first served would let them delay the round that the trainers wait for.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from contextvars import ContextVar

_PRIORITY: ContextVar[int] = ContextVar("vime_request_priority", default=-1)


def set_request_priority(group_index: int) -> None:
    """Mark the calling task's requests from now on, through any plug-in, as this group's. Evaluation goes first."""
    _PRIORITY.set(group_index)


def request_priority() -> int:
    """Return the group of the calling task's requests; -1 for evaluation."""
    return _PRIORITY.get()


class Slots:
    """At most `count` holders at once. Belongs to one event loop."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._arrivals = itertools.count()
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []  # by priority, then by arrival

    async def acquire(self) -> None:
        if self._free:  # then nobody waits
            self._free -= 1
            return
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (_PRIORITY.get(), next(self._arrivals), mine))
        try:
            await mine
        except asyncio.CancelledError:
            if mine.done() and not mine.cancelled():
                self.release()  # the slot was handed over at the moment of the cancellation
            raise

    def release(self) -> None:
        while self._waiting:
            *_, next_one = heapq.heappop(self._waiting)
            if not next_one.done():
                next_one.set_result(None)
                return
        self._free += 1
