"""What a unit of work costs in processes that a run has only once: CPU time over five doublings, and its growth.

    .venv/bin/python benchmarks/unit_costs.py [--repeats 5] [--held 24] [--doublings 5] [STATION ...]

Stations: `read` (an engine's JSON to numbers, by tokens; also beside lists of --held million tokens), `plan`
(--balance-data for 512 data-parallel ranks, by rows), `stuck` (why-stuck, by ranks that wait for each other). "before"
is what the code did until decision 0029, kept here; both sides take turns, medians of --repeats. Exit code 1 when a
cost of today grows with an exponent above 1.1, or reading grows with what is held.
"""

import argparse
import gc
import json
import math
import random
import re
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from vime.batching.plan import plan_round
from vime.observability.stuck import judge
from vime.observability.waits import RunProcess, SeenWait, State
from vime.rollout.engine_client import read_answers
from vime.utils.heap import collect_when_asked

LARGEST_EXPONENT = 1.1
LARGEST_SHARE_OF_HELD = 1.25
"""So much dearer may reading be beside what is held: caches are shared with it."""
SAMPLES = 16
Side = Callable[[], object]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("stations", nargs="*", default=[], help="read, plan, stuck (default: all)")
    parser.add_argument("--repeats", type=int, default=5, help="turns of each side (default: 5)")
    parser.add_argument("--doublings", type=int, default=5, help="of the size (default: 5)")
    parser.add_argument("--held", type=int, default=24, help="million tokens held while reading (default: 24)")
    options = parser.parse_args()
    unknown = set(options.stations) - set(STATIONS)
    if unknown:
        parser.error(f"no station {', '.join(sorted(unknown))}; expected some of {', '.join(STATIONS)}")
    faults = []
    for name in options.stations or STATIONS:
        faults += STATIONS[name](options)
    for fault in faults:
        print(f"FAULT: {fault}")
    return 1 if faults else 0


def read(options: argparse.Namespace) -> list[str]:
    """us of CPU a token, of one answer with SAMPLES samples."""
    sizes = [256 << step for step in range(options.doublings + 1)]
    bodies = {size: answer_body(size) for size in sizes}
    held: list[list[int]] = []
    found: dict[tuple[int, bool], tuple[float, float]] = {}
    for is_held in (False, True):
        if is_held:
            held += [list(range(16_000)) for _ in range(options.held * 1_000_000 // 16_000)]
        for size, body in bodies.items():
            sides = (lambda body=body: before_read(body), lambda body=body: read_answers(body, SAMPLES, "engine"))
            before, now = measured(sides, options.repeats, freeze=(False, True))
            found[size, is_held] = (before / (SAMPLES * size) * 1e6, now / (SAMPLES * size) * 1e6)
    print("| an engine's JSON to numbers, us a token | before | now | before, beside what is held | now, beside it |")
    print("|---|---|---|---|---|")
    for size in sizes:
        costs = [*found[size, False], *found[size, True]]
        print(f"| {SAMPLES} samples of {size} tokens | {' | '.join(f'{cost:.2f}' for cost in costs)} |")
    faults = grown("read", sizes, [found[size, False][1] * size for size in sizes])
    share = statistics.median(found[size, True][1] / found[size, False][1] for size in sizes)
    print(f"held: {sum(map(len, held)) / 1e6:.0f} million tokens, which make reading {share:.2f} times as dear\n")
    if share > LARGEST_SHARE_OF_HELD:
        faults.append(f"read: {share:.2f} times as dear beside what is held, expected at most {LARGEST_SHARE_OF_HELD}")
    return faults


def plan(options: argparse.Namespace) -> list[str]:
    """s of CPU for the plan of a round."""
    chance = random.Random(0)
    sizes = [512 << step for step in range(options.doublings + 1)]
    print("| plan with --balance-data, 512 ranks | before, s | now, s |\n|---|---|---|")
    found = []
    for size in sizes:
        lengths = [chance.randint(200, 16_000) for _ in range(size)]
        sides = (
            lambda lengths=lengths: before_balanced(range(len(lengths)), lengths, 512),
            lambda lengths=lengths: plan_round(
                0, lengths, lengths, dp_size=512, samples_per_step=len(lengths), micro_batch_size=1,
                max_tokens_per_micro_batch=None, loads=lengths,
            ),
        )  # fmt: skip
        before, now = measured(sides, options.repeats)
        found.append(now)
        print(f"| {size} rows | {before:.3f} (the shares alone) | {now:.3f} |")
    return grown("plan", sizes, found)


def stuck(options: argparse.Namespace) -> list[str]:
    """s of CPU for the verdict on ranks of which all but one wait for all the others."""
    sizes = [128 << step for step in range(options.doublings + 1)]
    print("| why-stuck, ranks that wait for their peers | before, s | now, s |\n|---|---|---|")
    found = []
    for size in sizes:
        processes = ranks_that_wait(size)
        sides: tuple[Side, ...] = (
            lambda processes=processes: judge(processes, "not finished"),
            *([lambda processes=processes: before_visited(processes)] if size <= 1024 else []),
        )
        now, *before = measured(sides, options.repeats if size <= 512 else 1)
        found.append(now)
        print(f"| {size} | {f'{before[0]:.3f}' if before else 'not run'} | {now:.4f} |")
    return grown("stuck", sizes, found)


STATIONS: dict[str, Callable[[argparse.Namespace], list[str]]] = {"read": read, "plan": plan, "stuck": stuck}


def measured(sides: tuple[Side, ...], repeats: int, freeze: tuple[bool, ...] = ()) -> list[float]:
    """CPU s of each side, medians of turns. `freeze`: the side runs as the RolloutManager does, with full collections
    when asked only."""
    seconds: list[list[float]] = [[] for _ in sides]
    for _ in range(repeats):
        for at, side in enumerate(sides):
            thresholds = gc.get_threshold()
            if freeze and freeze[at]:
                collect_when_asked()
            began = time.process_time()
            side()
            seconds[at].append(time.process_time() - began)
            gc.set_threshold(*thresholds)
            gc.unfreeze()
    return [statistics.median(turns) for turns in seconds]


def grown(name: str, sizes: list[int], costs: list[float]) -> list[str]:
    """The exponent of growth, least squares in logarithms; a fault when it is too large."""
    xs, ys = [math.log(size) for size in sizes], [math.log(max(cost, 1e-9)) for cost in costs]
    x_mean, y_mean = statistics.mean(xs), statistics.mean(ys)
    above = sum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True))
    exponent = above / sum((x - x_mean) ** 2 for x in xs)
    print(f"{name}: cost grows as size^{exponent:.2f}\n")
    return (
        [f"{name}: exponent {exponent:.2f}, expected at most {LARGEST_EXPONENT}"] if exponent > LARGEST_EXPONENT else []
    )


def answer_body(num_tokens: int) -> bytes:
    """As vLLM 0.32 writes it."""
    chance = random.Random(num_tokens)
    choices = []
    for index in range(SAMPLES):
        tokens = [chance.randrange(150_000) for _ in range(num_tokens)]
        content = [
            {"token_id": token, "logprob": -chance.expovariate(1.0), "rank": 1, "top_logprobs": []} for token in tokens
        ]
        choices.append({
            "index": index, "token_ids": tokens, "finish_reason": "stop", "logprobs": {"content": content},
            "weight_versions": [{"version": "3", "start": 0, "end": num_tokens}],
        })  # fmt: skip
    return json.dumps({"choices": choices}).encode()


def before_read(body: bytes) -> list[Any]:
    choices = sorted(json.loads(body.decode(errors="replace"))["choices"], key=lambda choice: choice["index"])
    return [
        (list(choice["token_ids"]), [float(entry["logprob"]) for entry in choice["logprobs"]["content"]])
        for choice in choices
    ]


def before_balanced(rows: range, loads: list[int], dp_size: int) -> list[list[int]]:
    per_rank = len(rows) // dp_size
    shares: list[list[int]] = [[] for _ in range(dp_size)]
    totals = [0] * dp_size
    for row in sorted(rows, key=lambda row: (-loads[row], row)):
        rank = min((r for r in range(dp_size) if len(shares[r]) < per_rank), key=lambda r: (totals[r], r))
        shares[rank].append(row)
        totals[rank] += loads[row]
    return shares


def ranks_that_wait(count: int) -> list[RunProcess]:
    def wait(name: str) -> SeenWait:
        return SeenWait(name=name, owners=("trainer",), count=1, age_s=40.0, deadline_s=1800.0)

    ranks = [
        RunProcess(name=f"trainer-{rank}", pid=1, waits=(wait("its peers"),), last_seen=0.0, cpu_share=0.0)
        for rank in range(count - 1)
    ]
    late = RunProcess(name=f"trainer-{count - 1}", pid=1, state=State.STOPPED, last_seen=0.0, cpu_share=0.0)
    driver = RunProcess(name="driver", pid=1, waits=(wait("ranks to train"),), last_seen=0.0, cpu_share=0.0)
    return [driver, *ranks, late]


def before_visited(processes: list[RunProcess]) -> int:
    """The walk as it was: each link of each process is queued, and every name compared with every owner."""
    todo, visited = deque([processes[0]]), set()
    while todo:
        process = todo.popleft()
        if process.name in visited:
            continue
        visited.add(process.name)
        for wait in process.waits:
            for owner in wait.owners:
                pattern = re.compile(rf"{re.escape(owner)}\d*")
                named = [other for other in processes if pattern.fullmatch(other.name.lower().replace("-", ""))]
                todo.extend(other for other in named if other is not process)
    return len(visited)


if __name__ == "__main__":
    sys.exit(main())
