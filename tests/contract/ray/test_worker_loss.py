"""What rollout workers have stored is read, and put into the queue, whichever of them are killed meanwhile."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.helpers.rollout_setup import make_args
from vime.handoff.group_store import GroupStore, MemoryStore, StoredGroup
from vime.handoff.ledger_types import Task
from vime.handoff.spool import Spool, worker_spool
from vime.observability.samples import DroppedGroup
from vime.ray.actor import start_actor
from vime.ray.waits import wait_for
from vime.ray.worker_process import WorkerProcess, WorkerReport
from vime.ray.workers import RemoteWorkers, _Host
from vime.rollout.convert import encoded_group
from vime.rollout.group_worker import WorkerStats
from vime.rollout.worker import worker_name
from vime.types import Sample, SampleStatus, VersionSpan, WaitTimeoutError

ARGS = make_args("--transferqueue-mode", "streaming", "--n-samples-per-prompt", 2)
DEADLINE_S = 60.0


def completions(group: int) -> list[Sample]:
    made = []
    for at in range(2):
        sample = Sample(group_index=group, index=2 * group + at, prompt="p", tokens=[1], reward=float(at))
        sample.append_response_tokens([5, 6], [-0.5, -0.25], versions=[VersionSpan(0, 0, 2)])
        sample.status = SampleStatus.COMPLETED
        made.append(sample)
    return made


class Storing(WorkerProcess):
    """The process of a worker, with its spool, that does nothing of itself."""

    def __init__(self, directory: str, number: int) -> None:
        spool = Spool(worker_spool(Path(directory), number))
        self._store = GroupStore(MemoryStore(), spool, partition="train", directory=Path(directory))

    def put(self, name: str, numbers: Sequence[int]) -> list[StoredGroup]:
        tasks = [Task("train", number, 1) for number in numbers]
        groups = [encoded_group(ARGS, completions(number), producer_id=name, with_samples=True) for number in numbers]
        return [
            StoredGroup(task, crc, name)
            for task, crc in zip(tasks, self._store.put(list(zip(tasks, groups, strict=True))), strict=True)
        ]

    def in_the_queue(self) -> list[str]:
        return [str(key) for _, key in self._store._store.chunks]

    def start(self, num_workers: int) -> None: ...
    def share(self, num_workers: int) -> None: ...
    def stop(self) -> None: ...
    def close(self) -> None: ...

    def report(self) -> WorkerReport:
        return WorkerReport(stats=WorkerStats(), num_running=0, waits_for="", spool_bytes=self.spool_bytes)

    def _take_stats(self) -> tuple[WorkerStats, list[DroppedGroup]]:
        return WorkerStats(), []


class Ledger:
    def call(self, method: object, *arguments: object) -> int:
        return 0


class Events:
    def emit(self, kind: object, **facts: object) -> None: ...


class Workers(RemoteWorkers):
    """Those of a run, watched and replaced as ever, of whom each is a `Storing`."""

    def __init__(self, directory: Path, count: int) -> None:
        self._directory, self._config = directory, ARGS.config
        self._ledger, self._events = Ledger(), Events()
        self._lock, self._is_closed, self._failure = threading.Lock(), threading.Event(), None
        self._names, self._is_producing, self._queue_address = set(), False, None
        self._deaths, self._stored, self._taken, self._sharers, self._gateway_number = 0, 0, 0, count, -1
        self._hosts = [self._start_host(number) for number in range(count)]
        self._ask(self._hosts, DEADLINE_S, WorkerProcess.report)
        self._watcher = threading.Thread(target=self._watch, name="vime-worker-watch", daemon=True)
        self._watcher.start()

    def _start_host(self, number: int) -> _Host:
        actor = start_actor(Storing, {"num_cpus": 0, "max_concurrency": 4}, str(self._directory), number)
        return _Host(number=number, name=worker_name(number), actor=actor)

    def store(self, number: int, groups: Sequence[int]) -> list[StoredGroup]:
        host = self._hosts[number]
        [stored] = wait_for(
            [host.actor.ask(Storing.put, host.name, groups)], name="put", owner="worker", deadline_s=DEADLINE_S
        )
        return stored

    def kill(self, *numbers: int) -> None:
        pids = [report.pid for report in self._ask(self._hosts, DEADLINE_S, WorkerProcess.report)]
        for number in numbers:
            os.kill(pids[number], signal.SIGKILL)


@pytest.fixture
def workers(ray_cluster: None, tmp_path: Path) -> Iterator[Workers]:
    workers = Workers(tmp_path, 2)
    yield workers
    workers.close()


def test_what_a_worker_that_was_just_killed_had_is_read_by_the_other(workers: Workers) -> None:
    """Nobody has noticed its death yet. A plug-in that looks at a round must not end the run."""
    stored = [*workers.store(0, [0, 1]), *workers.store(1, [2, 3])]
    workers.kill(0)
    assert workers.samples(stored) == [completions(number) for number in range(4)]
    workers.restore(stored)
    assert workers._failure is None


def test_groups_are_put_again_by_the_next_workers_when_all_are_dead(workers: Workers) -> None:
    stored = [*workers.store(0, [0, 1]), *workers.store(1, [2, 3])]
    workers.kill(0, 1)
    workers.restore(stored)
    queues = workers._ask(workers._alive(), DEADLINE_S, Storing.in_the_queue)
    assert sorted(key for keys in queues for key in keys) == [f"train/{number}#1.0" for number in range(4)]


def test_a_worker_that_does_not_come_back_is_waited_for_until_the_deadline(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = workers.store(0, [0])
    workers._config = make_args("--transferqueue-mode", "streaming", "--transferqueue-timeout-secs", 3).config
    monkeypatch.setattr(workers, "_bring_back", lambda number: None)
    workers.kill(0, 1)
    with pytest.raises(WaitTimeoutError, match=r"stored groups to be put into the queue again.*1 groups are left"):
        workers.restore(stored)
