"""The run that simulate.py simulates: servers, the costs of their work, and the groups that move between them.

A process with Python code is a server that works on one thing at a time (its GIL). All CPU time of a process counts as
its GIL's, also what C++ threads of Ray and zmq spend: limits come out lower than they are rather than higher. What the
processes do follows the code named beside each part.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

HERE = "part_costs.py"  # 2 cores of an AMD EPYC, little else running; docs/log.md has the run
MS, US, NS = 1e-3, 1e-6, 1e-9


class Cost(NamedTuple):
    """Seconds of one core, and where the figure is from."""

    seconds: float
    what: str
    source: str


COSTS = {
    # engines
    "api_token": Cost(55 * US, "vLLM's API server, a token, 16 sequences a step", f"{HERE} vllm"),
    "scripted_request": Cost(0.137 * MS, "the check's engines, a request", f"{HERE} router"),
    "scripted_token": Cost(0.038 * US, "the check's engines, a token", f"{HERE} router"),
    # router
    "router_request": Cost(0.147 * MS, "router of 50 engines, a request", f"{HERE} router"),
    "router_token": Cost(0.050 * US, "router, a token of JSON_BYTES", f"{HERE} router"),
    # rollout worker
    "worker_group": Cost(3.11 * MS, "prompt to stored group of 16, without calls to others", f"{HERE} worker"),
    "worker_token": Cost(0.72 * US, "the same, a token", f"{HERE} worker"),
    "kept_send_group": Cost(0.51 * MS, "a group of 16 sent to be kept for `vime samples`", f"{HERE} kept"),
    "kept_send_token": Cost(0.067 * US, "the same, a token", f"{HERE} kept"),
    # a call through Ray that does nothing
    "call": Cost(0.90 * MS, "a call through Ray, at the called process", f"{HERE} ledger"),
    "call_caller": Cost(0.63 * MS, "the same, who asks", f"{HERE} ledger"),
    # ledger
    "issue": Cost(1.11 * MS, "ledger, issue of prompts, a call", f"{HERE} ledger"),
    "issue_group": Cost(0.058 * MS, "the same, a prompt", f"{HERE} ledger"),
    "issue_caller": Cost(0.67 * MS, "the same, the worker's side", f"{HERE} ledger"),
    "issue_caller_group": Cost(0.02 * MS, "the same, a prompt", f"{HERE} ledger"),
    "commit": Cost(1.01 * MS, "ledger, commit, a call", f"{HERE} ledger"),
    "commit_group": Cost(0.208 * MS, "the same, a group", f"{HERE} ledger"),
    "commit_caller": Cost(0.67 * MS, "the same, the worker's side", f"{HERE} ledger"),
    "commit_caller_group": Cost(0.054 * MS, "the same, a group", f"{HERE} ledger"),
    "lease": Cost(2.1 * MS, "ledger, lease of a round, a call", f"{HERE} ledger"),
    "lease_group": Cost(0.0194 * MS, "the same, a group", f"{HERE} ledger"),
    "lease_caller": Cost(2.5 * MS, "the same, the coordinator's side", f"{HERE} ledger"),
    "lease_caller_group": Cost(0.0179 * MS, "the same, a group", f"{HERE} ledger"),
    "look_group": Cost(1.12 * US, "a look whether a round is whole, a group of it, at each change", f"{HERE} has"),
    # TransferQueue
    "put_client": Cost(2.09 * MS, "put, a call, client", f"{HERE} queue"),
    "put_client_key": Cost(0.017 * MS, "the same, a key", f"{HERE} queue"),
    "put_client_byte": Cost(1.21 * NS, "the same, a byte", f"{HERE} queue"),
    "put_controller": Cost(1.19 * MS, "put, controller", f"{HERE} queue"),
    "put_controller_key": Cost(0.013 * MS, "the same, a key", f"{HERE} queue"),
    "put_controller_byte": Cost(0.36 * NS, "the same, a byte", f"{HERE} queue"),
    "put_unit": Cost(0.57 * MS, "put, storage unit", f"{HERE} queue"),
    "put_unit_key": Cost(0.005 * MS, "the same, a key", f"{HERE} queue"),
    "put_unit_byte": Cost(1.03 * NS, "the same, a byte", f"{HERE} queue"),
    "get_client": Cost(1.03 * MS, "get, a call, client", f"{HERE} queue"),
    "get_client_key": Cost(0.008 * MS, "the same, a key", f"{HERE} queue"),
    "get_client_byte": Cost(0.79 * NS, "the same, a byte", f"{HERE} queue"),
    "get_controller": Cost(0.59 * MS, "get, controller", f"{HERE} queue"),
    "get_controller_key": Cost(0.0053 * MS, "the same, a key", f"{HERE} queue"),
    "get_controller_byte": Cost(0.15 * NS, "the same, a byte", f"{HERE} queue"),
    "get_unit": Cost(0.485 * MS, "get, storage unit", f"{HERE} queue"),
    "get_unit_key": Cost(0.0032 * MS, "the same, a key", f"{HERE} queue"),
    "get_unit_byte": Cost(0.73 * NS, "the same, a byte", f"{HERE} queue"),
    "clear_client": Cost(1.1 * MS, "clear, a call, client", f"{HERE} queue"),
    "clear_client_key": Cost(0.004 * MS, "the same, a key", f"{HERE} queue"),
    "clear_controller": Cost(0.83 * MS, "clear, controller", f"{HERE} queue"),
    "clear_controller_key": Cost(0.0035 * MS, "the same, a key", f"{HERE} queue"),
    "clear_unit": Cost(0.44 * MS, "clear, storage unit", f"{HERE} queue"),
    # spool
    "fsync": Cost(0.27 * MS, "append with fsync, the disk of this machine", f"{HERE} disk"),
    "disk_byte": Cost(2.68 * NS, "the same, a byte", f"{HERE} disk"),
    # coordinator
    "round": Cost(1.6 * MS, "coordinator: facts, metrics, plan, ticket, a round", f"{HERE} coordinator"),
    "round_group": Cost(0.212 * MS, "the same, a group of 16", f"{HERE} coordinator"),
    "kept_group": Cost(0.21 * MS, "coordinator: a group of 16 written for `vime samples`", f"{HERE} kept"),
    "kept_token": Cost(0.34 * US, "the same, a token", f"{HERE} kept"),
    # ranks and driver
    "rank_row": Cost(0.064 * MS, "source rank, a row unpacked and packed", f"{HERE} rank"),
    "rank_token": Cost(0.018 * US, "the same, a token", f"{HERE} rank"),
    "ticket_rank": Cost(0.59 * MS, "driver: a rank's call to train", "an earlier machine, 2 busy cores"),
    "publish_call": Cost(0.16 * MS, "rank 0: one call to one engine of 400", f"{HERE} fleet"),
    # processes that have nothing to do, CPU s a second
    "idle_actor": Cost(6.0 * MS, "an actor of Ray, a second", f"{HERE} idle"),
    "idle_coordinator": Cost(6.6 * MS, "the RolloutManager, a second", "docs/log.md, who is awake in a run that waits"),
    "idle_driver": Cost(2.7 * MS, "the driver, a second", f"{HERE} idle"),
    "idle_ray": Cost(20.0 * MS, "Ray's servers of one machine, a second", f"{HERE} idle"),
    "idle_router": Cost(0.04 * MS, "the router, an engine and a second", f"{HERE} idle"),
    "idle_engines": Cost(0.053 * MS, "the check's engines, an engine and a second", f"{HERE} idle"),
}  # fmt: skip
JSON_BYTES = 133  # of a token in vLLM's response: part_costs.py vllm
ROW_BYTES = 9  # of a token in a chunk: id 4, log-probability 4, mask 1 (vime/data/payload.py)
TEXT_BYTES = 4  # of a token in a spool's record beside that: its text, about
CHUNK_BYTES = 256 << 10  # vime/data/payload.py
KEPT_TOKENS = (256 << 20) // 16 // 12  # of a round, at most, with the default --keep-samples-mib
OVER_SAMPLING = 8
LINGER_S = 1.0  # vime/rollout/group_writer.py
POLLS_A_SECOND = 2.0  # vime/ray/workers.py


@dataclass(frozen=True, kw_only=True)
class Assumed:
    """What nobody measured."""

    nic_bytes_s: float = 12.5e9  # one network interface of 100 Gb/s for each part, each direction
    router_threads: int = 16  # cores that one router may use
    train_share: float = 0.5  # of the time that the engines take for a round: trainers are not what is asked about
    buckets: int = 16  # calls of each engine in a weight update, beside the last
    spread: float = 0.1  # standard deviation over mean of a group's tokens


@dataclass(frozen=True, kw_only=True)
class Run:
    """What is simulated. `token_s`: seconds of a token in each completion, whatever else runs; None: an engine makes
    `engine_tokens_s` and shares them among its groups."""

    engines: int = 1000
    engine_tokens_s: float = 5000.0
    groups: int = 1024
    samples: int = 16
    tokens: int = 16384  # of a completion, in the mean
    ranks: int = 4096
    sources: int = 512  # ranks that read rows: one for each data-parallel index
    workers: int = 1
    units: int = 1
    staleness: int = 3
    is_async: bool = True  # the next round is asked for while one trains
    token_s: float | None = None
    sizes: Sequence[tuple[int, int]] = ()  # (longest completion, all tokens) that groups are drawn from
    is_scripted: bool = False  # the engines of the check: no vLLM, no weights
    without: frozenset[str] = frozenset()  # kinds whose work takes no time
    warm_up: int = 8
    rounds: int = 16
    seed: int = 0
    assumed: Assumed = Assumed()


# ---- a small simulator ----


class Server:
    """Works on one thing at a time, first come first served; `lanes`: on so many. `background`: CPU s a second that it
    spends besides, which holds nobody up."""

    def __init__(self, kind: str, *, lanes: int = 1, background: float = 0.0, is_cpu: bool = True) -> None:
        self.kind, self.is_cpu, self.background, self.lanes = kind, is_cpu, background, lanes
        self._free = [0.0] * lanes
        self.busy_s = 0.0
        self.is_free_of_charge = False

    def end_of(self, now: float, cost: float) -> float:
        """When work that arrives now is done. Arrivals must come in the order of time."""
        if self.is_free_of_charge:
            return now
        begin = max(now, heapq.heappop(self._free))
        heapq.heappush(self._free, begin + cost)
        self.busy_s += cost
        return begin + cost


class Signal:
    """Something to wait for. Whoever waits is woken when it is set, and who comes later does not wait."""

    def __init__(self) -> None:
        self.waiting: list[Process] = []
        self.is_set = False


Step = tuple[Server, float] | float | Signal
Process = Generator[Step, None, None]
"""A process yields (server, cost): work; a number: seconds that pass; a Signal: until it is set."""


class Clock:
    """Runs processes in the order of time."""

    def __init__(self) -> None:
        self.now = 0.0
        self._count = itertools.count()
        self._due: list[tuple[float, int, Process]] = []

    def start(self, process: Process) -> None:
        self._at(self.now, process)

    def set(self, signal: Signal) -> None:
        signal.is_set = True
        for process in signal.waiting:
            self._at(self.now, process)
        signal.waiting.clear()

    def run(self, until: Callable[[], bool]) -> None:
        """Until that holds, or nothing is left to happen."""
        while self._due and not until():
            self.now, _, process = heapq.heappop(self._due)
            self._step(process)

    def _at(self, when: float, process: Process) -> None:
        heapq.heappush(self._due, (when, next(self._count), process))

    def _step(self, process: Process) -> None:
        try:
            step = next(process)
        except StopIteration:
            return
        if isinstance(step, Signal):
            if step.is_set:
                self._at(self.now, process)
            else:
                step.waiting.append(process)
        elif isinstance(step, tuple):
            self._at(step[0].end_of(self.now, step[1]), process)
        else:
            self._at(self.now + step, process)


class Engine:
    """Makes `tokens_s` tokens a second, shared equally by the groups that it generates."""

    def __init__(self, clock: Clock, tokens_s: float) -> None:
        self._clock, self._tokens_s = clock, tokens_s
        self._open: list[tuple[float, int, Signal]] = []  # (what each has had when it ends, order, end)
        self._each, self._since, self._plan_number, self._order = 0.0, 0.0, 0, itertools.count()
        self.busy_s = 0.0
        self._is_paused = False

    @property
    def load(self) -> int:
        return len(self._open)

    def generate(self, tokens: int) -> Signal:
        self._advance()
        end = Signal()
        heapq.heappush(self._open, (self._each + tokens, next(self._order), end))
        self._plan()
        return end

    def pause(self, is_paused: bool) -> None:
        self._advance()
        self._is_paused = is_paused
        self._plan()

    def _advance(self) -> None:
        passed, self._since = self._clock.now - self._since, self._clock.now
        if self._open and not self._is_paused:
            self._each += passed * self._tokens_s / len(self._open)
            self.busy_s += passed

    def _plan(self) -> None:
        self._plan_number += 1
        if self._open and not self._is_paused:
            self._clock.start(self._next_end(self._plan_number))

    def _next_end(self, number: int) -> Process:
        yield max(0.0, (self._open[0][0] - self._each) * len(self._open) / self._tokens_s)
        if number == self._plan_number:
            self._advance()
            while self._open and self._open[0][0] <= self._each + 0.5:  # of a token
                self._clock.set(heapq.heappop(self._open)[2])
            self._plan()


# ---- the run ----


@dataclass(frozen=True)
class Group:
    number: int
    longest: int
    tokens: int

    def keys(self, samples: int) -> int:
        """Chunks, each of whole rows."""
        row = ROW_BYTES * self.tokens / samples
        return math.ceil(samples / max(1, math.ceil(CHUNK_BYTES / row)))


@dataclass(kw_only=True)
class WorkerState:
    """One rollout worker: its process, its disk, its network interface, and the groups that it has in hand."""

    gil: Server
    disk: Server
    nic: Server
    running: int = 0
    expected: set[int] = field(default_factory=set)
    finished: list[Group] = field(default_factory=list)
    changed: Signal = field(default_factory=Signal)  # of the two above
    ended: Signal = field(default_factory=Signal)  # a prompt that was under way


class Mark(NamedTuple):
    """The end of a round."""

    time: float
    tokens_trained: int
    tokens_generated: int
    num_writes: int
    busy_s: dict[int, float]  # by id of a server
    generated_s: float  # of all engines


def c(name: str) -> float:
    return COSTS[name].seconds


class Simulation:
    """One run. Its `marks` are what `result_of` reads."""

    def __init__(self, run: Run) -> None:
        self.run, self.clock, self._chance = run, Clock(), random.Random(run.seed)
        alone, polls = run.workers == 1, POLLS_A_SECOND * run.workers
        asked = 0.0 if alone else polls * c("call_caller")
        self.servers: list[Server] = []
        self.coordinator = self._server("coordinator", background=c("idle_coordinator") + asked)
        self.ledger = self._server("ledger", background=c("idle_actor"))
        self.controller = self._server("queue controller", background=c("idle_actor"))
        self.units = [self._server("storage unit", background=c("idle_actor")) for _ in range(run.units)]
        self.unit_nics = [self._server("storage unit's network", is_cpu=False) for _ in range(run.units)]
        lanes = run.assumed.router_threads
        self.router = self._server("router", lanes=lanes, background=run.engines * c("idle_router"))
        self.router_nic = self._server("router's network", is_cpu=False)
        self.driver = self._server("driver", background=c("idle_driver"))
        self.rank_0 = self._server("rank 0, weight update", is_cpu=not run.is_scripted)
        self.sources = [self._server("source rank", background=c("idle_actor")) for _ in range(run.sources)]
        if run.is_scripted:
            self.apis = [self._server("engines", background=run.engines * c("idle_engines"))] * run.engines
            self._server("Ray itself", background=c("idle_ray"))
        else:
            self.apis = [self._server("API server") for _ in range(run.engines)]
        polled = c("idle_actor") + POLLS_A_SECOND * c("call")
        self.workers = [
            WorkerState(
                gil=self.coordinator if alone else self._server("worker", background=polled),
                disk=self._server("worker's disk", is_cpu=False),
                nic=self._server("worker's network", is_cpu=False),
            )
            for _ in range(run.workers)
        ]
        tokens_s = run.engine_tokens_s if run.without else min(run.engine_tokens_s, 1 / c("api_token"))
        self.engines = [Engine(self.clock, tokens_s) for _ in range(run.engines)]
        self._by_load = [(0, at) for at in range(run.engines)]
        self.slots = (run.staleness + 1) * run.groups
        self.issued = self.released = 0  # groups
        self.groups: dict[int, Group] = {}  # that are not trained yet
        self.num_ready: Counter[int] = Counter()  # groups, by round
        self.slots_freed, self.round_whole, self.kept_written = Signal(), Signal(), Signal()
        self.kept_written.is_set = True
        self.is_awaited = False  # the coordinator waits for news
        self.round_id = self.trained_rounds = self.num_writes = 0
        self.tokens_generated = self.tokens_trained = 0
        self.marks: list[Mark] = []  # at the end of each round

    def _server(self, kind: str, *, lanes: int = 1, background: float = 0.0, is_cpu: bool = True) -> Server:
        server = Server(kind, lanes=lanes, background=background, is_cpu=is_cpu)
        server.is_free_of_charge = kind in self.run.without
        self.servers.append(server)
        return server

    def simulate(self) -> Simulation:
        for worker in self.workers:
            self.clock.start(self._take_prompts(worker))
            self.clock.start(self._write(worker))
        self.clock.start(self._drive())
        last = self.run.warm_up + self.run.rounds
        self.clock.run(lambda: self.trained_rounds >= last)
        return self

    # a worker: vime/rollout/worker.py, vime/rollout/group_writer.py

    def _take_prompts(self, worker: WorkerState) -> Process:
        share = -(-self.slots // self.run.workers)
        while True:
            wanted = min(OVER_SAMPLING, share - worker.running)
            if wanted < 1:
                worker.ended = Signal()
                yield worker.ended
                continue
            yield worker.gil, c("issue_caller") + wanted * c("issue_caller_group")
            granted = min(wanted, self.slots - (self.issued - self.released))
            numbers = range(self.issued, self.issued + granted)
            self.issued += granted
            worker.running += granted
            yield self.ledger, c("issue") + granted * c("issue_group") + (self._look() if granted else 0.0)
            for number in numbers:
                group = self.groups[number] = self._draw(number)
                worker.expected.add(number)
                self.clock.start(self._answer(worker, group))
            if not granted:
                if self.slots == self.issued - self.released:
                    yield self.slots_freed
                yield self.ledger, c("call")
                yield worker.gil, c("call_caller")

    def _draw(self, number: int) -> Group:
        run = self.run
        if run.sizes:
            return Group(number, *self._chance.choice(run.sizes))
        variance = math.log(1 + run.assumed.spread**2)
        factor = math.exp(self._chance.gauss(-variance / 2, math.sqrt(variance)))
        return Group(number, run.tokens, round(run.samples * run.tokens * factor))

    def _answer(self, worker: WorkerState, group: Group) -> Process:
        run = self.run
        if run.token_s is None:
            at = self._least_loaded()
            yield self.engines[at].generate(group.tokens)
            heapq.heappush(self._by_load, (self.engines[at].load, at))
        else:
            at = group.number % run.engines
            yield group.longest * run.token_s
        self.tokens_generated += group.tokens
        num_bytes = group.tokens * JSON_BYTES
        if run.is_scripted:
            yield self.apis[at], c("scripted_request") + group.tokens * c("scripted_token")
        else:
            self.apis[at].busy_s += group.tokens * c("api_token")  # as tokens come, not at the end
        yield self.router, c("router_request") + group.tokens * c("router_token")
        yield self.router_nic, num_bytes / run.assumed.nic_bytes_s
        yield worker.nic, num_bytes / run.assumed.nic_bytes_s
        yield worker.gil, c("worker_group") + group.tokens * c("worker_token")
        worker.expected.discard(group.number)
        worker.finished.append(group)
        self.clock.set(worker.changed)

    def _least_loaded(self) -> int:
        """The engine with the fewest groups. Entries of `_by_load` that are not true any more are passed over."""
        while True:
            load, at = heapq.heappop(self._by_load)
            if load == self.engines[at].load:
                heapq.heappush(self._by_load, (load + 1, at))
                return at

    def _write(self, worker: WorkerState) -> Process:
        unit = itertools.cycle(range(self.run.units))
        while True:
            if not worker.finished:
                worker.changed = Signal()
                yield worker.changed
                continue
            until, first = self.clock.now + LINGER_S, min(group.number for group in worker.finished)
            while self.clock.now < until and any(number < first for number in worker.expected):
                worker.changed = Signal()
                self.clock.start(self._set_after(until - self.clock.now, worker.changed))
                yield worker.changed
                first = min(group.number for group in worker.finished)
            batch, worker.finished = worker.finished, []
            self.num_writes += 1
            tokens, count = sum(group.tokens for group in batch), len(batch)
            keys, at = sum(group.keys(self.run.samples) for group in batch), next(unit)
            yield worker.disk, c("fsync") + tokens * (ROW_BYTES + TEXT_BYTES) * c("disk_byte")
            yield from self._queue_call("put", worker.gil, keys, tokens * ROW_BYTES, at)
            yield worker.gil, c("commit_caller") + count * c("commit_caller_group")
            yield self.ledger, c("commit") + count * c("commit_group") + self._look()
            self.num_ready.update(group.number // self.run.groups for group in batch)
            if self._is_whole():
                self.clock.set(self.round_whole)
            worker.running -= count
            self.clock.set(worker.ended)

    def _set_after(self, seconds: float, signal: Signal) -> Process:
        yield seconds
        self.clock.set(signal)

    def _queue_call(self, verb: str, client: Server, keys: int, num_bytes: float, unit: int) -> Process:
        """A put or get: its client, the controller, a storage unit and its network interface."""
        for part, server in (("client", client), ("controller", self.controller), ("unit", self.units[unit])):
            name = f"{verb}_{part}"
            yield server, c(name) + keys * c(f"{name}_key") + num_bytes * c(f"{name}_byte")
        yield self.unit_nics[unit], num_bytes / self.run.assumed.nic_bytes_s

    def _look(self) -> float:
        """What the ledger looks at after a change, while the coordinator waits."""
        return min(self.run.groups, self.issued - self.released) * c("look_group") if self.is_awaited else 0.0

    # the coordinator: vime/rollout/coordinator.py, vime/ray/rollout_manager.py

    def _is_whole(self) -> bool:
        return self.num_ready[self.round_id] == self.run.groups

    def _generate(self, generated: Signal) -> Process:
        run, coordinator = self.run, self.coordinator
        yield from self._ask_ledger(coordinator, 2)  # for the lease, in vain or not, and how the ledger stands
        self.round_whole = Signal()
        if not self._is_whole():
            self.is_awaited = True
            yield self.round_whole
            self.is_awaited = False
            yield from self._ask_ledger(coordinator, 2)
        yield self.ledger, c("lease") + run.groups * c("lease_group")
        yield coordinator, c("lease_caller") + run.groups * c("lease_caller_group")
        yield self.kept_written
        self.kept_written = Signal()
        self.clock.start(self._keep(self.round_id, self.kept_written))
        yield coordinator, c("round") + run.groups * c("round_group")
        if run.staleness:
            row = ROW_BYTES * run.tokens
            yield from self._queue_call("get", coordinator, 4, 4 * max(CHUNK_BYTES, row), 0)
        self.clock.set(generated)

    def _ask_ledger(self, caller: Server, times: int) -> Process:
        for _ in range(times):
            yield self.ledger, c("call")
            yield caller, c("call_caller")

    def _keep(self, round_id: int, written: Signal) -> Process:
        """Answers for `vime samples`: groups of the round, evenly, up to KEPT_TOKENS."""
        groups = [self.groups[number] for number in self._numbers(round_id)]
        stride = max(1, -(-sum(group.tokens for group in groups) // KEPT_TOKENS))
        for at, group in enumerate(groups[::stride]):
            worker = self.workers[at % len(self.workers)]
            if worker.gil is not self.coordinator:
                yield worker.gil, c("call") + c("kept_send_group") + group.tokens * c("kept_send_token")
                yield self.coordinator, c("call_caller")
            yield self.coordinator, c("kept_group") + group.tokens * c("kept_token")
        self.clock.set(written)

    def _numbers(self, round_id: int) -> range:
        return range(round_id * self.run.groups, (round_id + 1) * self.run.groups)

    # the driver and the ranks: vime/ray/driver.py

    def _drive(self) -> Process:
        generated = Signal()
        self.clock.start(self._generate(generated))
        while True:
            yield generated
            round_id, self.round_id = self.round_id, self.round_id + 1
            generated = Signal()
            if self.run.is_async:
                self.clock.start(self._generate(generated))
            yield from self._train(round_id)
            self._note_round(round_id)
            yield from self._publish()
            yield self.ledger, c("call")
            yield self.driver, c("call_caller")
            self.released += self.run.groups
            freed, self.slots_freed = self.slots_freed, Signal()
            self.clock.set(freed)
            if not self.run.is_async:
                self.clock.start(self._generate(generated))

    def _train(self, round_id: int) -> Process:
        run = self.run
        groups = [self.groups[number] for number in self._numbers(round_id)]
        tokens = sum(group.tokens for group in groups)
        keys, read, left = sum(group.keys(run.samples) for group in groups), Signal(), [run.sources]
        rows = run.groups * run.samples // run.sources
        share = min(keys, rows)  # a row of a rank lies in a chunk of its own, where there are so many
        for at in range(run.sources):
            yield self.driver, run.ranks / run.sources * c("ticket_rank")
            chunk_bytes = tokens * ROW_BYTES / keys
            self.clock.start(self._read(at, share, share * chunk_bytes, rows, tokens / run.sources, left, read))
        yield read
        if not run.is_scripted:
            yield run.assumed.train_share * tokens / (run.engines * run.engine_tokens_s)
        yield from self._ask_ledger(self.driver, 1)
        yield self.coordinator, c("clear_client") + keys * c("clear_client_key")
        yield self.controller, c("clear_controller") + keys * c("clear_controller_key")
        for unit in self.units:
            yield unit, c("clear_unit")

    def _read(
        self, at: int, keys: int, num_bytes: float, rows: int, tokens: float, left: list[int], read: Signal
    ) -> Process:
        source = self.sources[at]
        yield from self._queue_call("get", source, keys, num_bytes, at % self.run.units)
        yield source, rows * c("rank_row") + tokens * c("rank_token")
        left[0] -= 1
        if left[0] == 0:
            self.clock.set(read)

    def _publish(self) -> Process:
        """Every engine pauses with the first bucket's call and continues after the last."""
        run = self.run
        if run.is_scripted:
            return
        for engine in self.engines:
            engine.pause(True)
        yield self.rank_0, run.engines * (run.assumed.buckets + 1) * c("publish_call")
        for engine in self.engines:
            engine.pause(False)

    def _note_round(self, round_id: int) -> None:
        for number in self._numbers(round_id):
            self.tokens_trained += self.groups.pop(number).tokens
        self.trained_rounds += 1
        busy = {id(server): server.busy_s for server in self.servers}
        generated_s = sum(engine.busy_s for engine in self.engines)
        self.marks.append(
            Mark(self.clock.now, self.tokens_trained, self.tokens_generated, self.num_writes, busy, generated_s)
        )


# ---- what is read from it ----


@dataclass(frozen=True, kw_only=True)
class Kind:
    """The servers of one kind in the measured rounds. `limit_tokens_s`: at which rate the busiest would be full."""

    count: int
    utilisation: float  # of the busiest one
    limit_tokens_s: float
    cpu_s: float  # of all of them, with what they spend on nothing; 0 for a disk or a network interface


@dataclass(frozen=True, kw_only=True)
class Result:
    """The measured rounds of a simulated run."""

    engines: int
    workers: int
    tokens_s: float
    round_s: float
    engines_busy: float  # share of the time in which an engine has a group, pauses left out
    groups_a_write: float
    kinds: dict[str, Kind]

    @property
    def ranked(self) -> list[str]:
        """Kinds, the one that is full first in front."""
        return sorted(self.kinds, key=lambda name: self.kinds[name].limit_tokens_s)

    def shares(self) -> dict[str, float]:
        """Of CPU time, by kind of process."""
        spent = {name: kind.cpu_s for name, kind in self.kinds.items() if kind.cpu_s}
        return {name: cpu_s / sum(spent.values()) for name, cpu_s in spent.items()}


def simulate(run: Run) -> Result:
    return result_of(Simulation(run).simulate())


def result_of(simulation: Simulation) -> Result:
    run = simulation.run
    first, last = simulation.marks[run.warm_up - 1], simulation.marks[-1]
    seconds, tokens = last.time - first.time, last.tokens_trained - first.tokens_trained
    generated = last.tokens_generated - first.tokens_generated  # what the servers worked on; some is not trained yet
    servers: dict[str, list[Server]] = defaultdict(list)
    for server in simulation.servers:
        servers[server.kind].append(server)
    kinds = {}
    for name, members in servers.items():
        spent = [last.busy_s[id(server)] - first.busy_s[id(server)] + server.background * seconds for server in members]
        utilisation = max(cpu / seconds / server.lanes for cpu, server in zip(spent, members, strict=True))
        if members[0].is_free_of_charge:
            continue
        kinds[name] = Kind(
            count=len(members),
            utilisation=utilisation,
            limit_tokens_s=generated / seconds / utilisation if utilisation else math.inf,
            cpu_s=sum(spent) if members[0].is_cpu else 0.0,
        )
    return Result(
        engines=run.engines,
        workers=run.workers,
        tokens_s=tokens / seconds,
        round_s=seconds / run.rounds,
        engines_busy=(last.generated_s - first.generated_s) / seconds / run.engines,
        groups_a_write=run.rounds * run.groups / max(1, last.num_writes - first.num_writes),
        kinds=kinds,
    )
