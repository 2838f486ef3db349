"""What a killed engine costs a run of several, and how long it is away.

    .venv/bin/python benchmarks/fleet.py [--engines 4] [--kills 8] [--tokens-per-second 20]

One run of train.py in mode streaming with scripted engines: a token takes the same time whatever else runs, and an
engine answers two requests at a time, so that the rate of the run is that of its engines. Engines are killed with
SIGKILL one after the other, each when all have served for some rounds. Printed: response tokens a second of rounds with
all engines (before, between and after the kills) and of rounds in which one was away; what a kill cost beyond the share
of its engine while that was away; the recovery table (seconds from SIGKILL until the loss was noticed, the engine
responded, it served); restarts of the run; and what the audit says.
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
from collections import defaultdict
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
REWARD = "def reward(args, sample, **kwargs):\n    return float(len(set(sample.tokens)) % 3)\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--kills", type=int, default=8)
    parser.add_argument("--tokens-per-second", type=float, default=20.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory)
        run = start(out, options.engines, options.tokens_per_second)
        try:
            kills = list(kill_engines(run, out / "run", options.kills, options.engines))
        finally:
            run.send_signal(signal.SIGINT)
            run.wait(END_S)
        report(out / "run", kills, options.engines)
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
        *("--engine-health-interval-secs", "1", "--run-dir", str(out / "run")),
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


def kill_engines(run: subprocess.Popen[bytes], path: Path, kills: int, engines: int) -> Iterator[float]:
    """Kill one engine after the other; yields the unix time of each kill, when the run is quiet again."""
    wait_for(run, lambda: len(events(path, "round_trained")) >= QUIET_ROUNDS, START_S)
    for number in range(kills):
        process = engine_of(run.pid, number % engines)
        at = time.time()
        process.kill()
        wait_for(run, lambda: len(events(path, "engine_readmitted")) > number, BACK_S)  # noqa: B023 - called at once
        trained = len(events(path, "round_trained"))
        wait_for(run, lambda: len(events(path, "round_trained")) >= trained + QUIET_ROUNDS, BACK_S)  # noqa: B023
        yield at


def engine_of(driver: int, index: int) -> psutil.Process:
    """The scripted engine of this number below the run's driver: each has a seed of its own."""
    for process in psutil.Process(driver).children(recursive=True):
        try:
            words = process.cmdline()
        except psutil.Error:
            continue
        if words[1:3] == ["-m", SCRIPTED] and words[words.index("--seed") + 1] == str(42 + index):
            return process
    raise RuntimeError(f"no scripted engine {index}")


def wait_for(run: subprocess.Popen[bytes], is_so: object, deadline_s: float) -> None:
    ends = time.monotonic() + deadline_s
    while not is_so():  # type: ignore[operator]
        if run.poll() is not None or time.monotonic() > ends:
            raise RuntimeError(f"the run ended with {run.poll()}, or nothing happened for {deadline_s:g} s")
        time.sleep(0.1)


def events(path: Path, kind: str) -> list[dict[str, object]]:
    file = path / "events" / "driver.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("\n") and f'"{kind}"' in line]
    return [event for event in found if event["kind"] == kind]


def report(path: Path, kills: list[float], engines: int) -> None:
    lost, ready, back = (events(path, f"engine_{kind}") for kind in ("lost", "ready", "readmitted"))
    rounds = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    by_kind: dict[str, list[tuple[float, float]]] = defaultdict(list)  # tokens and seconds of rounds
    for line in [line for line in rounds if "engines/serving" in line][
        1:
    ]:  # not a mark, nor a round that was cut short
        is_whole = line["engines/serving"] == engines and not line["engines/lost"] and not line["engines/readmitted"]
        kind = "all engines" if is_whole else "one away"
        by_kind[kind].append((line["rollout/num_tokens"], line["perf/step_time"]))
    for kind, found in by_kind.items():
        rates = [tokens / seconds for tokens, seconds in found]
        print(f"{kind}: {len(found)} rounds, median {statistics.median(rates):.1f} tokens/s")
    full = sum(tokens for tokens, _ in by_kind["all engines"]) / sum(seconds for _, seconds in by_kind["all engines"])
    tokens, seconds = (sum(part) for part in zip(*by_kind["one away"], strict=True))
    share = sum(float(str(event["t"])) - at for event, at in zip(back, kills, strict=False)) / engines
    print(f"a kill cost {(seconds - tokens / full - share) / len(kills):.2f} s beyond its engine's share")
    print(f"{'':>10} {'median':>7} {'p95':>7} {'max':>7}   seconds from SIGKILL")
    for name, of in (("noticed", lost), ("responds", ready), ("serves", back)):
        seconds = sorted(float(str(event["t"])) - at for event, at in zip(of, kills, strict=False))
        p95 = seconds[min(len(seconds) - 1, round(0.95 * (len(seconds) - 1)))]
        print(f"{name:>10} {statistics.median(seconds):>7.2f} {p95:>7.2f} {seconds[-1]:>7.2f}")
    print(f"{len(kills)} kills, {len(lost)} losses, {len(events(path, 'run_restarted'))} restarts of the run")


if __name__ == "__main__":
    main()
