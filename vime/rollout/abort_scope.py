"""How generation ends early and keeps what it has: engines give up requests and answer with the tokens so far.

Closing a connection would end a request as fast, but the answer that says which weights sampled which token would be
lost with it. So the engines are told to abort by request id, which is a control call: it goes to each engine that the
router knows, because the router does not say which of them has a request.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextvars import ContextVar

from vime.utils.waits import waiting

KEEP_S = 10.0
"""How long answers that are cut may take to come in; what comes later is given up."""
AGAIN_S = 0.25
"""A request that had not reached its engine when the abort did is aborted again after this."""

Abort = Callable[[list[str]], Awaitable[None]]
_HALT: ContextVar[AbortScope | None] = ContextVar("vime_abort_scope", default=None)


class AbortScope:
    """Of one round, or of a producer: what its tasks ask of engines ends when it says so. Lives on the rollout loop.

    It belongs to the task that calls `govern` and to those that it starts, through any plug-in: evaluation goes on.
    """

    def __init__(self) -> None:
        self.is_set = False
        self._open: dict[str, Abort] = {}

    def govern(self) -> None:
        """The calling task, and every task that it starts from now on, obeys."""
        _HALT.set(self)

    @contextlib.contextmanager
    def holding(self, request_id: str, abort: Abort) -> Iterator[None]:
        """The request is at an engine, or on its way."""
        self._open[request_id] = abort
        try:
            yield
        finally:
            del self._open[request_id]

    async def end(self, work: Collection[asyncio.Task[object]], *, deadline_s: float = KEEP_S) -> None:
        """No request begins any more, and those under way are aborted, until `work` has ended or the deadline is over.

        Waits for: the engines' last answers, and the rewards and stores that follow. Never raises what `work` raises.
        """
        self.is_set = True
        ends = time.monotonic() + deadline_s
        with waiting("answers that are cut short", "engine", deadline_s=deadline_s):
            while pending := [task for task in work if not task.done()]:
                left = ends - time.monotonic()
                if left <= 0:
                    return
                for abort in set(self._open.values()):
                    await abort([request for request, its in self._open.items() if its == abort])
                await asyncio.wait(pending, timeout=min(AGAIN_S, left))


def current_abort_scope() -> AbortScope | None:
    """What the calling task obeys; None for evaluation."""
    return _HALT.get()


def is_aborting() -> bool:
    """Whether the calling task is to end with what it has."""
    halt = _HALT.get()
    return halt is not None and halt.is_set
