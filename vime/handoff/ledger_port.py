"""How producers and readers of the queue call the ledger, in any process.

`LedgerPort` is the protocol: the ledger's methods, type-checked as if they were called directly, and a way to wait for
a change instead of polling. `LocalLedgerPort` is the ledger in this process, for tests and examples;
`ray/ledger_actor.py` is the one of a run.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Concatenate, ParamSpec, Protocol, TypeVar, cast

from vime.handoff.ledger import Ledger
from vime.handoff.ledger_types import TransitionError
from vime.handoff.prompt_ledger import PromptLedger
from vime.handoff.round_ledger import RoundLedger

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
