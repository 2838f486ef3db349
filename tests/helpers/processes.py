"""Processes that must have ended. Each may end at any moment, also between two looks at it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import psutil


def find_processes(pids: Iterable[int]) -> list[psutil.Process]:
    """Return those of the processes that exist."""
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(pid))
    return found


def has_ended(process: psutil.Process) -> bool:
    """Tell whether a process has ended: it is gone, or a zombie that nobody has waited for."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def assert_ended(processes: Iterable[psutil.Process | int], within_s: float = 60.0) -> None:
    """Wait until all have ended, and fail with those that have not.

    Args:
        processes: each as psutil's object (which knows a number that was given again) or as its number.
        within_s: seconds to wait for all together.
    """
    known = [one for one in processes if isinstance(one, psutil.Process)]
    known += find_processes(one for one in processes if isinstance(one, int))
    _, alive = psutil.wait_procs(known, timeout=within_s)
    left = [one for one in alive if not has_ended(one)]
    assert not left, left
