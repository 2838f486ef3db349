"""When workers die one after the other, what they stored in between says whether something kills every one."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from vime.ray import workers as workers_module
from vime.ray.worker_process import WorkerReport
from vime.ray.workers import MAX_DEATHS, RemoteWorkers, _Host
from vime.rollout.group_worker import WorkerStats
from vime.types import ClusterError, PartError, WaitTimeoutError


class Nothing:
    """A ledger, events, an actor and a pool that do as they are told."""

    def call(self, *_: object) -> int:
        return 0

    def emit(self, *_: object, **__: object) -> None: ...
    def ask(self, *_: object) -> None: ...
    def submit(self, *_: object) -> None: ...
    def kill(self) -> None: ...


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


def bring_back(found: Any, monkeypatch: pytest.MonkeyPatch, *deaths: Exception) -> None:
    """A worker that has died is brought back; those that come in its place end with `deaths`, one after the other."""
    left = iter(deaths)

    def wait_for(*_: object, **__: object) -> list[None]:
        found._taken += 1  # the others go on
        if (error := next(left, None)) is not None:
            raise error
        return [None]

    monkeypatch.setattr(workers_module, "wait_for", wait_for)
    found._queue_address, found._failure, found._is_producing, found._sharers = None, None, True, 1
    found._config, found._is_closed = SimpleNamespace(cluster=SimpleNamespace(start_timeout_secs=5)), threading.Event()
    found._start_host = lambda number: host(number, stored=0)
    found._gateway_number = -1
    found._bring_back(0)


def test_a_worker_that_is_killed_while_it_starts_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    found = workers()
    bring_back(found, monkeypatch, *[ClusterError("rollout-worker-0 died: SIGKILL")] * MAX_DEATHS)
    found.raise_if_failed()
    assert [each.number for each in found._hosts] == [0, 1]


def test_one_that_never_starts_and_one_that_cannot_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    dead, broken = [ClusterError(f"death {number}") for number in range(MAX_DEATHS + 9)], PartError("no such plug-in")
    late = WaitTimeoutError("a rollout worker to start", 300.0, "rollout-worker-0")
    for errors, says in ((dead, f"death {MAX_DEATHS}"), ([broken], "no such plug-in"), ([late], "300 s")):
        found = workers()
        bring_back(found, monkeypatch, *errors)
        with pytest.raises(type(errors[0]), match=says):
            found.raise_if_failed()
