"""How producers and readers of the queue call the ledger, wherever it lives.

`LedgerPort` is the seam: the ledger's calls by name, and one way to wait for news instead of asking again and again.
`LocalLedgerPort` is the ledger in this process, for tests and examples; `ray/ledger_actor.py` is the one of a run.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Any, Protocol

from vime.handoff.ledger import Ledger


class LedgerPort(Protocol):
    """`desk` is "prompts", "rounds", or "" for the ledger itself; names and arguments as in vime/handoff/ledger.py.

    Every call has a deadline of its own and raises the ledger's refusals.
    """

    def call(self, desk: str, name: str, *arguments: Any, **options: Any) -> Any: ...
    async def call_async(self, desk: str, name: str, *arguments: Any, **options: Any) -> Any: ...

    def wait_for_news(self, seen: int, timeout_s: float, *, ready: int = 0, slots: int = 0) -> int:
        """Until the ledger has written more than line `seen` of its history and `Ledger.has(ready=, slots=)`, or
        `timeout_s` is over; the newest line.

        Pass the number that was answered before the call whose answer was "not yet", at first -1: nothing is missed in
        between.
        """
        ...

    async def wait_for_news_async(self, seen: int, timeout_s: float, *, ready: int = 0, slots: int = 0) -> int: ...


class LocalLedgerPort:
    """A ledger in this process, called from any thread or loop, one call at a time."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._changed = threading.Condition()

    def call(self, desk: str, name: str, *arguments: Any, **options: Any) -> Any:
        with self._changed:
            try:
                return getattr(getattr(self._ledger, desk) if desk else self._ledger, name)(*arguments, **options)
            finally:
                self._changed.notify_all()

    async def call_async(self, desk: str, name: str, *arguments: Any, **options: Any) -> Any:
        return self.call(desk, name, *arguments, **options)

    def wait_for_news(self, seen: int, timeout_s: float, *, ready: int = 0, slots: int = 0) -> int:
        def is_news() -> bool:
            return self._ledger.sequence > seen and self._ledger.has(ready=ready, slots=slots)

        with self._changed:
            self._changed.wait_for(is_news, timeout_s)
            return self._ledger.sequence

    async def wait_for_news_async(self, seen: int, timeout_s: float, *, ready: int = 0, slots: int = 0) -> int:
        return await asyncio.to_thread(self.wait_for_news, seen, timeout_s, ready=ready, slots=slots)
