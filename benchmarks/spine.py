"""Where the time and the memory of a run go: start-up by part, seconds by phase of a round, memory of each process.

    .venv/bin/python benchmarks/spine.py [--rounds 30] [--run-dir DIR] [-- any train.py flag]

Runs the quick start's training once as a process of its own (its model and data must be there: scripts/quickstart.sh),
samples the resident memory of its process tree, and reads the rest from the run's own events and metrics. Wall seconds.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
PHASES = (
    ("generate + reward + put (driver's wait)", "perf/wait_time"),
    ("train (fetch, forward, backward, optimizer)", "perf/train_time"),
    ("move weights (pause to confirmed)", "perf/update_weights_time"),
    ("of it: engines paused", "perf/pause_time"),
    ("round", "perf/step_time"),
)
SAMPLE_INTERVAL_S = 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=30, help="rounds of 16 x 8 samples (default: 30)")
    parser.add_argument("--run-dir", type=Path, help="where the run goes (default: a temporary directory)")
    parser.add_argument("flags", nargs="*", help="flags handed to train.py, after --")
    options = parser.parse_args()
    run_dir = options.run_dir or Path(tempfile.mkdtemp(prefix="vime-spine-")) / "run"
    wall_s, peaks, cpu_s = measure(run_dir, options.rounds, options.flags)
    report(run_dir, wall_s, peaks, cpu_s)


def measure(run_dir: Path, rounds: int, flags: list[str]) -> tuple[float, dict[str, int], dict[str, float]]:
    """Run it. Returns wall seconds, peak resident bytes by process, CPU seconds by process."""
    command = ["bash", str(ROOT / "scripts/quickstart.sh"), "--num-rollout", str(rounds), "--run-dir", str(run_dir)]
    started = time.monotonic()
    peaks: dict[str, int] = {}
    cpu_s: dict[int, tuple[str, float]] = {}  # by process: a worker of Ray gets its name only when it has work
    with subprocess.Popen(
        [*command, *flags], env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL
    ) as run:
        root = psutil.Process(run.pid)
        while run.poll() is None:
            for process in [root, *root.children(recursive=True)]:
                sample(process, peaks, cpu_s)
            time.sleep(SAMPLE_INTERVAL_S)
        if run.returncode != 0:
            sys.exit(f"the run ended with {run.returncode}; look into {run_dir}/logs")
    by_name: dict[str, float] = {}
    for name, seconds in cpu_s.values():
        by_name[name] = by_name.get(name, 0.0) + seconds
    return time.monotonic() - started, peaks, by_name


def sample(process: psutil.Process, peaks: dict[str, int], cpu_s: dict[int, tuple[str, float]]) -> None:
    try:
        name = role(process)
        times = process.cpu_times()
        peaks[name] = max(peaks.get(name, 0), process.memory_info().rss)
        cpu_s[process.pid] = name, times.user + times.system
    except psutil.NoSuchProcess:
        return


def role(process: psutil.Process) -> str:
    """A readable name for a process of the run."""
    words = process.cmdline()
    line = " ".join(words)
    actor = re.match(r"ray::(\w+)", line)
    if actor:
        return f"Ray actor {actor[1]}"
    for mark, name in (
        ("train.py", "driver"),
        ("guard.py", "guard of a server"),
        ("cpu_server", "vLLM API server"),
        ("VLLM::", "vLLM engine core"),
        ("vllm_router", "vllm-router"),
        ("vllm::router", "vllm-router"),
        ("vime.ray.template", "template of Ray's workers"),
        ("raylet/raylet", "raylet"),
        ("gcs_server", "Ray GCS"),
        ("prepare.py", "prepare.py"),
        ("multiprocessing", "vLLM engine core"),
    ):
        if mark in line or mark in process.name():
            return name
    return "Ray helpers and shells"


def report(run_dir: Path, wall_s: float, peaks: dict[str, int], cpu_s: dict[str, float]) -> None:
    print(f"whole process: {wall_s:.1f} s wall, {sum(cpu_s.values()):.1f} CPU s\n")
    print("| start-up: the driver waited for | s |\n|---|---|")
    for line in (run_dir / "events/driver.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["kind"] == "part_started":
            print(f"| {event['part']} | {event['waited_s']:.1f} |")
    rounds = [json.loads(line)["metrics"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    print("\n| phase of a round | median s | max s |\n|---|---|---|")
    for text, name in PHASES:
        values = [metrics[name] for metrics in rounds if name in metrics]
        if values:
            print(f"| {text} | {statistics.median(values):.3f} | {max(values):.3f} |")
    print("\n| process | peak MB | CPU s |\n|---|---|---|")
    for name, peak in sorted(peaks.items(), key=lambda item: -item[1]):
        print(f"| {name} | {peak / 2**20:.0f} | {cpu_s.get(name, 0.0):.1f} |")


if __name__ == "__main__":
    main()
