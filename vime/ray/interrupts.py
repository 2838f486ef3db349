"""Ctrl-C, SIGTERM and a closed terminal (SIGHUP) as a request, not as an exception at a random line.

The first signal asks the run to stop at its next waiting point, where the state can be saved; the second one stops at
once. `nohup` keeps its effect: a signal that was ignored when the run began is still ignored.
"""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import sys
import types
from collections.abc import Callable, Iterator

from vime.ray.waits import Interrupted

Handler = Callable[[int, types.FrameType | None], object] | int | None
NOTICE = b"\nstopping when this step is done, then saving the state; once more: stop at once, without saving\n"
NOTICE_WITHOUT_WORK = (
    b"\nstopping: nothing has been trained that is not saved, so there is nothing to save; once more: stop at once\n"
)


class Interrupts:
    """Context manager around a run; restores the former handlers."""

    def __init__(self) -> None:
        self.is_asked = False
        self.has_work: Callable[[], bool] = nothing_to_save  # whether a stop now saves something; called by the handler
        self._former: dict[int, Handler] = {}

    def __enter__(self) -> Interrupts:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._former[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def raise_if_asked(self, name: str) -> None:
        if self.is_asked:
            raise Interrupted(name)

    def _on_signal(self, number: int, _frame: types.FrameType | None) -> None:
        if number == signal.SIGHUP:
            _leave_terminal()
        if self.is_asked:
            if number == signal.SIGHUP:  # a shell and the kernel may both say that the terminal is gone
                return
            raise KeyboardInterrupt
        self.is_asked = True
        # Not through the screen: a signal may come in the middle of its drawing.
        with contextlib.suppress(OSError):
            notice = NOTICE if self.has_work() else NOTICE_WITHOUT_WORK
            os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, notice)


def nothing_to_save() -> bool:
    """Return False: during a start no part has trained anything."""
    return False


@contextlib.contextmanager
def children_outlive_the_terminal() -> Iterator[None]:
    """Processes started inside do not get SIGHUP: a closed terminal sends it to the whole process group, and the save
    needs them. One that arrives meanwhile is delivered to this process at the end of the block."""
    former = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)


def _leave_terminal() -> None:
    """Discard output from now on: writing to a terminal that is gone is an error."""
    for descriptor in (0, 1, 2):
        with contextlib.suppress(OSError):
            if stat.S_ISCHR(os.fstat(descriptor).st_mode):
                nowhere = os.open(os.devnull, os.O_RDWR)
                os.dup2(nowhere, descriptor)
                os.close(nowhere)
