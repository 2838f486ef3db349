"""Functions that `test_dist_launch.py` runs in processes of their own."""

from __future__ import annotations

import os
import threading
import time

from tests.helpers.dist_launch import Ranks, _write


def meet(ranks: Ranks, greeting: str) -> tuple[str, int, list[int]]:
    """Two meetings: ports are the same on all ranks."""
    return greeting, ranks.rank, [ranks.rendezvous("a", 2), ranks.rendezvous("b", 2)]


def fail_on_one(ranks: Ranks) -> None:
    """Rank 1 raises; rank 0 would wait for ever."""
    _write(ranks.directory / f"pid-{ranks.rank}", str(os.getpid()))
    if ranks.rank == 1:
        while not (ranks.directory / "pid-0").exists():
            time.sleep(0.01)
        raise ValueError("rank one has had enough")
    wait_for_ever(ranks)


def wait_for_ever(ranks: Ranks) -> None:
    _write(ranks.directory / f"pid-{ranks.rank}", str(os.getpid()))
    while True:
        time.sleep(1)


def start_a_thread() -> None:
    threading.Thread(target=threading.Event().wait, daemon=True).start()


calls: list[int] = []
imported_by: list[int] = []


def import_once() -> None:
    imported_by.append(os.getpid())


def count(_: Ranks) -> tuple[int, int, int]:
    """Number of this process, of calls that it knows of, and of the process that imported."""
    calls.append(os.getpid())
    [by] = imported_by
    return os.getpid(), len(calls), by
