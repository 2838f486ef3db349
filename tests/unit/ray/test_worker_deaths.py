"""When workers die one after the other, what they stored in between says whether something kills every one."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from vime.ray.worker_process import WorkerReport
from vime.ray.workers import MAX_DEATHS, RemoteWorkers, _Host
from vime.rollout.group_worker import WorkerStats
from vime.types import ClusterError


class Nothing:
    """A ledger, events, an actor and a pool that do as they are told."""

    def call(self, *_: object) -> int:
        return 0

    def emit(self, *_: object, **__: object) -> None: ...
    def ask(self, *_: object) -> None: ...
    def submit(self, *_: object) -> None: ...


def host(number: int, *, stored: int) -> _Host:
    report = WorkerReport(stats=WorkerStats(committed_groups=stored), num_running=0, waits_for="", spool_bytes=0)
    actor: Any = Nothing()
    return _Host(number=number, name=f"rollout-worker-{number}", actor=actor, report=report)


def workers() -> Any:
    found: Any = RemoteWorkers.__new__(RemoteWorkers)
    found._ledger = found._events = Nothing()
    found._lock, found._hosts = threading.Lock(), [host(1, stored=0)]
    found._deaths, found._stored, found._taken = 0, 0, 0
    return found


def let_die(found: Any, count: int, *, stored: int) -> None:
    for _ in range(count):
        died = host(0, stored=stored)
        found._hosts.append(died)
        found._replace(died, Nothing())


def test_workers_that_stored_something_before_they_died_may_be_many() -> None:
    """All but the one that lives store: its own count says nothing."""
    found = workers()
    let_die(found, 2 * MAX_DEATHS, stored=50)
    assert found._deaths == 1


def test_workers_that_stored_nothing_may_not() -> None:
    found = workers()
    let_die(found, MAX_DEATHS, stored=0)
    with pytest.raises(ClusterError, match="4 rollout workers died one after the other, and no group was stored"):
        let_die(found, 1, stored=0)
