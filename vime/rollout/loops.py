"""Event loops in named threads, for synchronous callers: one for generation, one for reward functions.

Two loops, because a reward function is the user's code: when it blocks its loop, generation and every deadline go on.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from functools import lru_cache
from typing import NoReturn, TypeVar

from vime.types import WaitTimeoutError
from vime.utils.waits import waiting

Result = TypeVar("Result")


class LoopThread:
    """An event loop that runs in its own daemon thread as long as the process."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[object, object, Result]) -> Future[Result]:
        """Start the coroutine on the loop; callable from any thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(
        self, coroutine: Coroutine[object, object, Result], *, name: str, timeout_s: float, advice: str = ""
    ) -> Result:
        """Run to the end and return the result; WaitTimeoutError (after cancelling it) when `timeout_s` is over."""
        future = self.submit(coroutine)
        try:
            with waiting(name, deadline_s=timeout_s):
                return future.result(timeout_s)
        except TimeoutError:
            if future.done() and not future.cancelled():
                raise  # the coroutine's own
            future.cancel()
            raise WaitTimeoutError(name, timeout_s, self.name, advice) from None
        except BaseException:  # boundary: Ctrl-C in the waiting thread must stop the work, then go on as it came
            future.cancel()
            raise


@lru_cache(maxsize=1)
def rollout_loop() -> LoopThread:
    """Return the loop of generation; made at first use, lives as long as the process."""
    return LoopThread("vime-rollout-loop")


@lru_cache(maxsize=1)
def reward_loop() -> LoopThread:
    """Return the loop of custom reward functions."""
    return LoopThread("vime-reward-loop")


def raise_first(group: BaseExceptionGroup[BaseException]) -> NoReturn:
    """Raise the first failure of a TaskGroup as itself, with its own cause: the others follow from it."""
    error = group.exceptions[0]
    if isinstance(error, BaseExceptionGroup):
        raise_first(error)
    raise error from error.__cause__
