"""Rollout workers in processes of their own (--num-rollout-workers above 1), and the RolloutManager's handle on them.

Each is a Ray actor around `rollout/worker.RolloutWorker`, with a spool of its own. The ledger gives them prompts, so no
worker knows the others. One that dies costs the completions it was working on: its prompts go back to the ledger at
once, the others take them, and a new worker takes its place. Nothing else stops. In mode external the gateway is one
more of these processes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

import ray
from ray import ObjectRef
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from vime.config.deadlines import rollout_deadline_s, update_deadline_s
from vime.config.parse import Config
from vime.config.queue_checks import EXTERNAL
from vime.gateway.evaluation import Place, Result
from vime.handoff.group_store import StoredGroup
from vime.handoff.ledger_types import Task
from vime.handoff.prompt_ledger import PromptLedger
from vime.observability.events import EventKind, EventLog
from vime.observability.samples import DroppedGroup
from vime.ray.actor import Actor, Options, start_actor
from vime.ray.cluster import WORKER_CPUS, num_worker_processes
from vime.ray.gateway import PROCESS, EvalProgress, GatewayActor, gateway_of
from vime.ray.ledger_actor import LedgerClient
from vime.ray.stores import is_dead
from vime.ray.waits import HANGS_S, Silence, wait_for
from vime.ray.worker_process import WorkerProcess, WorkerReport
from vime.rollout import sample_recorder
from vime.rollout.abort_scope import KEEP_S
from vime.rollout.generation import use_engine_key
from vime.rollout.group_worker import WorkerStats
from vime.rollout.progress import BOARD, RoundProgress
from vime.rollout.vllm_rollout import close_generation
from vime.rollout.worker import STOP_S, RolloutWorker, worker_name, worker_number
from vime.types import (
    ClusterError,
    EngineReport,
    LostError,
    Sample,
    Version,
    VimeError,
    WaitTimeoutError,
)
from vime.utils.errors import first_line
from vime.utils.network import free_port
from vime.utils.processes import place
from vime.utils.waits import waiting
from vime.weights.published import published_root

if TYPE_CHECKING:
    from vime.handoff.queue_client import QueueAddress

P = ParamSpec("P")
R = TypeVar("R")
logger = logging.getLogger(__name__)

POLL_S = 0.5
"""Seconds between two checks of the workers. A report is asked for in one and read in the next, so that a dead one is
noticed after twice this time at most."""
CALL_S = 60.0
MAX_DEATHS = 3
"""Workers that may die one after the other without a group stored in between: then something kills every one."""


class RolloutWorkerActor(WorkerProcess):
    """One rollout worker in a process of its own."""

    def __init__(
        self,
        config: Config,
        number: int,
        name: str,
        run_dir: str,
        queue_address: QueueAddress | None,
        ledger: LedgerClient,
        key: str,
    ) -> None:
        super().__init__(config, number, f"rollout-worker-{number}", run_dir, queue_address)
        use_engine_key(key)
        sample_recorder.RECORDER.collect()
        self._worker = RolloutWorker(config.flat, source=self._source, ledger=ledger, store=self._store, name=name)

    def start(self, num_workers: int) -> None:
        self._worker.share(num_workers)
        self._worker.start()

    def share(self, num_workers: int) -> None:
        self._worker.share(num_workers)

    def stop(self) -> None:
        self._worker.stop()

    def report(self) -> WorkerReport:
        error = None
        try:
            self._worker.raise_if_failed()
        except Exception as raised:  # boundary: the RolloutManager raises it where a round waits
            error = raised
        worker = self._worker
        return WorkerReport(
            stats=worker.stats,
            num_running=worker.num_running,
            waits_for=worker.waits_for,
            spool_bytes=worker.spool_bytes,
            error=error,
        )

    def _take_stats(self) -> tuple[WorkerStats, list[DroppedGroup]]:
        return self._worker.take_stats(), sample_recorder.RECORDER.take_dropped()

    def close(self) -> None:
        self._worker.stop()
        close_generation()
        self._worker.close()


@dataclass(slots=True)
class _Host:
    """A worker's process as the RolloutManager knows it."""

    number: int
    name: str  # of the worker, as the ledger knows it
    actor: Actor[WorkerProcess]
    gateway: Actor[GatewayActor] | None = None  # the same actor, when it is the gateway
    report: WorkerReport | None = None
    asked: ObjectRef[WorkerReport] | None = None  # a report that was requested and has not arrived yet
    silence: Silence = field(default_factory=Silence)  # since it was requested
    heard: float = field(default_factory=time.monotonic)  # when the last report arrived


def _end(host: _Host) -> None:
    """End a process that may be stopped: Ray only asks it to end, and what it has locked the next one needs."""
    if host.report is not None and host.report.place == place():
        with contextlib.suppress(ProcessLookupError):
            os.kill(host.report.pid, signal.SIGKILL)
    host.actor.kill()


class RemoteWorkers:
    """`coordinator.Workers` over several processes. The RolloutManager owns it; a thread looks at them every POLL_S."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        queue_address: QueueAddress | None,
        ledger: LedgerClient,
        *,
        engine_key: str,
        events: EventLog,
    ) -> None:
        self._config, self._run_dir, self._queue_address = config, run_dir, queue_address
        self._ledger, self._engine_key, self._events = ledger, engine_key, events
        self._lock = threading.Lock()  # of `_hosts` and `_names`
        self._names: set[str] = set()
        self._is_producing = False
        self._deaths, self._stored = 0, 0  # in a row; groups stored when the last one died
        self._taken = 0  # groups that the workers had stored when their statistics were last taken
        self._sharers = 1
        self._failure: Exception | None = None
        self._is_closed = threading.Event()
        self._gateway_number = -1  # its number is the last
        if config.queue.transferqueue_mode == EXTERNAL:
            self._gateway_number = num_worker_processes(config) - 1
            shutil.rmtree(published_root(run_dir), ignore_errors=True)  # of an earlier start: no job may load them
            self._address = _whole_address(config.queue.transferqueue_address)
        self._hosts = [self._start_host(number) for number in range(num_worker_processes(config))]
        wait_for(
            [host.actor.ask(WorkerProcess.report) for host in self._hosts],
            name="rollout workers to start",
            owner="rollout-worker",
            deadline_s=config.cluster.start_timeout_secs,
        )
        self._watcher = threading.Thread(target=self._watch, name="vime-worker-watch", daemon=True)
        self._watcher.start()

    @property
    def stats(self) -> WorkerStats:
        return WorkerStats.joined([host.report.stats for host in self._alive() if host.report is not None])

    @property
    def num_running(self) -> int:
        return sum(host.report.num_running for host in self._alive() if host.report is not None)

    @property
    def waits_for(self) -> str:
        return "; ".join(sorted({host.report.waits_for for host in self._alive() if host.report is not None} - {""}))

    @property
    def spool_bytes(self) -> int:
        return sum(host.report.spool_bytes for host in self._alive() if host.report is not None)

    def is_ours(self, producer: str) -> bool:
        with self._lock:
            return (gateway_of(producer) or producer) in self._names

    def start(self) -> None:
        self._is_producing = True
        hosts = self._alive()
        self._ask(hosts, CALL_S, WorkerProcess.start, self._num_sharers(hosts))

    def serve_to_jobs(self, version: Version) -> EngineReport:
        """Mode external: have the gateway read back the files of a version and offer it to the jobs. Waits for: the
        gateway; one that dies meanwhile, for the one that takes its place."""
        deadline_s = update_deadline_s(self._config)
        ends = time.monotonic() + deadline_s
        with waiting("the gateway to offer weights", PROCESS, deadline_s=deadline_s):
            while time.monotonic() < ends:
                gateway = self._gateway()
                if gateway is not None:
                    try:
                        [report] = wait_for(
                            [gateway.ask(GatewayActor.serve_to_jobs, version)],
                            name="weights to be read back",
                            owner=PROCESS,
                            deadline_s=deadline_s,
                        )
                    except LostError as error:
                        logger.warning("the gateway has not offered version %d: %s", version, error)
                    else:
                        return report
                self.raise_if_failed()
                self._is_closed.wait(POLL_S)
        raise WaitTimeoutError(
            f"the gateway to offer version {version} to the jobs outside", deadline_s, PROCESS, "See RUN_DIR/logs."
        )

    def evaluate(self, before_round: int) -> Mapping[Place, Result]:
        """Mode external: have jobs outside evaluate the serving weights. Waits for: the jobs. A gateway that dies
        meanwhile is replaced, and its evaluation begins again."""
        deadline_s = rollout_deadline_s(self._config)
        began, said = time.monotonic(), EvalProgress(done=0, total=0, num_tokens=0, waits_for="a gateway")
        warned = ""
        with waiting("an evaluation by jobs outside", "external job", deadline_s=deadline_s):
            while time.monotonic() < began + deadline_s:
                gateway = self._gateway()
                if gateway is not None:
                    try:
                        [said] = wait_for(
                            [gateway.ask(GatewayActor.evaluate, before_round)],
                            name="an evaluation by jobs outside",
                            owner=PROCESS,
                            deadline_s=CALL_S,
                        )
                        if said.results is not None:
                            return said.results
                    except LostError as error:
                        logger.warning("the evaluation before round %d begins again: %s", before_round, error)
                BOARD.post(
                    RoundProgress(
                        name=f"evaluation before round {before_round} by jobs outside",
                        kept_groups=said.done,
                        wanted_groups=said.total,
                        in_flight_groups=said.total - said.done,
                        dropped_groups=0,
                        response_tokens=said.num_tokens,
                        elapsed_s=time.monotonic() - began,
                    )
                )
                if said.waits_for not in ("", warned):
                    warned = said.waits_for
                    logger.warning("the evaluation before round %d waits for %s", before_round, warned)
                self.raise_if_failed()
                self._is_closed.wait(POLL_S)
        raise WaitTimeoutError(
            f"the evaluation before round {before_round} by jobs outside: {said.done} of {said.total} prompts done",
            deadline_s,
            said.waits_for or "external jobs",
            "Start a job whose token has scope eval, or raise --rollout-timeout-secs.",
        )

    def stop(self) -> None:
        """End their work; with --partial-rollout keep unfinished completions. A worker that dies meanwhile keeps
        nothing."""
        self._is_producing = False
        self._ask(self._alive(), KEEP_S + 2 * STOP_S, WorkerProcess.stop)

    def raise_if_failed(self) -> None:
        """Raise the error that ended a worker, unless it was killed: the next worker would end in the same way."""
        if self._failure is not None:
            raise self._failure
        for host in self._alive():
            if host.report is not None and host.report.error is not None:
                raise host.report.error

    def take_stats(self) -> WorkerStats:
        """Take the workers' statistics. Those of a worker that died since the last call are lost; the ledger counts
        groups."""
        results = self._ask(self._alive(), CALL_S, WorkerProcess.take_stats)
        for _, dropped in results:
            for group in dropped:
                sample_recorder.RECORDER.note_dropped(group.group_index, group.reason, group.samples)
        joined = WorkerStats.joined([stats for stats, _ in results])
        self._taken += joined.committed_groups
        return joined

    def samples(self, groups: Sequence[StoredGroup]) -> list[list[Sample]]:
        found: dict[Task, list[Sample]] = {}
        for own, result in self._by_workers(groups, WorkerProcess.samples, name="samples of finished groups"):
            found |= zip([group.task for group in own], result, strict=True)
        return [found[group.task] for group in groups]

    def restore(self, groups: Sequence[StoredGroup]) -> None:
        self._by_workers(groups, WorkerProcess.restore, name="stored groups to be put into the queue again")

    def put_again(self, unread: Mapping[Task, int | None]) -> list[Task]:
        """Return which groups the live workers had in memory and have put into the queue again."""
        deadline_s = self._config.queue.transferqueue_timeout_secs
        return [
            task for found in self._ask(self._alive(), deadline_s, WorkerProcess.put_again, unread) for task in found
        ]

    def replace_queue(self, address: QueueAddress) -> None:
        """Let every worker, also one that is being started, store in another queue."""
        with self._lock:
            self._queue_address = address
        self._ask(self._alive(), CALL_S, WorkerProcess.replace_queue, address)

    def release(self, tasks: Sequence[Task]) -> None:
        for host in self._alive():
            host.actor.ask(WorkerProcess.release, tasks)  # not waited for: it only frees memory

    def forget(self, tasks: Sequence[Task]) -> None:
        for host in self._alive():
            host.actor.ask(WorkerProcess.forget, tasks)  # not waited for: it only frees memory, here and in the queue

    def compact(self, needed: Mapping[Task, int | None]) -> int:
        return sum(self._ask(self._alive(), CALL_S, WorkerProcess.compact, needed))

    def close(self) -> None:
        """End every worker. Calling it again does nothing."""
        if self._is_closed.is_set():
            return
        self._is_closed.set()
        self._watcher.join(2 * CALL_S)
        hosts = self._alive()
        self._ask(hosts, 2 * STOP_S, WorkerProcess.close)
        for host in hosts:
            host.actor.kill()

    def _alive(self) -> list[_Host]:
        with self._lock:
            return list(self._hosts)

    def _gateway(self) -> Actor[GatewayActor] | None:
        """Return the gateway; None until the one that takes the place of a dead one has been started."""
        return next((host.gateway for host in self._alive() if host.gateway is not None), None)

    def _by_workers(
        self, groups: Sequence[StoredGroup], method: Callable[[WorkerProcess, Sequence[StoredGroup]], R], *, name: str
    ) -> list[tuple[Sequence[StoredGroup], R]]:
        """Return the groups in parts, each with what a worker made of it. Waits for: the workers. The part of one that
        dies meanwhile is another's, which reads it from the disk."""
        deadline_s = self._config.queue.transferqueue_timeout_secs
        ends, left = time.monotonic() + deadline_s, list(groups)
        found: list[tuple[Sequence[StoredGroup], R]] = []
        with waiting(name, deadline_s=deadline_s) as wait:
            while left:
                shares = self._shares_of(left)
                wait.owners = tuple(_process(host) for host, _ in shares)
                asked = {host.actor.ask(method, own): own for host, own in shares}
                time_left = max(0.0, ends - time.monotonic())
                done, pending = ray.wait(list(asked), num_returns=len(asked), timeout=time_left) if asked else ([], [])
                if pending or not time_left:
                    raise WaitTimeoutError(name, deadline_s, "rollout-worker", f"{len(left)} groups are left.")
                left = [] if asked else left
                for ref in done:
                    try:
                        found.append((asked[ref], _value(ref)))
                    except (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError) as error:
                        logger.info("a worker died before it could %s: %s", method.__name__, first_line(error))
                        left += asked[ref]
                if left:
                    self.raise_if_failed()
                    self._is_closed.wait(POLL_S)  # until the dead one is noticed, or one has come in its place
        return found

    def _shares_of(self, groups: Sequence[StoredGroup]) -> list[tuple[_Host, list[StoredGroup]]]:
        """Choose for each group the worker that has it in memory, or the one of its number, which has its spool. Any
        other reads the spool of a stranger. Nothing when no worker is alive."""
        hosts = {host.number: host for host in self._alive()}
        shares: dict[int, list[StoredGroup]] = {number: [] for number in hosts}
        for at, group in enumerate(groups):
            owner = self._gateway_number if gateway_of(group.producer) else worker_number(group.producer)
            if hosts:
                chosen = owner if owner in hosts else sorted(hosts)[at % len(hosts)]
                shares[chosen].append(group)
        return [(hosts[number], own) for number, own in shares.items() if own]

    def _start_host(self, number: int) -> _Host:
        """Start a worker, or the gateway, without waiting for it."""
        if number == self._gateway_number:
            return self._start_gateway()
        name = worker_name(number)
        options: Options = {
            "num_cpus": WORKER_CPUS,
            "max_concurrency": 4,
            "scheduling_strategy": "SPREAD",  # over the nodes of a cluster, as the engines are
        }
        told = (self._config, number, name, str(self._run_dir), self._queue_address, self._ledger)
        actor = start_actor(RolloutWorkerActor, options, *told, self._engine_key)
        with self._lock:
            self._names.add(name)
        return _Host(number=number, name=name, actor=actor)

    def _start_gateway(self) -> _Host:
        """Start it on this node, whose address the jobs know."""
        name = f"{PROCESS}.{os.getpid()}.{uuid.uuid4().hex[:6]}"
        node = str(ray.get_runtime_context().get_node_id())
        options: Options = {
            "num_cpus": WORKER_CPUS,
            "max_concurrency": 4,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
        }
        told = (self._config, self._gateway_number, name, str(self._run_dir), self._queue_address, self._ledger)
        gateway = start_actor(GatewayActor, options, *told, self._address)
        with self._lock:
            self._names.add(name)
        return _Host(number=self._gateway_number, name=name, actor=gateway, gateway=gateway)

    def _num_sharers(self, hosts: Sequence[_Host]) -> int:
        """Return how many share the slots: the workers, and the jobs outside that take prompts."""
        workers = sum(host.gateway is None for host in hosts)
        jobs = sum(host.report.num_jobs for host in hosts if host.gateway is not None and host.report is not None)
        return max(1, workers + jobs)

    def _share(self, hosts: Sequence[_Host]) -> None:
        self._sharers = self._num_sharers(hosts)
        for host in hosts:
            host.actor.ask(WorkerProcess.share, self._sharers)

    def _ask(
        self,
        hosts: Iterable[_Host],
        deadline_s: float,
        method: Callable[Concatenate[WorkerProcess, P], R],
        *arguments: P.args,
        **named: P.kwargs,
    ) -> list[R]:
        """Return the results of the live workers. Waits for: the slowest of them. One that dies meanwhile returns
        nothing; the watching thread replaces it."""
        name = method.__name__
        refs = {host.actor.ask(method, *arguments, **named): host for host in hosts}
        results: list[R] = []
        with waiting(f"rollout workers to {name}", *(_process(host) for host in refs.values()), deadline_s=deadline_s):
            done, pending = ray.wait(list(refs), num_returns=len(refs), timeout=deadline_s) if refs else ([], [])
        for ref in pending:
            logger.warning("%s did not %s within %g s", _process(refs[ref]), name, deadline_s)
        for ref in done:
            try:
                results.append(_value(ref))
            except ray.exceptions.RayActorError:
                logger.info("%s died before it could %s", _process(refs[ref]), name)
        return results

    def _watch(self) -> None:
        """Waits for: the clock, or `close`."""
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="vime-worker-start") as starting:
            while not self._is_closed.wait(POLL_S):
                for host in self._alive():
                    try:
                        if self._is_dead(host):
                            self._replace(host, starting)
                    except Exception as error:  # boundary: raised where a round waits
                        self._failure = error
                hosts = self._alive()
                if self._num_sharers(hosts) != self._sharers:  # a job has come or gone
                    self._share(hosts)

    def _is_dead(self, host: _Host) -> bool:
        if host.asked is None:
            host.asked, host.silence = host.actor.ask(WorkerProcess.report), Silence()
        done, _ = ray.wait([host.asked], timeout=0)
        if not done:
            is_hanging = host.silence.is_too_long()  # a thread of its own responds, whatever plug-ins do
            if is_hanging:
                logger.warning("%s (%s) lives, but has not responded for %g s", _process(host), host.name, HANGS_S)
                _end(host)
            return is_hanging
        asked, host.asked = host.asked, None
        try:
            host.report, host.heard = ray.get(asked), time.monotonic()
        except ray.exceptions.RayActorError as error:
            logger.warning("%s (%s) died: %s", _process(host), host.name, first_line(error))
            if isinstance(error, ray.exceptions.ActorUnavailableError):  # of the network: it may live
                _end(host)
            return True
        return False

    def _replace(self, host: _Host, starting: ThreadPoolExecutor) -> None:
        """Give its prompts to the others now; a new worker joins when it has started."""
        if host.gateway is None:
            num_prompts = self._ledger.call(PromptLedger.abandon, host.name)
        else:  # jobs go on with their prompts, but a group of a job's own was in the gateway's hands
            num_prompts = self._ledger.call(PromptLedger.abandon_own)
        within_s = time.monotonic() - host.heard  # its death is younger than the last that was heard of it
        self._events.emit(EventKind.WORKER_LOST, worker=host.name, prompts=num_prompts, within_s=within_s)
        with self._lock:
            self._hosts.remove(host)
        self._share(self._alive())
        if host.report is not None:  # nobody will take them
            self._taken += host.report.stats.committed_groups
        stored = self._taken + self.stats.committed_groups
        self._deaths = self._deaths + 1 if stored == self._stored else 1
        self._stored = stored
        if self._deaths > MAX_DEATHS:
            raise ClusterError(
                f"{self._deaths} rollout workers died one after the other, and no group was stored in between. Look at "
                f"RUN_DIR/logs/{_process(host)}.log and at the machine's memory; --load resumes the run."
            )
        starting.submit(self._bring_back, host.number)

    def _bring_back(self, number: int, deaths: int = 0) -> None:
        """`deaths`: how many in its place have died while they started."""
        address, host = self._queue_address, None
        try:
            host = self._start_host(number)
            wait_for(
                [host.actor.ask(WorkerProcess.report)],
                name="a rollout worker to take a dead one's place",
                owner=_process(host),
                deadline_s=self._config.cluster.start_timeout_secs,
            )
        except Exception as error:  # boundary: raised where a round waits
            if host is not None:
                host.actor.kill()
            may_try = isinstance(error, ClusterError) and deaths < MAX_DEATHS and not self._is_closed.is_set()
            if self._has_other_queue_than(address):
                self._bring_back(number)
            elif may_try:
                logger.warning("rollout worker %d is started once more: %s", number, error)
                self._bring_back(number, deaths + 1)
            else:
                self._failure = error
            return
        if self._is_closed.is_set():
            host.actor.kill()
            return
        with self._lock:
            self._hosts = sorted([*self._hosts, host], key=lambda each: each.number)
            newest = self._queue_address
        if newest is not None and newest is not address:
            host.actor.ask(WorkerProcess.replace_queue, newest)
        hosts = self._alive()
        if self._is_producing:
            host.actor.ask(WorkerProcess.start, self._num_sharers(hosts))
        self._share(hosts)

    def _has_other_queue_than(self, address: QueueAddress | None) -> bool:
        """Return whether the queue that a worker was to join has died. Waits for: the one that takes its place."""
        if address is None or not is_dead(address):
            return False
        ends = time.monotonic() + self._config.queue.transferqueue_timeout_secs
        while self._queue_address is address and time.monotonic() < ends and not self._is_closed.is_set():
            self._is_closed.wait(POLL_S)
        return self._queue_address is not address


def _value(ref: ObjectRef[R]) -> R:
    """Return what a worker has returned; the error that it raised is raised, RayActorError when it died."""
    try:
        return ray.get(ref)
    except ray.exceptions.RayTaskError as error:
        raise error.cause if isinstance(error.cause, VimeError) else error from error


def _process(host: _Host) -> str:
    return PROCESS if host.gateway is not None else f"rollout-worker-{host.number}"


def _whole_address(address: str) -> str:
    """Choose the port where none is given: every gateway of this start listens at the same one."""
    host, _, port = address.rpartition(":")
    return address if int(port) else f"{host}:{free_port(host.strip('[]'))}"
