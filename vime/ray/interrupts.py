"""Ctrl-C and SIGTERM as a request, not as an exception at a random line.

The first signal asks the run to stop at its next waiting point, where the state can be saved; the second one stops at
once.
"""

from __future__ import annotations

import os
import signal
import sys
import types
from typing import Any

from vime.ray.waits import Interrupted

NOTICE = b"\nstopping when this step is done, then saving the state; once more: stop at once, without saving\n"


class Interrupts:
    """Context manager around a run; restores the former handlers."""

    def __init__(self) -> None:
        self._asked = False
        self._former: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._former[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def raise_if_asked(self, name: str) -> None:
        if self._asked:
            raise Interrupted(name)

    def _on_signal(self, _number: int, _frame: types.FrameType | None) -> None:
        if self._asked:
            raise KeyboardInterrupt
        self._asked = True
        # Not through the screen: a signal may come in the middle of its drawing.
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, NOTICE)
