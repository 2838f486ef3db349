"""How producers and readers of the queue call the ledger, wherever it lives.

`LedgerPort` is the seam: the ledger's calls by name, and one way to wait for news instead of asking again and again.
`LocalLedgerPort` is the ledger in this process, for tests and examples; `ray/ledger_actor.py` is the one of a run.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Any, Protocol

from vime.handoff.ledger import Ledger
from vime.handoff.ledger_types import TransitionError

CALLS = {
    "prompts": frozenset({"issue", "admit", "commit", "drop", "retry", "heartbeat", "abandon"}),
    "rounds": frozenset({"lease", "ready", "heartbeat", "trained", "release", "durable"}),
    "": frozenset({"status", "sync", "commit_each", "needed_payloads"}),
}
"""Desk -> what another process may call there. Not `restore`: the owner of the ledger brings the spool."""


def call_ledger(ledger: Ledger, desk: str, name: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """One call of CALLS by its name; any other name is refused, whoever asks."""
    if name not in CALLS.get(desk, ()):
        known = ", ".join(f"{at}.{call}".lstrip(".") for at in CALLS for call in sorted(CALLS[at]))
        raise TransitionError(f"the ledger has no call {desk}.{name}; expected one of {known}.")
    return getattr(getattr(ledger, desk) if desk else ledger, name)(*arguments, **options)


class LedgerPort(Protocol):
    """`desk` is "prompts", "rounds", or "" for the ledger itself; names and arguments as in vime/handoff/ledger.py.

    Every call has a deadline of its own and raises the ledger's refusals.
    """

    def call(self, desk: str, name: str, *arguments: Any, **options: Any) -> Any: ...
    async def call_async(self, desk: str, name: str, *arguments: Any, **options: Any) -> Any: ...

    def wait_for_news(self, seen: int, timeout_s: float, **has: int) -> int:
        """Until the ledger has written more than line `seen` of its history and `Ledger.has(**has)`, or `timeout_s`
        is over; the newest line.

        Pass the number that was answered before the call whose answer was "not yet", at first -1: nothing is missed in
        between.
        """
        ...

    async def wait_for_news_async(self, seen: int, timeout_s: float, **has: int) -> int: ...


class LocalLedgerPort:
    """A ledger in this process, called from any thread or loop, one call at a time."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._changed = threading.Condition()
        self._wakers: dict[asyncio.Event, asyncio.AbstractEventLoop] = {}  # of coroutines that wait for news

    def call(self, desk: str, name: str, *arguments: Any, **options: Any) -> Any:
        with self._changed:
            try:
                return call_ledger(self._ledger, desk, name, arguments, options)
            finally:
                self._changed.notify_all()
                for woken, loop in self._wakers.items():
                    loop.call_soon_threadsafe(woken.set)

    async def call_async(self, desk: str, name: str, *arguments: Any, **options: Any) -> Any:
        return self.call(desk, name, *arguments, **options)

    def wait_for_news(self, seen: int, timeout_s: float, **has: int) -> int:
        with self._changed:
            self._changed.wait_for(lambda: self._is_news(seen, has), timeout_s)
            return self._ledger.sequence

    async def wait_for_news_async(self, seen: int, timeout_s: float, **has: int) -> int:
        """No thread waits, so that a loop that is stopped leaves nothing behind that holds its process up."""
        woken = asyncio.Event()
        with self._changed:
            self._wakers[woken] = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout_s):
                while not self._is_news(seen, has):
                    await woken.wait()
                    woken.clear()
        except TimeoutError:
            pass  # no news is an answer too
        finally:
            with self._changed:
                del self._wakers[woken]
        return self._ledger.sequence

    def _is_news(self, seen: int, has: dict[str, int]) -> bool:
        with self._changed:
            return self._ledger.sequence > seen and self._ledger.has(**has)
