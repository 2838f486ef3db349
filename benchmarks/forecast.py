"""How far `vime plan --like` is from runs that it has not seen.

    .venv/bin/python benchmarks/forecast.py [--out DIR] [--only NAME ...]

Two runs give the unit costs. Ten others, of other modes, sizes, bounds of staleness and numbers of engines, are
forecast from them and run: real trainers and rollout workers on the model of the quick start, scripted engines of 100
tokens/s a completion. About 12 minutes, with nothing else on the machine. Runs that are in --out already do not run
again. Exit code 1 when tokens/s are more than 15 % off, or staleness more than .3 versions.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from runs import ROOT, Side, run

from vime.cli.plan import read_flags
from vime.observability.forecast import forecast
from vime.observability.metrics import METRICS_FILE, read_metrics
from vime.observability.unit_costs import measure

LARGEST_ERROR, LARGEST_STALENESS_ERROR = 0.15, 0.3
COMMON = (
    "--hf-checkpoint examples/quickstart/model --input-key input --label-key label --rollout-shuffle --rollout-seed 0 "
    "--seed 1234 --rm-type exact_match --advantage-estimator grpo --calculate-per-token-loss --lr 2e-5 "
    "--weight-decay 0 --use-dynamic-batch-size --max-tokens-per-gpu 2048 --on-train-rollout-diff ignore "
    "--debug-engine-module vime.backends.vllm_utils.scripted_server"
)
SERIAL, OVERLAPPED = "train.py", "train_async.py"
STREAMING, COMMIT = "--transferqueue-mode streaming --max-staleness", "--transferqueue-round-order commit"
SEEN = {
    "seen off": (SERIAL, 8, (16, 8, 128), ""),
    "seen streaming": (OVERLAPPED, 12, (8, 4, 256), f"{STREAMING} 1 --rollout-num-engines 2"),
}
"""Program, rounds, (prompts of a round, samples of a prompt, most tokens of a completion), further flags."""
FORECAST = {
    "off": (SERIAL, 11, (24, 4, 256), ""),
    "off overlapped": (OVERLAPPED, 11, (12, 8, 256), "--max-staleness 1 --rollout-num-engines 3"),
    "streaming 0": (SERIAL, 16, (32, 4, 128), f"{STREAMING} 0"),
    "streaming 1": (OVERLAPPED, 26, (24, 8, 128), f"{STREAMING} 1"),
    "limit": (OVERLAPPED, 24, (16, 8, 256), f"{STREAMING} 2 --vllm-server-concurrency 12"),
    "commit": (OVERLAPPED, 26, (8, 8, 256), f"{STREAMING} 1 {COMMIT}"),
    "commit, every second": (OVERLAPPED, 40, (16, 4, 128), f"{STREAMING} 3 {COMMIT} --update-weights-interval 2"),
    "streaming serial": (SERIAL, 18, (16, 8, 256), f"{STREAMING} 1"),
    "streaming 4": (OVERLAPPED, 45, (6, 8, 256), f"{STREAMING} 4 --rollout-num-engines 2"),
    "buffer": (OVERLAPPED, 16, (32, 8, 128), "--transferqueue-mode buffer --max-staleness 1 --rollout-num-engines 2"),
}


def flags_of(rounds: int, sizes: tuple[int, int, int], more: str, data: Path) -> list[str]:
    prompts, samples, tokens = sizes
    own = (
        f"--num-rollout {rounds} --rollout-batch-size {prompts} --n-samples-per-prompt {samples} "
        f"--rollout-max-response-len {tokens} {more}"
    )
    return [*COMMON.split(), "--prompt-data", str(data), *own.split()]


def ran(name: str, directory: Path, data: Path) -> Path:
    script, rounds, sizes, more = (SEEN | FORECAST)[name]
    run_dir = directory / "".join(letter if letter.isalnum() else "-" for letter in name)
    if not (run_dir / METRICS_FILE).exists() or len(read_metrics(run_dir)) < rounds:
        side = Side(
            name=name,
            script=script,
            flags=flags_of(rounds, sizes, more, data),
            environment={"VIME_SCRIPTED_TOKENS_PER_SECOND": "100"},
        )
        run(side, run_dir)
    return run_dir


def compare(name: str, seen: list[Path], directory: Path, data: Path) -> bool:
    """Print forecast and run of one configuration. Whether both figures are as near as they should be."""
    script, rounds, sizes, more = FORECAST[name]
    config, _ = read_flags(flags_of(rounds, sizes, more, data))
    said = forecast(config, measure(seen, config), overlaps=script == OVERLAPPED)
    bound = config.queue.transferqueue_max_staleness if config.queue.has_ledger else int(script == OVERLAPPED)
    metrics = [line for line in read_metrics(ran(name, directory, data)).values() if "perf/step_time" in line]
    kept = metrics[max(2, bound + 1) :]  # the first are short: nothing was in progress before them
    kept = kept[: len(kept) // (bound + 1) * (bound + 1)]  # rounds of one version follow each other faster
    seconds = sum(line["perf/step_time"] for line in kept)
    speed = sum(line["rollout/num_tokens"] for line in kept) / seconds
    staleness = statistics.fmean(line["transferqueue/sample_staleness/mean"] for line in kept)
    error = said.tokens_per_sec / speed - 1
    print(
        f"{name:22} {said.tokens_per_sec:8,.0f} {speed:8,.0f} {error:+6.1%} {said.staleness:6.2f} {staleness:6.2f} "
        f"{seconds / len(kept):7.2f} s a round",
        flush=True,
    )
    return abs(error) <= LARGEST_ERROR and abs(said.staleness - staleness) <= LARGEST_STALENESS_ERROR


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="keep the runs here")
    parser.add_argument("--only", nargs="+", choices=FORECAST, default=list(FORECAST), metavar="NAME")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = (arguments.out or Path(temporary)).absolute()
        data = directory / "data"
        prepare = [sys.executable, ROOT / "examples/quickstart/prepare.py", "--data-dir", data]
        subprocess.run(prepare, check=True, stdout=subprocess.DEVNULL)
        prompts = data / "train.jsonl"
        seen = [ran(name, directory, prompts) for name in SEEN]
        print(f"{'':22} tokens/s, staleness: forecast, real")
        met = [compare(name, seen, directory, prompts) for name in arguments.only]
    print(f"{sum(met)} of {len(met)} within {LARGEST_ERROR:.0%} and {LARGEST_STALENESS_ERROR} versions")
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(main())
