"""Runs that are alive at the same time, one of which runs at any moment: for differences of a few per cent on a machine
whose speed moves by a third within minutes, where runs one after the other say nothing. Used by streaming.py.

Each run goes through its warm-up rounds alone and is stopped (SIGSTOP, all its processes). From then on the runs take
turns of TURN_S seconds. A round's seconds are those in which its run was going; the first of them, into which the long
stop of the others' warm-up falls, is not counted.
"""

import contextlib
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
from runs import RUN_DEADLINE_S, WARM_UP_ROUNDS, Side, of_turn, start

TURN_S = 2.0
LOOK_S = 0.01
END_S = 120
PATIENCE = {  # a stopped process responds to no keepalive
    "RAY_grpc_keepalive_timeout_ms": "3600000",
    "RAY_grpc_client_keepalive_timeout_ms": "3600000",
    "RAY_health_check_timeout_ms": "3600000",
}
PATIENT = [*("--engine-health-timeout-secs", "3600"), *("--max-restarts", "0")]
"""Nor does a stopped engine; and a run that starts again has no figures."""


@dataclass(frozen=True, kw_only=True)
class Round:
    active_s: float
    cpu_s: float


def in_turns(sides: Sequence[Side], *, rounds: int, number: int, directory: Path) -> dict[str, list[Round]]:
    """Of each side one run with seed 1234 + `number`; returns its `rounds` rounds after the warm-up but the first."""
    runs: list[_Run] = []
    try:
        for side in sides:
            runs.append(_Run(*of_turn(side, number, directory), rounds))
            runs[-1].warm_up()
        order = list(runs)
        while any(run.is_wanted for run in runs):
            for run in order:
                if run.is_wanted:
                    run.take_turn()
            order.reverse()
    except BaseException:
        for run in runs:
            run.ask_to_stop()
        raise
    finally:
        for run in runs:
            run.go_on()
        for run in runs:
            run.end()
    for run in runs:
        run.check()
    return {run.name: run.rounds[1:] for run in runs}


def over(first: Sequence[Round], second: Sequence[Round]) -> str:
    """Samples a second of `second` over those of `first`, whose rounds have the same completions, round by round."""
    pairs = [one.active_s / other.active_s for one, other in zip(first, second, strict=True)]
    error = statistics.stdev(pairs) / len(pairs) ** 0.5
    sums = sum(one.active_s for one in first) / sum(other.active_s for other in second)
    return (
        f"{sums:.3f} (pairs: mean {statistics.fmean(pairs):.3f} +- {error:.3f}, median {statistics.median(pairs):.3f})"
    )


class _Run:
    """One run, stopped but for its turns."""

    def __init__(self, side: Side, run_dir: Path, wanted_rounds: int) -> None:
        self.name = side.name
        self.rounds: list[Round] = []
        self._wanted_rounds = wanted_rounds
        self._metrics = run_dir / "metrics.jsonl"
        self._log = run_dir.with_suffix(".out")
        patient = replace(side, flags=[*side.flags, *PATIENT], environment={**side.environment, **PATIENCE})
        self._process = start(patient, run_dir, self._log)
        self._members: list[psutil.Process] = []
        self._cpu_of: dict[int, float] = {}
        self._known_rounds = 0
        self._active_s = self._cpu_s = 0.0  # of the round under way; of all before it

    @property
    def is_wanted(self) -> bool:
        return len(self.rounds) < self._wanted_rounds

    def warm_up(self) -> None:
        ends = time.monotonic() + RUN_DEADLINE_S
        while self._count_rounds() < WARM_UP_ROUNDS:
            self._look()
            if time.monotonic() > ends:
                self._give_up()
        self._find_members()
        self._signal(signal.SIGSTOP)
        self._find_members()
        self._known_rounds, self._cpu_s = self._count_rounds(), self._sum_cpu()

    def take_turn(self) -> None:
        began = time.monotonic()
        ends = began + TURN_S
        self._signal(signal.SIGCONT)
        while (now := time.monotonic()) < ends and self.is_wanted:
            if self._count_rounds() > self._known_rounds:
                self._end_round(self._active_s + now - began)
                began = now
            self._look()
        self._signal(signal.SIGSTOP)
        self._active_s += time.monotonic() - began
        if self._active_s > RUN_DEADLINE_S:
            self._give_up()
        self._find_members()

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def ask_to_stop(self) -> None:
        """Ask it to stop; it sees this when it continues."""
        self._process.terminate()

    def end(self) -> None:
        """Wait until the run has ended by itself; terminate one that does not."""
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_S)

    def check(self) -> None:
        """A run that failed after its rounds has no figures either."""
        if self._process.returncode != 0:
            sys.exit(f"{self.name}: ended with {self._process.returncode}; see {self._log}")

    def _end_round(self, active_s: float) -> None:
        cpu_s = self._sum_cpu()
        self.rounds.append(Round(active_s=active_s, cpu_s=cpu_s - self._cpu_s))
        print(f"  {self.name}, round {len(self.rounds)}: {active_s:.3f} s", file=sys.stderr)
        self._known_rounds, self._active_s, self._cpu_s = self._known_rounds + 1, 0.0, cpu_s

    def _give_up(self) -> None:
        sys.exit(f"{self.name}: no round done within {RUN_DEADLINE_S} s; see {self._log}")

    def _look(self) -> None:
        if self._process.poll() is not None:
            sys.exit(f"{self.name}: ended with {self._process.returncode}; see {self._log}")
        time.sleep(LOOK_S)

    def _count_rounds(self) -> int:
        try:
            return self._metrics.read_bytes().count(b'"perf/step_time"')
        except FileNotFoundError:
            return 0

    def _find_members(self) -> None:
        root = psutil.Process(self._process.pid)
        self._members = [root, *root.children(recursive=True)]

    def _signal(self, number: int) -> None:
        for member in self._members:
            try:
                os.kill(member.pid, number)
            except ProcessLookupError:
                continue

    def _sum_cpu(self) -> float:
        for member in self._members:
            try:
                times = member.cpu_times()
            except psutil.NoSuchProcess:
                continue
            self._cpu_of[member.pid] = times.user + times.system
        return sum(self._cpu_of.values())
