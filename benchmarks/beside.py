"""How much longer a round takes beside other work: the quick start's training, now alone and now beside busy loops.

    .venv/bin/python benchmarks/beside.py [--rounds 48] [--loops 2] [--run-dir DIR] [-- any train.py flag]

One run; every TURN rounds the loops (plain Python, niceness 0, each in a session of its own) begin or end. The first
two rounds of a turn are left out: the change falls into them. Wall seconds; medians, and pairs of turns that follow
each other. The data of scripts/quickstart.sh are made if they are missing.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TURN = 6
LEFT_OUT = 2
DEADLINE_S = 1500.0
LOOP = "while True: pass"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=48, help="of 16 x 8 samples (default: 48)")
    parser.add_argument("--loops", type=int, default=2, help="busy loops beside it (default: 2)")
    parser.add_argument("--run-dir", type=Path, help="where the run goes (default: a temporary directory)")
    parser.add_argument("flags", nargs="*", help="flags handed to train.py, after --")
    options = parser.parse_args()
    run_dir = options.run_dir or Path(tempfile.mkdtemp(prefix="vime-beside-")) / "run"
    turns = measure(run_dir, options.rounds, options.loops, options.flags)
    report(turns, options.loops)


def measure(run_dir: Path, rounds: int, loops: int, flags: list[str]) -> list[list[float]]:
    """Seconds of the rounds that count, by turn; turns 0, 2, 4... are alone."""
    command = ["bash", str(ROOT / "scripts/quickstart.sh"), "--run-dir", str(run_dir), "--num-rollout", str(rounds)]
    command += ["--eval-interval", str(rounds + 1), "--skip-eval-before-train", *flags]
    ends = time.monotonic() + DEADLINE_S
    busy: list[subprocess.Popen[bytes]] = []
    with subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL) as run:
        try:
            while run.poll() is None:
                if time.monotonic() > ends:
                    run.terminate()
                    sys.exit(f"no end after {DEADLINE_S:g} s; look into {run_dir}/logs")
                wants_loops = (len(step_times(run_dir)) // TURN) % 2 == 1
                if wants_loops and not busy:
                    busy = [
                        subprocess.Popen([sys.executable, "-c", LOOP], start_new_session=True) for _ in range(loops)
                    ]
                elif not wants_loops:
                    end(busy)
                time.sleep(0.1)
        finally:
            end(busy)
    if run.returncode != 0:
        sys.exit(f"the run ended with {run.returncode}; look into {run_dir}/logs")
    seconds = step_times(run_dir)
    starts = range(0, len(seconds) - TURN + 1, TURN)
    return [seconds[start + LEFT_OUT : start + TURN] for start in starts]


def end(busy: list[subprocess.Popen[bytes]]) -> None:
    while busy:
        loop = busy.pop()
        loop.kill()
        loop.wait()


def step_times(run_dir: Path) -> list[float]:
    file = run_dir / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    metrics = [json.loads(line)["metrics"] for line in lines if line.endswith("}}")]
    return [each["perf/step_time"] for each in metrics if "perf/step_time" in each]


def report(turns: list[list[float]], loops: int) -> None:
    alone = [second for turn in turns[0::2] for second in turn]
    beside = [second for turn in turns[1::2] for second in turn]
    pairs = [
        statistics.median(second) / statistics.median(first)
        for first, second in zip(turns[0::2], turns[1::2], strict=False)
    ]
    print("| side | rounds | s a round, median | mean |\n|---|---|---|---|")
    for name, seconds in (("alone", alone), (f"beside {loops} busy loops", beside)):
        print(f"| {name} | {len(seconds)} | {statistics.median(seconds):.3f} | {statistics.mean(seconds):.3f} |")
    print(
        f"\nmedians {statistics.median(beside) / statistics.median(alone):.2f} times; pairs of turns "
        + ", ".join(f"{pair:.2f}" for pair in pairs)
    )


if __name__ == "__main__":
    main()
