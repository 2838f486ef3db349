"""Whole RL loops on one laptop: train.py and train_async.py, TRL's GRPOTrainer, and lean plain torch.

    .venv/bin/pip install -e '.[benchmarks]'        # TRL, once
    .venv/bin/python benchmarks/end_to_end.py [--sizes 0.1M 10M 135M] [--sides ...] [--repeats 3] [--rounds 8]

The same model, prompts in the same order, reward, optimizer settings and number of samples on every side; fp32; GRPO,
one step a round, mean over tokens, clip 0.2 / 0.28, AdamW, gradients clipped at 1. One OMP thread a process; Vime's
runs have several processes, so their wall seconds use both cores; `torch-2threads` is plain torch with two. The sides
take turns, a whole run each (which one is first alternates too), so that a machine whose speed drifts slows all of them
alike.

0.1M: examples/quickstart (its data: scripts/quickstart.sh), exact_match. 10M: a random Qwen3, the reward is the share
of even tokens. 135M: SmolLM2 as scripts/run-smollm2-135m-cpu.sh prepares it, its first line equals the label.

Counted: from the end of a warm-up round's optimizer step (--warm-up of them) to that of the last round, CPU seconds of
the whole process tree and wall seconds, each divided by the rounds; start-up is from the command to the end of the
first round. Peak memory: PSS summed over the tree (a shared page counts once), read every two seconds. Medians of the
runs, (min-max). Seeds 1234, 1235, ... alike on all sides; they do not sample alike.
"""

import argparse
import dataclasses
import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.spine import role
from benchmarks.vime_side import make_model

ROOT = Path(__file__).resolve().parents[1]
SAMPLE_INTERVAL_S = 0.5
SAMPLES_A_LOOK = 4  # at memory, which takes milliseconds a process
RUN_DEADLINE_S = 1800
SIDES = ("vime", "vime-async", "torch", "torch-onednn", "torch-2threads", "trl", "trl-vllm")
SHAPE_10M = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": 16_384,
    "bos_token_id": 1,
    "eos_token_id": 1,
}


@dataclass(frozen=True, kw_only=True)
class Task:
    """What every side is given."""

    model: str
    data: str
    reward: str
    response: int  # tokens at most
    context: int
    lr: float
    beta2: float
    warmup: int = 5  # optimizer steps until the full rate; the first has none
    prompts: int = 16
    samples: int = 8
    micro_tokens: int = 2048
    trl_rows: int = 128  # of one forward pass


@dataclass(frozen=True, kw_only=True)
class Run:
    """One whole run of a side."""

    start_s: float  # from the command to the end of the first round
    start_cpu_s: float
    round_s: float  # mean of the counted rounds
    round_cpu_s: float
    peak_bytes: int
    rewards: list[float]  # by round
    cpu_s_of: dict[str, float]  # by process, a counted round
    peak_bytes_of: dict[str, int]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sizes", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--repeats", type=int, default=3, help="runs of each side (default: 3)")
    parser.add_argument("--rounds", type=int, default=8, help="counted rounds of a run (default: 8)")
    parser.add_argument("--warm-up", type=int, default=2, help="rounds before them (default: 2)")
    parser.add_argument(
        "--seed", type=int, default=1234, help="of the first run; the next has one more (default: 1234)"
    )
    parser.add_argument("--out", type=Path, help="every run with its rewards by round, as a JSON line")
    parser.add_argument("--directory", type=Path, help="where runs and logs go (default: a temporary one)")
    parser.add_argument("flags", nargs="*", help="flags handed to train.py and train_async.py, after --")
    options = parser.parse_args()
    if any(side.startswith("trl") for side in options.sides) and importlib.util.find_spec("trl") is None:
        sys.exit("TRL is not installed. Install it with pip install -e '.[benchmarks]', or leave it out of --sides.")
    if options.rounds < 1 or options.warm_up < 1 or options.repeats < 1:
        sys.exit("--rounds, --warm-up and --repeats must be at least 1.")
    directory = options.directory or Path(tempfile.mkdtemp(prefix="vime-end-to-end-"))
    directory.mkdir(parents=True, exist_ok=True)
    for size in options.sizes:
        task = TASKS[size](directory, options.warm_up + options.rounds)
        found: dict[str, list[Run]] = {side: [] for side in options.sides}
        for number in range(options.repeats):
            order = options.sides[number % len(options.sides) :] + options.sides[: number % len(options.sides)]
            for side in order:
                place = directory / f"{size}-{side}-{number}"
                seed = options.seed + number
                run = measure(
                    side, task, place, seed=seed, warm_up=options.warm_up, rounds=options.rounds, flags=options.flags
                )
                found[side].append(run)
                line = {"size": size, "side": side, "seed": seed, "load": os.getloadavg()[0], **dataclasses.asdict(run)}
                print(json.dumps({**line, "rewards": []}), file=sys.stderr)
                if options.out is not None:
                    with options.out.open("a") as out:
                        out.write(json.dumps(line) + "\n")
        report(size, found)


def quick_start(directory: Path, rounds: int) -> Task:  # noqa: ARG001 - a builder of tasks
    data = ROOT / "data/quickstart-seed0/train.jsonl"
    made_by(data, "examples/quickstart/prepare.py --data-dir data/quickstart-seed0")
    return Task(
        model=str(ROOT / "examples/quickstart/model"),
        data=str(data),
        reward="exact_match",
        response=48,
        context=128,
        lr=2e-4,
        beta2=0.95,
    )


def random_10m(directory: Path, rounds: int) -> Task:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    model, data = directory / "qwen3-10m", directory / "qwen3-10m.jsonl"
    make_model(model, family="Qwen3", **SHAPE_10M)  # for a Qwen2 transformers takes no tokenizer but its own
    size = SHAPE_10M["vocab_size"]
    words = {"<pad>": 0, "<eos>": 1, **{f"w{token}": token for token in range(2, size)}}
    plain = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>").save_pretrained(model)
    draw = random.Random(0)
    lines = []
    for _ in range(16 * rounds):
        asked = " ".join(f"w{draw.randrange(2, size)}" for _ in range(draw.randint(24, 64)))
        lines.append(json.dumps({"input": asked, "label": ""}) + "\n")
    data.write_text("".join(lines))
    return Task(model=str(model), data=str(data), reward="even_share", response=64, context=128, lr=1e-4, beta2=0.95)


def smollm2(directory: Path, rounds: int) -> Task:  # noqa: ARG001
    model, data = ROOT / "models/smollm2-135m", ROOT / "data/smollm2/train.jsonl"
    made_by(data, "examples/smollm2/prepare.py")
    made_by(model / "model.safetensors", "examples/smollm2/prepare.py")
    return Task(
        model=str(model),
        data=str(data),
        reward="first_line",
        response=4,
        context=128,
        lr=1e-5,
        beta2=0.99,
        warmup=3,
        micro_tokens=384,
        trl_rows=32,
    )


TASKS = {"0.1M": quick_start, "10M": random_10m, "135M": smollm2}


def made_by(path: Path, script: str) -> None:
    if not path.exists():
        sys.exit(f"{path} is not there. Make it with: .venv/bin/python {script}")


def measure(side: str, task: Task, place: Path, *, seed: int, warm_up: int, rounds: int, flags: Sequence[str]) -> Run:
    """One run of `side`, from its command to its end."""
    is_ours = side.startswith("vime")
    command = vime_command(side, task, place, seed, warm_up + rounds, flags)
    if not is_ours:
        task_file = Path(f"{place}.task.json")
        task_file.write_text(json.dumps({**dataclasses.asdict(task), "seed": seed, "rounds": warm_up + rounds}))
        name = "torch" if side == "torch-2threads" else side
        loops = str(ROOT / "benchmarks/end_to_end_loops.py")
        command = [sys.executable, loops, name, str(task_file), f"{place}.rounds.jsonl"]
    threads = "2" if side == "torch-2threads" else "1"
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(ROOT),
    }
    if side == "trl-vllm":
        environment |= {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "TORCH_COMPILE_DISABLE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        }
        environment |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    log = Path(f"{place}.out")
    began = time.time()
    with log.open("w") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)
    watcher = Watcher(process.pid)
    try:
        code = process.wait(RUN_DEADLINE_S)
    except subprocess.TimeoutExpired:
        process.terminate()
        process.wait(60)
        sys.exit(f"{side}: not done after {RUN_DEADLINE_S} s; see {log}")
    finally:
        watcher.stop()
    if code != 0:
        sys.exit(f"{side}: ended with {code}; see {log}")
    ends, rewards = vime_rounds(place) if is_ours else loop_rounds(place)
    if len(ends) != warm_up + rounds:
        sys.exit(f"{side}: {len(ends)} rounds, expected {warm_up + rounds}; see {log}")
    first, last = ends[warm_up - 1], ends[-1]
    return Run(
        start_s=ends[0] - began,
        start_cpu_s=watcher.cpu_at(ends[0]),
        round_s=(last - first) / rounds,
        round_cpu_s=(watcher.cpu_at(last) - watcher.cpu_at(first)) / rounds,
        peak_bytes=watcher.peak_bytes,
        rewards=rewards,
        cpu_s_of=watcher.by_process(first, last, rounds),
        peak_bytes_of=watcher.peak_bytes_of,
    )


def vime_command(side: str, task: Task, place: Path, seed: int, rounds: int, flags: Sequence[str]) -> list[str]:
    """As the scripts beside it launch a run."""
    script = "train_async.py" if side == "vime-async" else "train.py"
    staleness = ["--max-staleness", "1"] if side == "vime-async" else []
    return [
        *(sys.executable, str(ROOT / script), "--run-dir", str(place), "--hf-checkpoint", task.model),
        *("--prompt-data", task.data, "--input-key", "input", "--label-key", "label"),
        *("--seed", str(seed), "--rollout-seed", str(seed), "--num-rollout", str(rounds)),
        *("--rollout-batch-size", str(task.prompts), "--n-samples-per-prompt", str(task.samples)),
        *("--rollout-max-response-len", str(task.response), "--rollout-max-context-len", str(task.context)),
        *("--custom-rm-path", f"{ROOT}/benchmarks/end_to_end_rewards.py:{task.reward}"),
        *(
            "--advantage-estimator",
            "grpo",
            "--eps-clip",
            "0.2",
            "--eps-clip-high",
            "0.28",
            "--calculate-per-token-loss",
        ),
        *("--lr", str(task.lr), "--lr-warmup-iters", str(task.warmup), "--weight-decay", "0"),
        *("--adam-beta2", str(task.beta2), "--clip-grad", "1.0"),
        *("--use-dynamic-batch-size", "--max-tokens-per-gpu", str(task.micro_tokens)),
        *("--transferqueue-mode", "buffer"),
        *staleness,
        *flags,
    ]


def vime_rounds(run_dir: Path) -> tuple[list[float], list[float]]:
    """When each round was trained, and its mean reward."""
    events = [json.loads(line) for line in (run_dir / "events/driver.jsonl").read_text().splitlines()]
    lines = [json.loads(line)["metrics"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    rewards = [line["rollout/reward_mean"] for line in lines if "perf/step_time" in line]
    return [event["t"] for event in events if event["kind"] == "round_trained"], rewards


def loop_rounds(place: Path) -> tuple[list[float], list[float]]:
    lines = [json.loads(line) for line in Path(f"{place}.rounds.jsonl").read_text().splitlines()]
    return [line["t"] for line in lines], [line["reward"] for line in lines]


class Watcher:
    """CPU seconds and memory of a process and all its descendants, from a thread."""

    def __init__(self, pid: int) -> None:
        self.peak_bytes = 0
        self.peak_bytes_of: dict[str, int] = {}
        self.members: dict[int, str] = {}  # the processes of the newest sample
        self._pid = pid
        self._used: list[tuple[float, dict[str, float]]] = []  # wall clock, CPU seconds by process until then
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watcher")
        self._thread.start()

    def stop(self) -> None:
        self._has_ended.set()
        self._thread.join()

    def cpu_at(self, moment: float) -> float:
        return sum(self._at(moment).values())

    def by_process(self, first: float, last: float, rounds: int) -> dict[str, float]:
        """CPU seconds a round between the two moments, most first."""
        before, after = self._at(first), self._at(last)
        used = {name: (after[name] - before.get(name, 0.0)) / rounds for name in after}
        return dict(sorted(used.items(), key=lambda entry: -entry[1]))

    def _at(self, moment: float) -> dict[str, float]:
        """Between the samples around `moment`."""
        before = max((entry for entry in self._used if entry[0] <= moment), key=_when, default=self._used[0])
        after = min((entry for entry in self._used if entry[0] >= moment), key=_when, default=self._used[-1])
        share = (moment - before[0]) / (after[0] - before[0]) if after[0] > before[0] else 0.0
        return {name: before[1].get(name, 0.0) * (1 - share) + used * share for name, used in after[1].items()}

    def _watch(self) -> None:
        """Waits for: the clock. Ends with the run."""
        cpu_s: dict[tuple[int, float], tuple[str, float]] = {}
        while not self._has_ended.wait(SAMPLE_INTERVAL_S):
            try:
                root = psutil.Process(self._pid)
                members = [root, *root.children(recursive=True)]
            except psutil.NoSuchProcess:
                continue
            held: dict[str, int] = {}
            names: dict[int, str] = {}
            is_look = len(self._used) % SAMPLES_A_LOOK == 0
            for member in members:
                try:
                    name, times = role(member), member.cpu_times()
                    names[member.pid] = name
                    cpu_s[member.pid, member.create_time()] = name, times.user + times.system
                    if is_look:
                        held[name] = held.get(name, 0) + pss(member.pid)
                except (psutil.NoSuchProcess, OSError):
                    continue
            self.members = names
            used: dict[str, float] = {}
            for name, seconds in cpu_s.values():
                used[name] = used.get(name, 0.0) + seconds
            self._used.append((time.time(), used))
            self.peak_bytes = max(self.peak_bytes, sum(held.values()))
            for name, size in held.items():
                self.peak_bytes_of[name] = max(self.peak_bytes_of.get(name, 0), size)


def _when(entry: tuple[float, dict[str, float]]) -> float:
    return entry[0]


def pss(pid: int) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) << 10
    return 0


def report(size: str, found: dict[str, list[Run]]) -> None:
    def cell(values: list[float], digits: int) -> str:
        return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"

    digits = 2 if size == "0.1M" else 1
    count = len(next(iter(found.values())))
    print(f"\n{size}, {count} runs of each side")
    print(
        "| side | CPU s a round | wall s a round | start-up s | start-up CPU s | peak GB | reward, first and last 3 |"
    )
    print("|---|---|---|---|---|---|---|")
    for side, runs in found.items():
        first = statistics.fmean(reward for run in runs for reward in run.rewards[:3])
        last = statistics.fmean(reward for run in runs for reward in run.rewards[-3:])
        cells = [
            cell([run.round_cpu_s for run in runs], digits),
            cell([run.round_s for run in runs], digits),
            cell([run.start_s for run in runs], 1),
            cell([run.start_cpu_s for run in runs], 1),
            cell([run.peak_bytes / 1e9 for run in runs], 2),
            f"{first:.2f} / {last:.2f}",
        ]
        print(f"| {side} | {' | '.join(cells)} |")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
