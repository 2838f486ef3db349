"""Sides of a comparison, each in a process of its own, taking turns on one thread. Used by the benchmarks beside it.

A side is built once and then asked for one step at a time, A B C A B C ..., so that a machine whose speed drifts slows
all of them alike; a side that is not asked waits for its pipe and costs nothing. Peak memory is that of the process.
"""

import multiprocessing
import os
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ANSWER_DEADLINE_S = 240
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # freed memory is kept: otherwise what a step pays for fresh pages depends on which step ran before it
    "MALLOC_MMAP_THRESHOLD_": "4000000000",
    "MALLOC_TRIM_THRESHOLD_": "16000000000",
}
Step = Callable[[str], dict[str, float]]
"""Makes one optimizer step on the batch of this name. Returns what it computed (loss, gradient norm)."""


@dataclass(frozen=True)
class Cost:
    """One step."""

    cpu_s: float
    wall_s: float
    values: dict[str, float]


@dataclass(frozen=True)
class Costs:
    """All counted steps of one side on one batch."""

    steps: list[Cost]
    peak_mib: float  # of the process, so far
    built_mib: float  # resident before its first step: imports and weights

    @property
    def cpu_s(self) -> float:
        return statistics.median(step.cpu_s for step in self.steps)

    @property
    def wall_s(self) -> float:
        return statistics.median(step.wall_s for step in self.steps)

    @property
    def spread(self) -> str:
        values = [step.cpu_s for step in self.steps]
        return f"{min(values):.2f}-{max(values):.2f}"


def take_turns(
    sides: dict[str, tuple[Callable[..., Step], dict[str, Any]]],
    turns: Sequence[tuple[str, str]],
    *,
    repeats: int,
    warm_up: int = 1,
) -> dict[tuple[str, str], Costs]:
    """Costs by (side, batch). `sides[name]` is a function at the top of a module and its arguments, which builds the
    side inside its process; `turns` is the order within one round of turns, of which `warm_up` are not counted."""
    os.environ.update(ENVIRONMENT)
    context = multiprocessing.get_context("spawn")
    pipes: dict[str, Connection] = {}
    processes = []
    try:
        built_mib = {}
        for name, (build, arguments) in sides.items():  # one after another: no side's start disturbs another's
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, build, arguments), daemon=True)
            process.start()
            theirs.close()
            pipes[name], processes = ours, [*processes, process]
            built_mib[name] = _answer(ours, name)
        costs: dict[tuple[str, str], list[Cost]] = {turn: [] for turn in turns}
        peaks: dict[tuple[str, str], float] = {}
        for number in range(warm_up + repeats):
            for turn in turns:
                side, batch = turn
                pipes[side].send(batch)
                cost, peaks[turn] = _answer(pipes[side], side)
                if number >= warm_up:
                    costs[turn].append(cost)
        for pipe in pipes.values():
            pipe.send(None)
        for process in processes:
            process.join(ANSWER_DEADLINE_S)
    finally:
        for process in processes:
            process.kill()
            process.join()
    return {turn: Costs(costs[turn], peaks[turn], built_mib[turn[0]]) for turn in turns}


def _answer(pipe: Connection, name: str) -> Any:
    if not pipe.poll(ANSWER_DEADLINE_S):
        raise SystemExit(f"side {name!r} did not respond within {ANSWER_DEADLINE_S} s")
    try:
        return pipe.recv()
    except EOFError:
        raise SystemExit(f"side {name!r} ended; its traceback is above") from None


def _serve(pipe: Connection, build: Callable[..., Step], arguments: dict[str, Any]) -> None:
    import torch

    torch.set_num_threads(1)
    step = build(**arguments)
    pipe.send(_resident_mib())
    while (batch := pipe.recv()) is not None:
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        values = step(batch)
        cost = Cost(time.process_time() - cpu_s, time.perf_counter() - wall_s, values)
        pipe.send((cost, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024))
    os._exit(0)  # process groups of a side need no farewell


def _resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
