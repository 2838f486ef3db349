"""How generation ends early and keeps its tokens: engines end requests and return the tokens so far.

Closing a connection would end a request as fast, but the response that says which weights sampled which token would be
lost with it. So the engines are told to abort by request id. The call goes to each engine that the router knows,
because the router does not say which of them has a request.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextvars import ContextVar

from vime.utils.waits import waiting

KEEP_S = 10.0
"""How long aborted completions may take to arrive; later ones are given up."""
AGAIN_S = 0.25
"""A request that reached its engine after the abort is aborted again after this time."""

Abort = Callable[[list[str]], Awaitable[None]]
_SCOPE: ContextVar[AbortScope | None] = ContextVar("vime_abort_scope", default=None)


class AbortScope:
    """For one round, or one worker: ends the engine requests of its tasks. Lives on the rollout loop.

    It covers the task that calls `activate` and those that it starts, through any plug-in. Evaluation is outside it.
    """

    def __init__(self) -> None:
        self.is_set = False
        self._open: dict[str, Abort] = {}

    def activate(self) -> None:
        """Put the calling task, and every task that it starts from now on, into this scope."""
        _SCOPE.set(self)

    @contextlib.contextmanager
    def holding(self, request_id: str, abort: Abort) -> Iterator[None]:
        """Mark the request as sent while the context is open."""
        self._open[request_id] = abort
        try:
            yield
        finally:
            del self._open[request_id]

    async def end(self, work: Collection[asyncio.Task[object]], *, deadline_s: float = KEEP_S) -> None:
        """Start no more requests and abort those in progress, until `work` has ended or the deadline is over.

        Waits for: the last responses of the engines, then rewards and stores. Never raises what `work` raises.
        """
        self.is_set = True
        ends = time.monotonic() + deadline_s
        with waiting("aborted completions", "engine", deadline_s=deadline_s):
            while pending := [task for task in work if not task.done()]:
                left = ends - time.monotonic()
                if left <= 0:
                    return
                for abort in set(self._open.values()):
                    await abort([request for request, its in self._open.items() if its == abort])
                await asyncio.wait(pending, timeout=min(AGAIN_S, left))


def current_abort_scope() -> AbortScope | None:
    """Return the scope of the calling task; None for evaluation."""
    return _SCOPE.get()


def is_aborting() -> bool:
    """Return whether the calling task must end with the tokens that it has."""
    scope = _SCOPE.get()
    return scope is not None and scope.is_set
