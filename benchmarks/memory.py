"""Where the memory of a run lies: by process and phase, sampled over a whole short run.

    .venv/bin/python benchmarks/memory.py [--size 135M] [--rounds 3] [--save] [-- any train.py flag]

The run is that of `end_to_end.py` (its side `vime`). Counted is PSS (a page that n processes share counts 1/n in each),
so that a column may be added up. A phase is what the driver does: `start` until the first completions are requested,
then the spans of its schedule (docs/metrics.md). A cell is the largest sample of that process in that phase, MB; the
row `all` is the largest sum, which is less than the sum of the column where the processes have their peaks one after
the other. The second table is the sample with the largest sum: anonymous memory (heap, tensors), files (libraries,
mapped weights), shared memory (Ray's object store, weights on their way). Ends with CPU seconds a round, to see what a
change costs: of all rounds but the first.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.end_to_end import ROOT, TASKS, Watcher, vime_command, vime_rounds

INTERVAL_S = 0.2
START = "start"
PHASES = ("wait", "train", "update_weights", "save")  # spans of the driver; nothing else of it takes memory
KINDS = {"Pss": "all", "Pss_Anon": "anonymous", "Pss_File": "files", "Pss_Shmem": "shared memory"}


@dataclass(frozen=True, slots=True)
class Look:
    """One sample: bytes by process and kind."""

    time_s: float  # unix time
    held: dict[str, dict[str, int]]

    @property
    def total(self) -> int:
        return sum(kinds["Pss"] for kinds in self.held.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--size", choices=list(TASKS), default="135M")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of 16 x 8 samples, at least 2 (default: 3)")
    parser.add_argument("--save", action="store_true", help="write a checkpoint after the last round")
    parser.add_argument("--directory", type=Path, help="where the run goes (default: a temporary one)")
    parser.add_argument("flags", nargs="*", help="flags handed to train.py, after --")
    options = parser.parse_args()
    if options.rounds < 2:
        sys.exit("--rounds must be at least 2: the first is not counted.")
    directory = options.directory or Path(tempfile.mkdtemp(prefix="vime-memory-"))
    directory.mkdir(parents=True, exist_ok=True)
    place = directory / "run"
    saving = ("--save", str(directory / "checkpoints")) if options.save else ()
    task = TASKS[options.size](directory, options.rounds)
    command = vime_command("vime", task, place, 1234, options.rounds, [*saving, *options.flags])
    looks, watcher, code = measure(command, place)
    report(looks, phases_of(place))
    if code != 0:
        sys.exit(f"the run ended with {code}; see {place.with_suffix('.out')}")
    ends, _ = vime_rounds(place)
    cpu_s = watcher.by_process(ends[0], ends[-1], len(ends) - 1)
    print(f"\nCPU s a round, {len(ends) - 1} rounds: {sum(cpu_s.values()):.2f}")
    print(", ".join(f"{name} {seconds:.2f}" for name, seconds in cpu_s.items() if seconds >= 0.01))


def measure(command: Sequence[str], place: Path) -> tuple[list[Look], Watcher, int]:
    """Samples of the whole run, its CPU seconds, its exit code."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    looks: list[Look] = []
    with place.with_suffix(".out").open("w") as output:
        run = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)
    watcher = Watcher(run.pid)
    try:
        while run.poll() is None:
            looks.append(look(watcher.members))
            time.sleep(INTERVAL_S)
    finally:
        watcher.stop()
    return looks, watcher, run.returncode


def look(members: dict[int, str]) -> Look:
    """`members`: names of the processes by their ids."""
    began = time.time()
    held: dict[str, dict[str, int]] = {}
    for pid, name in members.items():
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:  # has just ended
            continue
        kinds = held.setdefault(name, dict.fromkeys(KINDS, 0))
        for line in lines:
            kind, _, size = line.partition(":")
            if kind in KINDS:
                kinds[kind] += int(size.split()[0]) << 10
    return Look(began, held)


def phases_of(run_dir: Path) -> list[tuple[str, float, float]]:
    """(phase, from, until) in unix time."""
    events = [json.loads(line) for line in (run_dir / "events/driver.jsonl").read_text().splitlines()]
    spans = [
        (event["name"], event["t"] - event["duration_s"], event["t"])
        for event in events
        if event["kind"] == "span_ended" and event["name"] in PHASES
    ]
    # the initial weights are published before the first round: that belongs to its phase too
    return [(START, 0.0, min(began for _, began, _ in spans)), *spans]


def report(looks: Sequence[Look], phases: Sequence[tuple[str, float, float]]) -> None:
    in_phase: dict[str, list[Look]] = {}
    for name, began, ended in phases:
        in_phase.setdefault(name, []).extend(look for look in looks if began <= look.time_s <= ended)
    peak = max(looks, key=lambda look: look.total)
    names = sorted({name for look in looks for name in look.held}, key=lambda name: -_held(peak, name, "Pss"))
    print(f"| process, MB | {' | '.join(in_phase)} |\n|---|{'---|' * len(in_phase)}")
    for name in names:
        tops = [max((_held(look, name, "Pss") for look in found), default=0) for found in in_phase.values()]
        if max(tops) >= 5e6:
            print(f"| {name} | {' | '.join(_mb(top) for top in tops)} |")
    print(f"| all | {' | '.join(_mb(max((x.total for x in found), default=0)) for found in in_phase.values())} |")
    print(f"\nat the peak\n| process, MB | {' | '.join(KINDS.values())} |\n|---|{'---|' * len(KINDS)}")
    for name in names:
        if _held(peak, name, "Pss") >= 5e6:
            print(f"| {name} | {' | '.join(_mb(_held(peak, name, kind)) for kind in KINDS)} |")
    print(f"| all | {' | '.join(_mb(sum(_held(peak, name, kind) for name in names)) for kind in KINDS)} |")


def _held(look: Look, name: str, kind: str) -> int:
    return look.held.get(name, {}).get(kind, 0)


def _mb(size: int) -> str:
    return f"{size / 1e6:.0f}"


if __name__ == "__main__":
    main()
