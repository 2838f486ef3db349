"""How long the prompts of a killed rollout worker wait: seconds from SIGKILL to what follows.

    .venv/bin/python benchmarks/worker_death.py [--kills 10] [--workers 2] [--reward-s 1.0]

One run of train.py with scripted engines and a reward that takes --reward-s, so that prompts are under way.
Every few seconds a worker that the ledger says is at work is killed. Printed for each kill: prompts it was at, seconds
until its death was noticed and they were given back (event `worker_lost`), until the first and the last of them was
begun by another worker (span `generate_group` in the other's events), and whether the run went on without a restart.
The clock is the machine's monotonic one, which all processes share.
"""

import argparse
import json
import os
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from vime.handoff.ledger_types import LEDGER_NAME
from vime.handoff.queue_view import read_overview

ROOT = Path(__file__).resolve().parents[1]
START_S, BETWEEN_S, TAKEN_S, END_S = 180.0, 6.0, 60.0, 120.0
REWARD = """import asyncio

async def reward(args, sample, **kwargs):
    await asyncio.sleep({seconds})
    return float(len(set(sample.tokens)) % 3)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--reward-s", type=float, default=1.0, help="seconds that each reward takes")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory)
        (out / "slow.py").write_text(REWARD.format(seconds=options.reward_s))
        run = start(out, options.workers)
        try:
            lines = list(kills(run, out / "run", options.kills))
        finally:
            run.send_signal(signal.SIGINT)
            run.wait(END_S)
    print(f"{'kill':>4} {'prompts':>8} {'given back s':>13} {'first begun s':>14} {'last begun s':>13}")
    for number, (prompts, back, first, last) in enumerate(lines):
        print(f"{number:>4} {prompts:>8} {back:>13.2f} {first:>14.2f} {last:>13.2f}")
    for name, column in (("given back", 1), ("first begun", 2), ("last begun", 3)):
        values = [line[column] for line in lines]
        print(f"{name}: median {statistics.median(values):.2f} s, largest {max(values):.2f} s")


def start(out: Path, workers: int) -> "subprocess.Popen[bytes]":
    data = out / "data"
    subprocess.run(
        [sys.executable, "examples/quickstart/prepare.py", "--data-dir", data, "--num-train", "64", "--num-eval", "8"],
        cwd=ROOT,
        check=True,
    )
    flags = [
        "--device", "cpu", "--input-key", "input", "--label-key", "label", "--rollout-batch-size", "4",
        "--n-samples-per-prompt", "4", "--transferqueue-mode", "streaming",
        "--hf-checkpoint", "examples/quickstart/model", "--custom-rm-path", f"{out}/slow.py:reward",
        "--debug-engine-module", "vime.backends.vllm_utils.scripted_server", "--lr", "1e-3",
        "--rollout-max-response-len", "12", "--rollout-max-context-len", "64", "--micro-batch-size", "8",
        "--num-rollout", "100000", "--num-rollout-workers", workers, "--prompt-data", f"{data}/train.jsonl",
        "--run-dir", out / "run",
    ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    log = (out / "log").open("wb")
    return subprocess.Popen(
        [sys.executable, "train.py", *map(str, flags)], cwd=ROOT, stdout=log, stderr=log, env=environment
    )


def kills(run: "subprocess.Popen[bytes]", directory: Path, count: int) -> Iterator[tuple[int, float, float, float]]:
    wait_for(lambda: any(events(directory, "driver", "round_trained")), START_S, "the first trained round")
    for number in range(count):
        time.sleep(BETWEEN_S)
        victim = None
        while victim is None:
            victim = at_work(run, directory)
        sequence = newest(directory)
        killed = time.monotonic()
        victim[1].kill()
        wait_for(lambda n=number: len(list(lost(directory))) > n, TAKEN_S, "worker_lost")
        event = list(lost(directory))[number]
        groups = given_back(directory, sequence, event["worker"])
        begun: dict[int, float] = {}

        def all_begun(begun=begun, groups=groups, killed=killed) -> bool:
            begun.update(begins(directory, groups, killed))
            return groups <= begun.keys()

        if groups:
            wait_for(all_begun, TAKEN_S, f"groups {sorted(groups)} to be begun by another worker")
            yield len(groups), event["mono"] - killed, min(begun.values()), max(begun.values())
    assert not list(events(directory, "driver", "run_restarted")), "the run was started again"


def at_work(run: "subprocess.Popen[bytes]", directory: Path) -> tuple[str, psutil.Process] | None:
    """A worker that has prompts under way, and its process by the log that it writes."""
    names = sorted(read_overview(directory).in_flight)
    for name in names:
        log = str(directory / "logs" / f"{name.partition('.')[0]}.log")
        for process in psutil.Process(run.pid).children(recursive=True):
            try:
                if "RolloutWorkerActor" in " ".join(process.cmdline()) and log in {
                    f.path for f in process.open_files()
                }:
                    return name, process
            except psutil.Error:
                continue
    return None


def events(directory: Path, process: str, kind: str) -> Iterator[dict[str, object]]:
    path = directory / "events" / f"{process}.jsonl"
    if path.exists():
        for line in path.read_text().splitlines():
            if f'"{kind}"' in line:
                yield json.loads(line)


def lost(directory: Path) -> Iterator[dict[str, object]]:
    return events(directory, "rollout-manager", "worker_lost")


def begins(directory: Path, groups: set[int], killed: float) -> dict[int, float]:
    """Seconds after the kill at which each group was begun again."""
    found: dict[int, float] = {}
    for path in (directory / "events").glob("rollout-worker-*.jsonl"):
        for event in events(directory, path.stem, "generate_group"):
            if event["kind"] == "span_started" and event["mono"] > killed and event["group"] in groups:
                found[event["group"]] = min(found.get(event["group"], float("inf")), event["mono"] - killed)
    return found


def newest(directory: Path) -> int:
    with sqlite3.connect(f"file:{directory / LEDGER_NAME}?mode=ro", uri=True) as connection:
        return int(connection.execute("select max(sequence) from history").fetchone()[0])


def given_back(directory: Path, sequence: int, worker: str) -> set[int]:
    with sqlite3.connect(f"file:{directory / LEDGER_NAME}?mode=ro", uri=True) as connection:
        rows = connection.execute(
            "select grp from history where sequence > ? and event = 'retry' and note like ?", (sequence, f"%{worker}%")
        ).fetchall()
    return {int(group) for (group,) in rows}


def wait_for(is_so, deadline_s: float, name: str) -> None:
    ends = time.monotonic() + deadline_s
    while not is_so():
        if time.monotonic() > ends:
            raise TimeoutError(f"{name}: not within {deadline_s:g} s")
        time.sleep(0.05)


if __name__ == "__main__":
    main()
