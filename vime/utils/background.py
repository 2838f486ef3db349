"""A call in a thread of its own that nobody has to wait for when the process ends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

R = TypeVar("R")


def in_background(name: str, call: Callable[[], R]) -> Future[R]:
    """Run `call` in a new daemon thread. Threads of an executor are joined when Python ends, so one that waits for a
    peer that never comes would keep the process."""
    future: Future[R] = Future()
    threading.Thread(target=_run, args=(future, call), name=name, daemon=True).start()
    return future


def _run(future: Future[R], call: Callable[[], R]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:  # boundary: whoever asks for the result gets it
        future.set_exception(error)
    finally:  # the error has this frame: it would keep what the call holds until Python looks for cycles
        del future, call
