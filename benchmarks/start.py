"""What a start costs: wall seconds until the end of the first round, and CPU seconds by process until then.

    .venv/bin/python benchmarks/start.py [--repeats 3] [--checkout DIR ...] [-- any train.py flag]

Runs the training of scripts/quickstart.sh (its data must be there) for one round. With several checkouts they take
turns, so that a machine whose speed drifts slows all of them alike; medians.
"""

import argparse
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.spine import role

ROOT = Path(__file__).resolve().parents[1]
SAMPLE_INTERVAL_S = 0.5
DEADLINE_S = 300.0
Start = tuple[dict[str, float], dict[str, float]]
"""Seconds until each mark on the way, CPU seconds by process until the last."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=3, help="starts of each checkout (default: 3)")
    parser.add_argument("--checkout", type=Path, action="append", help="a checkout to measure (default: this one)")
    parser.add_argument("--data", type=Path, default=ROOT / "data/quickstart-seed0", help="the quick start's data")
    parser.add_argument("flags", nargs="*", help="flags handed to train.py, after --")
    options = parser.parse_args()
    checkouts = options.checkout or [ROOT]
    found: dict[Path, list[Start]] = {checkout: [] for checkout in checkouts}
    for number in range(options.repeats):
        for checkout in checkouts:
            found[checkout].append(measure(checkout.resolve(), options.data.resolve(), options.flags))
            wall_s, cpu_s = found[checkout][-1]
            print(
                f"{checkout}, start {number + 1}: {wall_s['first round']:.1f} s, {sum(cpu_s.values()):.1f} CPU s, "
                f"load {os.getloadavg()[0]:.1f}",
                file=sys.stderr,
            )
    report("wall s until", {str(checkout): [wall_s for wall_s, _ in starts] for checkout, starts in found.items()})
    used = {
        str(checkout): [{**cpu_s, "all": sum(cpu_s.values())} for _, cpu_s in starts]
        for checkout, starts in found.items()
    }
    report("CPU s of", used)


def measure(checkout: Path, data: Path, flags: list[str]) -> Start:
    """One start, until the first round is trained; the run then ends by itself."""
    with tempfile.TemporaryDirectory(prefix="vime-start-") as directory:
        run_dir = Path(directory) / "run"
        command = [sys.executable, "train.py", "--run-dir", str(run_dir), *quick_start_flags(checkout, data), *flags]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        environment["PYTHONPATH"] = str(checkout)
        log = Path(directory) / "output"
        began, wall_began = time.monotonic(), time.time()
        with log.open("w") as output:
            run = subprocess.Popen(command, cwd=checkout, env=environment, stdout=output, stderr=subprocess.STDOUT)
        root = psutil.Process(run.pid)
        cpu_s: dict[int, tuple[str, float]] = {}  # by process: a worker of Ray gets its name only when it has work
        while run.poll() is None and "first round" not in marks(run_dir, wall_began):
            for process in [root, *root.children(recursive=True)]:
                with_times(process, cpu_s)
            if time.monotonic() - began > DEADLINE_S:
                run.terminate()
            time.sleep(SAMPLE_INTERVAL_S)
        code = run.wait()
        if code != 0:
            sys.exit(f"the run ended with {code}\n{log.read_text()}")
        by_name: dict[str, float] = {}
        for name, seconds in cpu_s.values():
            by_name[name] = by_name.get(name, 0.0) + seconds
        return marks(run_dir, wall_began), by_name


def quick_start_flags(checkout: Path, data: Path) -> list[str]:
    """The flags of scripts/quickstart.sh, without its run directory."""
    script = (checkout / "scripts/quickstart.sh").read_text()
    values = {"$MODEL": str(checkout / "examples/quickstart/model"), "$DATA": str(data), "$SEED": "0"}
    values["$((1234 + SEED))"] = "1234"
    text = " ".join(re.findall(r"^[A-Z]+_ARGS=\((.*?)\)$", script, re.MULTILINE | re.DOTALL))
    for name, value in values.items():
        text = text.replace(name, value)
    return [*shlex.split(text), "--num-rollout", "1"]


def with_times(process: psutil.Process, cpu_s: dict[int, tuple[str, float]]) -> None:
    try:
        times = process.cpu_times()
        cpu_s[process.pid] = detailed_role(process), times.user + times.system
    except psutil.NoSuchProcess:
        return


def detailed_role(process: psutil.Process) -> str:
    """As `role`, with Ray's helpers apart."""
    name = role(process)
    if name != "Ray helpers and shells":
        return name
    words = [Path(word).name for word in process.cmdline() if word.endswith((".py", "::IDLE", "python"))]
    return f"Ray: {words[-1] if words else process.name()}"


def marks(run_dir: Path, began: float) -> dict[str, float]:
    """Seconds from the command to each event of the driver's on the way to the first trained round."""
    path = run_dir / "events/driver.jsonl"
    found: dict[str, float] = {}
    for line in path.read_text().splitlines() if path.is_file() else ():
        try:
            event = json.loads(line)
        except json.JSONDecodeError:  # being written
            break
        if event["kind"] == "run_started":
            found["before anything starts"] = event["t"] - began
        elif event["kind"] == "part_started":
            found[event["part"]] = event["t"] - began
        elif event["kind"] == "round_trained":
            found["first round"] = event["t"] - began
            break
    return found


def report(title: str, starts: dict[str, list[dict[str, float]]]) -> None:
    """A column for each checkout: the median, and all values when there are more."""
    names = list(dict.fromkeys(name for values in starts.values() for one in values for name in one))
    print(f"\n| {title} | {' | '.join(starts)} |\n|---|{'---|' * len(starts)}")
    for name in names:
        cells = []
        for values in starts.values():
            seconds = [one.get(name, 0.0) for one in values]
            cells.append(f"{statistics.median(seconds):.1f} ({', '.join(f'{s:.1f}' for s in seconds)})")
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
