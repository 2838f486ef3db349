"""What a run costs while nobody has anything to do: CPU milliseconds a second, by process and by thread.

    .venv/bin/python benchmarks/idle.py [--seconds 20] [--repeats 1] [--threads] [--checkout DIR ...] [-- any flag]

The quick start's training (its data must be there: scripts/quickstart.sh) with a reward that sleeps in its second
round, as a reward service or a tool does: everything else waits. With several checkouts they take turns; medians.
"""

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import psutil

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.start import detailed_role, quick_start_flags

ROOT = Path(__file__).resolve().parents[1]
FLAG = "VIME_IDLE_FLAG"
"""A file that the reward makes when it begins to sleep, until it is gone."""
CALM_S = 4.0
"""After the reward's first sleep: until all completions are there."""
DEADLINE_S = 400.0
Found = dict[str, float]


async def sleepy_reward(args: Any, sample: Any, **_: Any) -> float:  # noqa: ARG001 - a plug-in's signature
    """--custom-rm-path: sleeps from the second round on until the flag is gone."""
    sleepy_reward.asked += 1  # type: ignore[attr-defined]
    flag = Path(os.environ[FLAG])
    if sleepy_reward.asked == 16 * 8 + 1:  # type: ignore[attr-defined]
        flag.touch()
    while sleepy_reward.asked > 16 * 8 and flag.exists():  # type: ignore[attr-defined]
        await asyncio.sleep(2.0)
    return float(sample.response == sample.label)


sleepy_reward.asked = 0  # type: ignore[attr-defined]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=20.0, help="to look on for (default: 20)")
    parser.add_argument("--repeats", type=int, default=1, help="runs of each checkout (default: 1)")
    parser.add_argument("--threads", action="store_true", help="each thread above 0.5 ms a second too")
    parser.add_argument("--checkout", type=Path, action="append", help="a checkout to measure (default: this one)")
    parser.add_argument("--data", type=Path, default=ROOT / "data/quickstart-seed0", help="the quick start's data")
    parser.add_argument("flags", nargs="*", help="flags handed to train.py, after --")
    options = parser.parse_args()
    checkouts = [checkout.resolve() for checkout in options.checkout or [ROOT]]
    found: dict[Path, list[Found]] = defaultdict(list)
    for _ in range(options.repeats):
        for checkout in checkouts:
            found[checkout].append(measure(checkout, options))
    print(f"| CPU ms a second, idle | {' | '.join(map(str, checkouts))} |\n|---|{'---|' * len(checkouts)}")
    names = sorted({name for runs in found.values() for run in runs for name in run})
    for name in names:
        values = [[run.get(name, 0.0) for run in found[checkout]] for checkout in checkouts]
        print(f"| {name} | {' | '.join(f'{statistics.median(each):.1f}' for each in values)} |")


def measure(checkout: Path, options: argparse.Namespace) -> Found:
    """One run, looked at while it sleeps."""
    with tempfile.TemporaryDirectory(prefix="vime-idle-") as directory:
        flag, log = Path(directory) / "idle", Path(directory) / "output"
        flags = quick_start_flags(checkout, options.data.resolve())
        own_reward = flags.index("--rm-type")
        del flags[own_reward : own_reward + 2]
        command = [sys.executable, "train.py", "--run-dir", f"{directory}/run", *flags, "--num-rollout", "2"]
        command += ["--custom-rm-path", f"{Path(__file__).resolve()}:sleepy_reward", "--skip-eval-before-train"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", FLAG: str(flag)}
        environment["PYTHONPATH"] = str(checkout)
        with log.open("w") as output:
            run = subprocess.Popen(
                [*command, *options.flags], cwd=checkout, env=environment, stdout=output, stderr=subprocess.STDOUT
            )
        began = time.monotonic()
        while not flag.exists():
            if run.poll() is not None or time.monotonic() - began > DEADLINE_S:
                run.terminate()
                sys.exit(f"the run did not come to its second round\n{log.read_text()}")
            time.sleep(0.5)
        time.sleep(CALM_S)
        before, since = nanoseconds(psutil.Process(run.pid)), time.monotonic()
        time.sleep(options.seconds)
        after, elapsed_s = nanoseconds(psutil.Process(run.pid)), time.monotonic() - since
        flag.unlink()
        if run.wait(DEADLINE_S) != 0:
            sys.exit(f"the run ended with {run.returncode}\n{log.read_text()}")
    found: Found = defaultdict(float)
    for key, spent in after.items():
        process, thread, _, _ = key
        took_ms = (spent - before.get(key, 0)) / 1e6 / elapsed_s
        found[process] += took_ms
        found["all"] += took_ms
        if options.threads and took_ms > 0.5:
            found[f"{process}: {thread}"] += took_ms
    return found


def nanoseconds(root: psutil.Process) -> dict[tuple[str, str, int, int], int]:
    """On a CPU so far, by process name, thread name and their numbers."""
    found = {}
    for process in [root, *root.children(recursive=True)]:
        try:
            role = detailed_role(process)
            for task in Path(f"/proc/{process.pid}/task").iterdir():
                spent = int((task / "schedstat").read_text().split()[0])
                found[role, (task / "comm").read_text().strip(), process.pid, int(task.name)] = spent
        except (psutil.NoSuchProcess, OSError):  # it has ended meanwhile
            continue
    return found


if __name__ == "__main__":
    main()
