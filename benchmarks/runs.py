"""Whole runs of train.py and train_async.py as sides of a comparison, taking turns. Used by streaming.py.

A side is a command line. What is counted begins after its warm-up rounds: wall seconds from the end of the last of
them to the end of the last round, and the CPU seconds of the run's processes in that time.
"""

import json
import os
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
WARM_UP_ROUNDS = 3
SAMPLE_INTERVAL_S = 1.0
RUN_DEADLINE_S = 600
SEED = "{seed}"
"""Stands in the flags of a side for the seed of its run: 1234, 1235, ..., the same for all sides of a turn."""


@dataclass(frozen=True, kw_only=True)
class Side:
    name: str
    script: str
    flags: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One run of a side."""

    rounds: list[dict[str, float]]  # metrics of the counted rounds
    wall_s: float  # of all counted rounds
    cpu_s: float

    @property
    def round_s(self) -> float:
        """Mean: in an overlapped schedule one long round is paid for by the next."""
        return self.wall_s / len(self.rounds)

    def median(self, metric: str) -> float:
        values = [line[metric] for line in self.rounds if metric in line]
        return statistics.median(values) if values else float("nan")

    def mean(self, metric: str) -> float:
        return statistics.fmean(line.get(metric, 0.0) for line in self.rounds)


def alternate(sides: Sequence[Side], *, repeats: int, directory: Path) -> dict[str, list[Measured]]:
    """Each side `repeats` times, taking turns, so that a machine whose speed drifts slows all of them alike."""
    found: dict[str, list[Measured]] = {side.name: [] for side in sides}
    for number in range(repeats):
        for side in sides:
            found[side.name].append(run(*of_turn(side, number, directory)))
            print(f"  {side.name}, run {number + 1}: {found[side.name][-1].round_s:.3f} s a round", file=sys.stderr)
    return found


def of_turn(side: Side, number: int, directory: Path) -> tuple[Side, Path]:
    """The side with the seed of this turn, and where its run goes."""
    flags = [str(1234 + number) if flag == SEED else flag for flag in side.flags]
    return replace(side, flags=flags), directory / f"{re.sub('[ .,]+', '-', side.name)}-{number}"


def run(side: Side, run_dir: Path) -> Measured:
    used: list[tuple[float, float]] = []  # (wall clock, CPU seconds of all processes until then)
    has_ended = threading.Event()
    log = run_dir.with_suffix(".out")
    process = start(side, run_dir, log)
    watcher = threading.Thread(target=_watch, args=(process.pid, used, has_ended))
    watcher.start()
    try:
        code = process.wait(RUN_DEADLINE_S)
    except subprocess.TimeoutExpired:
        process.terminate()
        process.wait(60)
        sys.exit(f"{side.name}: not done after {RUN_DEADLINE_S} s; see {log}")
    finally:
        has_ended.set()
        watcher.join()
    if code != 0:
        sys.exit(f"{side.name}: ended with {code}; see {log}")
    lines = [json.loads(line)["metrics"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    rounds = [line for line in lines if "perf/step_time" in line][WARM_UP_ROUNDS:]
    wall_s = sum(line["perf/step_time"] for line in rounds)
    last = _end_of_rounds(run_dir)
    return Measured(rounds=rounds, wall_s=wall_s, cpu_s=_at(used, last) - _at(used, last - wall_s))


def start(side: Side, run_dir: Path, log: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **side.environment}
    command = [sys.executable, str(ROOT / side.script), *side.flags, "--run-dir", str(run_dir)]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output:
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)


def _watch(pid: int, used: list[tuple[float, float]], has_ended: threading.Event) -> None:
    """Waits for: the clock. Ends with the run."""
    cpu_s: dict[int, float] = {}
    while not has_ended.wait(SAMPLE_INTERVAL_S):
        try:
            root = psutil.Process(pid)
            for member in [root, *root.children(recursive=True)]:
                times = member.cpu_times()
                cpu_s[member.pid] = times.user + times.system
        except psutil.NoSuchProcess:
            continue
        used.append((time.time(), sum(cpu_s.values())))


def _end_of_rounds(run_dir: Path) -> float:
    """When the last round was trained, by the wall clock of its event."""
    events = [json.loads(line) for line in (run_dir / "events" / "driver.jsonl").read_text().splitlines()]
    return max(event["t"] for event in events if event["kind"] in ("round_trained", "round_generated"))


def _at(used: Sequence[tuple[float, float]], moment: float) -> float:
    """CPU seconds at `moment`, between the samples around it."""
    if not used:
        return float("nan")
    before = max((entry for entry in used if entry[0] <= moment), default=used[0])
    after = min((entry for entry in used if entry[0] >= moment), default=used[-1])
    if after[0] == before[0]:
        return before[1]
    share = (moment - before[0]) / (after[0] - before[0])
    return before[1] + share * (after[1] - before[1])
