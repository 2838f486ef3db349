"""What a killed part costs a run of several engines, and how long it is away.

    .venv/bin/python benchmarks/fleet.py [--part engine|router|worker|queue] [--engines 4] [--kills 8]

One run of train.py in mode streaming with scripted engines and two rollout workers: a token takes the same time
whatever else runs, and an engine answers two requests at a time, so that the rate of the run is that of its engines.
Parts are killed with SIGKILL one after the other, each when all have worked for some rounds. Printed: response tokens a
second of rounds in which nothing was away, and of the others; the seconds that a kill cost, for an engine those beyond
its share while it was away; the recovery table (seconds from SIGKILL until the loss was noticed, the part responded, it
served; a worker is lost when others have its prompts); restarts of the run; and what the audit says.
"""

import argparse
import json
import os
import signal
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

from vime.backends.vllm_utils.scripted_server import AT_ONCE, LOADS_FIRST, PACE

ROOT = Path(__file__).resolve().parents[1]
SCRIPTED = "vime.backends.vllm_utils.scripted_server"
START_S, BACK_S, END_S = 240.0, 120.0, 120.0
QUIET_ROUNDS = 3
WORKERS = 2
STEPS = {
    "engine": ("engine_lost", "engine_ready", "engine_readmitted"),
    "router": ("router_lost", "router_ready"),
    "worker": ("worker_lost",),
    "queue": ("queue_lost", "queue_ready"),
}
"""Of each part: the events of a recovery, in this order."""
REWARD = "def reward(args, sample, **kwargs):\n    return float(len(set(sample.tokens)) % 3)\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--part", choices=STEPS, default="engine")
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--kills", type=int, default=8)
    parser.add_argument("--tokens-per-second", type=float, default=20.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory)
        run = start(out, options.engines, options.tokens_per_second)
        try:
            kills = list(kill_parts(run, out / "run", options))
        finally:
            run.send_signal(signal.SIGINT)
            run.wait(END_S)
        report(out / "run", kills, options)
        audit = [sys.executable, "-m", "vime", "audit", str(out / "run")]
        print(subprocess.run(audit, cwd=ROOT, check=False, capture_output=True, text=True).stdout.strip())


def start(out: Path, engines: int, pace: float) -> subprocess.Popen[bytes]:
    import runpy

    quickstart = runpy.run_path(str(ROOT / "examples" / "quickstart" / "warm_start.py"))
    quickstart["build_model"](0).save_pretrained(out / "model")
    quickstart["build_tokenizer"]().save_pretrained(out / "model")
    runpy.run_path(str(ROOT / "examples" / "quickstart" / "prepare.py"))["write_data"](
        out, num_train=64, num_eval=8, seed=0
    )
    (out / "reward.py").write_text(REWARD)
    flags = [
        *("--hf-checkpoint", str(out / "model"), "--prompt-data", str(out / "train.jsonl"), "--input-key", "input"),
        *("--label-key", "label", "--custom-rm-path", f"{out / 'reward.py'}:reward", "--device", "cpu"),
        *("--rollout-batch-size", str(2 * engines), "--n-samples-per-prompt", "4", "--rollout-max-response-len", "40"),
        *("--rollout-max-context-len", "64", "--micro-batch-size", "32", "--lr", "1e-4", "--num-rollout", "4000"),
        *("--transferqueue-mode", "streaming", "--rollout-num-engines", str(engines)),
        *("--vllm-server-concurrency", "4", "--debug-engine-module", SCRIPTED, "--on-train-rollout-diff", "ignore"),
        *("--engine-health-interval-secs", "1", "--run-dir", str(out / "run"), "--num-rollout-workers", str(WORKERS)),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", PACE: str(pace), AT_ONCE: "2", LOADS_FIRST: "1"}
    return subprocess.Popen(
        [sys.executable, "train.py", *flags],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=(out / "out").open("wb"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def kill_parts(run: subprocess.Popen[bytes], path: Path, options: argparse.Namespace) -> Iterator[float]:
    """Kill one part after the other; yields the unix time of each kill, when the run is quiet again."""
    last = STEPS[options.part][-1]
    wait_for(run, lambda: len(events(path, "round_trained")) >= QUIET_ROUNDS, START_S)
    for number in range(options.kills):
        process = find_part(run.pid, options.part, number % options.engines)
        at = time.time()
        process.kill()
        wait_for(run, lambda: len(events(path, last)) > number, BACK_S)  # noqa: B023 - called at once
        trained = len(events(path, "round_trained"))
        wait_for(run, lambda: len(events(path, "round_trained")) >= trained + QUIET_ROUNDS, BACK_S)  # noqa: B023
        yield at


def find_part(driver: int, part: str, index: int) -> psutil.Process:
    """Return a process below the run's driver: the scripted engine of this number, which has a seed of its own, the
    router, a rollout worker, the oldest, so that they take turns, or of the queue a storage unit and the controller in
    turns."""
    of_queue = ("ray::SimpleStorageUnit", "ray::TransferQueueController")[index % 2]
    found = []
    for process in psutil.Process(driver).children(recursive=True):
        try:
            words = process.cmdline()
        except psutil.Error:
            continue
        title = " ".join(words)
        is_engine = words[1:3] == ["-m", SCRIPTED] and words[words.index("--seed") + 1] == str(42 + index)
        named = {
            "engine": is_engine,
            "router": "vllm::router" in title,
            "worker": "ray::RolloutWorkerActor" in title,
            "queue": of_queue in title,
        }
        if named[part]:
            found.append(process)
    if not found:
        raise RuntimeError(f"no process of {part} {index}")
    return min(found, key=lambda process: process.create_time())


def wait_for(run: subprocess.Popen[bytes], is_so: object, deadline_s: float) -> None:
    ends = time.monotonic() + deadline_s
    while not is_so():  # type: ignore[operator]
        if run.poll() is not None or time.monotonic() > ends:
            raise RuntimeError(f"the run ended with {run.poll()}, or nothing happened for {deadline_s:g} s")
        time.sleep(0.1)


def events(path: Path, kind: str) -> list[dict[str, object]]:
    """Those of this kind, as far as they are whole, in the order of time: workers are watched by the manager, all else
    by the driver."""
    found = []
    for file in (path / "events").glob("*.jsonl"):
        lines = file.read_text().splitlines(keepends=True)
        found += [json.loads(line) for line in lines if line.endswith("\n") and f'"{kind}"' in line]
    return sorted((event for event in found if event["kind"] == kind), key=lambda event: event["t"])


def report(path: Path, kills: list[float], options: argparse.Namespace) -> None:
    steps = {kind: [float(str(event["t"])) for event in events(path, kind)] for kind in STEPS[options.part]}
    away = list(zip(kills, steps[STEPS[options.part][-1]], strict=True))
    ends = [float(str(event["t"])) for event in events(path, "round_trained")]
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    tokens_of = {line["step"]: line["metrics"]["rollout/num_tokens"] for line in lines if "metrics" in line}
    quiet, others = [], []  # tokens and seconds of a round
    for number in range(1, len(ends)):
        began, ended = ends[number - 1], ends[number]
        is_quiet = all(ended < lost or began > back for lost, back in away)
        (quiet if is_quiet else others).append((tokens_of[number], ended - began))
    for name, found in (("nothing away", quiet), (f"a {options.part} away", others)):
        rates = [tokens / seconds for tokens, seconds in found]
        print(f"{name}: {len(found)} rounds, median {statistics.median(rates):.1f} tokens/s")
    full = sum(tokens for tokens, _ in quiet) / sum(seconds for _, seconds in quiet)
    tokens, seconds = (sum(part) for part in zip(*others, strict=True))
    share = sum(back - lost for lost, back in away) / options.engines if options.part == "engine" else 0.0
    print(f"a kill cost {(seconds - tokens / full - share) / len(kills):.2f} s" + " beyond its share" * bool(share))
    print(f"{'seconds from SIGKILL to':>24} {'median':>7} {'p95':>7} {'max':>7}")
    for kind, times in steps.items():
        took = sorted(at - lost for at, (lost, _) in zip(times, away, strict=True))
        p95 = took[round(0.95 * (len(took) - 1))]
        print(f"{kind:>24} {statistics.median(took):>7.2f} {p95:>7.2f} {took[-1]:>7.2f}")
    print(f"{len(kills)} kills, {len(events(path, 'run_restarted'))} restarts of the run")


if __name__ == "__main__":
    main()
