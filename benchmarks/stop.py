"""How long Ctrl-C takes while a run starts: seconds from SIGINT to the end of train.py, at moments of the start.

    .venv/bin/python benchmarks/stop.py [--repeats 1] [--moment NAME ...] [-- any train.py flag]

Starts the training of scripts/quickstart.sh (its data must be there) anew for each moment and sends SIGINT to its
process group, as a terminal does. Says also the exit code, what was left running, and the last lines.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import psutil

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.start import quick_start_flags

ROOT = Path(__file__).resolve().parents[1]
DEADLINE_S = 300.0
MARK = "VIME_STOP_MARK"
MOMENTS: dict[str, tuple[str, float]] = {
    "imports": ("", 0.4),
    "Ray's start": ("starting Ray", 0.7),
    "the RolloutManager's start": ("reading prompts and plug-ins", 0.5),
    "engine start": ("starting 1 vLLM engine", 3.0),
    "trainer start": ("building the model", 0.0),
    "first weights": ("bringing the weights", 0.0),
    "evaluation before round 0": ("evaluation before round 0", 0.0),
}
"""The line of output that it begins with, and seconds behind it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """What one Ctrl-C led to. `at_s`: of the run's age when the signal came."""

    at_s: float
    seconds: float
    cpu_s: float  # of train.py and of what it waited for, from the signal on
    code: int
    left: list[str]
    said: list[str]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=1, help="stops at each moment (default: 1)")
    parser.add_argument("--moment", action="append", choices=MOMENTS, help="only this one; may be given several times")
    parser.add_argument("--data", type=Path, default=ROOT / "data/quickstart-seed0", help="the quick start's data")
    parser.add_argument("flags", nargs="*", help="flags handed to train.py, after --")
    options = parser.parse_args()
    titles = ("moment", "at s", "seconds to the end", "CPU s", "exit", "left after 5 s", "load", "said")
    print(f"| {' | '.join(titles)} |\n|{'---|' * len(titles)}")
    for name in options.moment or MOMENTS:
        for _ in range(options.repeats):
            stop = stop_at(*MOMENTS[name], [*quick_start_flags(ROOT, options.data.resolve()), *options.flags])
            left = ", ".join(stop.left) or "nothing"
            cells = [name, f"{stop.at_s:.1f}", f"{stop.seconds:.1f}", f"{stop.cpu_s:.1f}", str(stop.code), left]
            print(f"| {' | '.join(cells)} | {os.getloadavg()[0]:.1f} | {' / '.join(stop.said)} |", flush=True)


def stop_at(line: str, delay_s: float, flags: list[str]) -> Stop:
    """Start, wait for the line and the delay behind it, interrupt, wait for the end."""
    mark = uuid.uuid4().hex
    with tempfile.TemporaryDirectory(prefix="vime-stop-", ignore_cleanup_errors=True) as directory:
        log = Path(directory) / "output"
        environment = {**os.environ, MARK: mark, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        began = time.monotonic()
        with log.open("w") as output:
            run = subprocess.Popen(
                [sys.executable, "train.py", "--run-dir", f"{directory}/run", *flags],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        while line not in log.read_text() and run.poll() is None and time.monotonic() - began < DEADLINE_S:
            time.sleep(0.02)
        time.sleep(delay_s)
        before, sent, used_s = len(log.read_text()), time.monotonic(), sum(psutil.Process(run.pid).cpu_times()[:4])
        os.killpg(run.pid, signal.SIGINT)
        _, status, used = os.wait4(run.pid, 0)
        code, ended = os.waitstatus_to_exitcode(status), time.monotonic()
        time.sleep(5.0)  # what Ray's servers take that end by themselves
        return Stop(
            at_s=sent - began,
            seconds=ended - sent,
            cpu_s=used.ru_utime + used.ru_stime - used_s,
            code=code,
            left=members(mark),
            said=[text.replace(directory, "DIR") for text in log.read_text()[before:].strip().splitlines()[-6:]],
        )


def members(mark: str) -> list[str]:
    """Processes with the mark in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark:
                found.append(" ".join(process.cmdline())[:60] or process.name())
        except psutil.Error:
            continue
    return found


if __name__ == "__main__":
    main()
