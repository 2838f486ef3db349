"""What streaming costs and what it gains, by whole runs of the quick start's model; each prints one table.

    .venv/bin/python benchmarks/streaming.py overlap    train.py against train_async.py --max-staleness 1, real engine
    .venv/bin/python benchmarks/streaming.py reward     the same two, until the reward is flat: is it the same?
    .venv/bin/python benchmarks/streaming.py bound      train_async.py on a scripted engine, against max(rollout, train)
    .venv/bin/python benchmarks/streaming.py queue      mode streaming at staleness 0 against off; durable against not
    .venv/bin/python benchmarks/streaming.py small      the same in short rounds that keep both cores busy
    .venv/bin/python benchmarks/streaming.py carry      the same on a scripted engine
    .venv/bin/python benchmarks/streaming.py early      train.py with --train-early-groups against without

Rounds after the warm-up count (--rounds); the model and data of scripts/quickstart.sh must be there. Runs of the sides
follow one another in turns (--repeats): wall seconds a round are means over a run and medians over runs. In `queue` and
`small`, where a few per cent count, they are alive at once and take turns every 2 s (interleaved.py). CPU seconds are
those of all processes.
"""

import argparse
import json
import shutil
import signal
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from interleaved import Round, in_turns, over
from runs import ROOT, SEED, WARM_UP_ROUNDS, Measured, Side, alternate

MODEL, DATA = ROOT / "examples/quickstart/model", ROOT / "data/quickstart-seed0"
STREAMING = ["--transferqueue-mode", "streaming"]
ASYNC = [*STREAMING, "--max-staleness", "1"]
EARLY = ["--train-early-groups", "4"]
CARRIED = (("off", "streaming"), ("streaming not durable", "streaming"))
GROUPS, SAMPLES = 16, 8
LONG_TAIL = ["--custom-generate-function-path", str(ROOT / "benchmarks/long_tail.py") + ":generate"]
SCRIPTED = ["--debug-engine-module", "vime.backends.vllm_utils.scripted_server"]


def task(
    rounds: int,
    *,
    response: int = 48,
    context: int = 512,
    groups: int = GROUPS,
    samples: int = SAMPLES,
    model: Path = MODEL,
    lr: str = "2e-4",
) -> list[str]:
    return [
        *("--hf-checkpoint", str(model), "--prompt-data", str(DATA / "train.jsonl"), "--input-key", "input"),
        *("--label-key", "label", "--rm-type", "exact_match", "--rollout-shuffle"),
        *("--seed", SEED, "--rollout-seed", SEED),
        *("--rollout-batch-size", str(groups), "--n-samples-per-prompt", str(samples)),
        *("--rollout-max-response-len", str(response), "--rollout-max-context-len", str(context)),
        *("--calculate-per-token-loss", "--lr", lr, "--lr-warmup-iters", "5", "--weight-decay", "0"),
        *("--adam-beta2", "0.95", "--use-dynamic-batch-size", "--max-tokens-per-gpu", "2048"),
        *("--num-rollout", str(WARM_UP_ROUNDS + rounds)),
    ]


def overlap(rounds: int, repeats: int, directory: Path) -> None:
    """Same prompts, same tails; what differs is the schedule. The model is so large that training a round takes longer
    than generating it (with one that trains in no time there is nothing to overlap), and ten layers deep: an engine's
    step, whose cost grows with the layers, is then most of what a round costs beside training."""
    flags = [*task(rounds, model=overlap_model(directory), lr="5e-5"), *LONG_TAIL]
    found = alternate(schedules(flags, longest_tail=400), repeats=repeats, directory=directory)
    table(found)
    print("\n| | wait | early | train | move weights | compare | reward, last third |\n|---|---|---|---|---|---|---|")
    for name, runs in found.items():
        timed = ("wait", "early_train", "train", "update_weights", "agreement")
        parts = [f"{seconds_of(runs, f'perf/{part}_time'):.3f}" for part in timed]
        rewards = [f"{late_reward(entry):.3f}" for entry in runs]
        print(f"| {name} | {' | '.join(parts)} | {', '.join(rewards)} |")


def reward(rounds: int, repeats: int, directory: Path) -> None:
    """The quick start's own model, whose reward is flat after some 20 rounds: while it rises, one round of staleness
    shows as one round's rise, and that says nothing about where it ends."""
    found = alternate(schedules([*task(rounds), *LONG_TAIL], longest_tail=64), repeats=repeats, directory=directory)
    print("| | reward, last third of each run | mean | spread |\n|---|---|---|---|")
    for name, runs in found.items():
        rewards = [late_reward(entry) for entry in runs]
        each = ", ".join(f"{late:.3f}" for late in rewards)
        print(f"| {name} | {each} | {statistics.fmean(rewards):.3f} | {max(rewards) - min(rewards):.3f} |")


def schedules(flags: Sequence[str], *, longest_tail: int) -> list[Side]:
    variants = {
        "train.py": [],
        "train_async.py": ASYNC,
        "train.py, early groups": [*STREAMING, *EARLY],
        "train_async.py, early groups": [*ASYNC, *EARLY],
    }
    environment = {"VIME_LONG_TAIL": str(longest_tail)}
    return [
        Side(name=name, script=name.split(",")[0], flags=[*flags, *more], environment=environment)
        for name, more in variants.items()
    ]


def bound(rounds: int, repeats: int, directory: Path) -> None:
    """Generation alone, training alone (of what was generated), and both overlapped; once with generation and once with
    training as the slower one. The model is so large that a sample costs the trainer far more than all others together;
    with the quick start's own, 0.1 M parameters, both cores are full of carrying samples."""
    model = padded_model(directory / "model", layers=4, times_units=64)
    trained = task(rounds, response=384, context=512, model=model)
    flags = [*trained, *SCRIPTED]
    records = str(directory / "rollout_{rollout_id}.jsonl")
    alone = ["--debug-rollout-only", "--save-debug-rollout-data", records]
    train = ["--debug-train-only", "--load-debug-rollout-data", records]
    sides, paces = [], {"slow engine": "40", "fast engine": "1000"}  # tokens a second of each completion
    for engine, pace in paces.items():
        environment = {"VIME_SCRIPTED_TOKENS_PER_SECOND": pace}
        sides += [
            Side(name=f"rollout, {engine}", script="train.py", flags=[*flags, *alone], environment=environment),
            Side(
                name=f"overlapped, {engine}", script="train_async.py", flags=[*flags, *ASYNC], environment=environment
            ),
        ]
    sides.insert(1, Side(name="train", script="train.py", flags=trained + train))
    found = alternate(sides, repeats=repeats, directory=directory)
    table(found)
    for engine in paces:
        overlapped = found[f"overlapped, {engine}"]
        rollout_s, train_s = seconds(found[f"rollout, {engine}"]), seconds_of(found["train"], "perf/train_time")
        limit = max(rollout_s, train_s)
        print(f"\n{engine}: bound max({rollout_s:.3f}, {train_s:.3f}) s a round (the trainers' call alone, without")
        print(f"  reading the records), reached {limit / seconds(overlapped):.3f} of it")
        parts = ("wait", "train", "update_weights", "pause")
        print("  " + ", ".join(f"perf/{part}_time {middle(overlapped, f'perf/{part}_time'):.3f} s" for part in parts))


def overlap_model(directory: Path) -> Path:
    return padded_model(directory / "model", layers=10, times_units=28)


def padded_model(directory: Path, *, layers: int, times_units: int) -> Path:
    """The quick start's model (2 layers, 0.1 M parameters) among layers and MLP units that only cost: its policy to the
    last digits, with 9.5 M parameters in 4 layers or 10.5 M in 10. What is added adds nothing to the residual stream
    before it is trained."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    shutil.copytree(MODEL, directory)
    known = AutoModelForCausalLM.from_pretrained(MODEL).state_dict()
    config = json.loads((MODEL / "config.json").read_text())
    config |= {"num_hidden_layers": layers, "intermediate_size": times_units * config["intermediate_size"]}
    config["layer_types"] = ["full_attention"] * layers
    (directory / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory)).float()
    with torch.no_grad():
        for name, weight in model.state_dict().items():
            if name.endswith(("down_proj.weight", "o_proj.weight")):
                weight.zero_()
            if name in known:
                weight[tuple(slice(0, size) for size in known[name].shape)] = known[name]
    model.save_pretrained(directory)
    return directory


def queue(rounds: int, repeats: int, directory: Path) -> None:
    """What carrying groups one by one through ledger, spool and TransferQueue costs, in the rounds of `overlap`."""
    flags = [*task(rounds + 1, model=overlap_model(directory), lr="5e-5"), *LONG_TAIL]
    interleaved(carriers(flags, {"VIME_LONG_TAIL": "400"}), rounds, repeats, directory)


def small(rounds: int, repeats: int, directory: Path) -> None:
    """The same with the quick start's model. Its rounds are so short, and two cores so full, that what carrying costs
    in CPU seconds shows as seconds."""
    flags = [*task(rounds + 1), *LONG_TAIL]
    interleaved(carriers(flags, {"VIME_LONG_TAIL": "400"}), rounds, repeats, directory)


def carry(rounds: int, repeats: int, directory: Path) -> None:
    """The same on an engine that sleeps: cores are free, and the machine's speed shows in what the carrying costs
    only, so that runs can follow one another."""
    flags = [*task(rounds, response=384, context=512), *SCRIPTED]
    sides = carriers(flags, {"VIME_SCRIPTED_TOKENS_PER_SECOND": "128"})
    found = alternate(sides, repeats=repeats, directory=directory)
    table(found)
    for first, second in CARRIED:
        print(f"\n{second} over {first}: {undisturbed(found[first]) / undisturbed(found[second]):.3f} of its samples/s")


def carriers(flags: Sequence[str], environment: Mapping[str, str]) -> list[Side]:
    variants = {"off": [], "streaming": STREAMING, "streaming not durable": [*STREAMING, "--no-transferqueue-durable"]}
    return [
        Side(name=name, script="train.py", flags=[*flags, *more], environment=environment)
        for name, more in variants.items()
    ]


def interleaved(sides: Sequence[Side], rounds: int, repeats: int, directory: Path) -> None:
    """Two sides at a time: three whole runs do not fit into 24 GiB."""
    of_name = {side.name: side for side in sides}
    for index, names in enumerate(CARRIED):
        pair = [of_name[name] for name in names]
        found: dict[str, list[Round]] = {name: [] for name in names}
        for number in range(repeats):
            turns = in_turns(pair, rounds=rounds + 1, number=number, directory=directory / str(index))
            for name, measured in turns.items():
                found[name] += measured
        print("| side | rounds | s a round, mean | median | CPU s a round, mean |\n|---|---|---|---|---|")
        for name, measured in found.items():
            active_s = [entry.active_s for entry in measured]
            mean_s, cpu_s = statistics.fmean(active_s), statistics.fmean(entry.cpu_s for entry in measured)
            print(f"| {name} | {len(measured)} | {mean_s:.3f} | {statistics.median(active_s):.3f} | {cpu_s:.2f} |")
        first, second = names
        print(f"\n{second} over {first}, samples/s: {over(found[first], found[second])}\n", flush=True)


def early(rounds: int, repeats: int, directory: Path) -> None:
    """Staleness 0 on a long tail: how much of the training passes while the last completions are decoded."""
    samples = 32
    flags = [*task(rounds, response=384, context=512, samples=samples), *SCRIPTED, *STREAMING]
    environment = {"VIME_SCRIPTED_TOKENS_PER_SECOND": "128"}
    sides = [
        Side(name="at once", script="train.py", flags=flags, environment=environment),
        Side(name="early", script="train.py", flags=[*flags, "--train-early-groups", "4"], environment=environment),
    ]
    found = alternate(sides, repeats=repeats, directory=directory)
    table(found, rows=GROUPS * samples)
    for name, runs in found.items():
        parts = ("wait", "early_train", "train", "update_weights")
        print(f"{name}: " + ", ".join(f"{part} {middle(runs, f'perf/{part}_time'):.3f} s" for part in parts))


def table(found: dict[str, list[Measured]], *, rows: int = GROUPS * SAMPLES) -> None:
    first = next(iter(found.values()))
    print("| side | s a round, median (all runs) | CPU s a round | samples/s | over the first |\n|---|---|---|---|---|")
    for name, runs in found.items():
        each = ", ".join(f"{entry.round_s:.3f}" for entry in runs)
        cpu_s = statistics.median(entry.cpu_s / len(entry.rounds) for entry in runs)
        rate, gain = rows / seconds(runs), seconds(first) / seconds(runs)
        print(f"| {name} | {seconds(runs):.3f} ({each}) | {cpu_s:.2f} | {rate:.1f} | {gain:.3f} |")


def seconds(runs: Sequence[Measured]) -> float:
    return statistics.median(entry.round_s for entry in runs)


def undisturbed(runs: Sequence[Measured]) -> float:
    """Seconds a round where rounds do not overlap: of each round the median over the runs, then the mean over rounds.
    What the machine's other tenants did to some rounds of one run drops out; every round is as long in every run."""
    rounds = zip(*([line["perf/step_time"] for line in entry.rounds] for entry in runs), strict=True)
    return statistics.fmean(statistics.median(times) for times in rounds)


def seconds_of(runs: Sequence[Measured], metric: str) -> float:
    return statistics.median(entry.mean(metric) for entry in runs)


def middle(runs: Sequence[Measured], metric: str) -> float:
    return statistics.median(entry.median(metric) for entry in runs)


def late_reward(entry: Measured) -> float:
    rewards = [line["rollout/reward_mean"] for line in entry.rounds]
    return statistics.fmean(rewards[-max(1, len(rewards) // 3) :])


def _stop(_number: int, _frame: object) -> None:
    """Unwinds, once, so that no run stays behind stopped; `timeout` sends SIGTERM twice."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


def main() -> None:
    signal.signal(signal.SIGTERM, _stop)
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    cases = {"overlap": overlap, "reward": reward, "bound": bound, "queue": queue}
    cases |= {"small": small, "carry": carry, "early": early}
    parser.add_argument("case", choices=cases)
    parser.add_argument("--rounds", type=int, default=12, help="rounds that count (default: 12)")
    parser.add_argument("--repeats", type=int, default=2, help="runs of each side (default: 2)")
    parser.add_argument("--directory", type=Path, help="where the runs go (default: a temporary directory)")
    options = parser.parse_args()
    directory = options.directory or Path(tempfile.mkdtemp(prefix="vime-streaming-"))
    cases[options.case](options.rounds, options.repeats, directory)


if __name__ == "__main__":
    main()
