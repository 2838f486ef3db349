"""Where a large run would wait: a discrete-event simulation of one run in mode `streaming`, from measured unit costs.

    .venv/bin/python benchmarks/simulate.py                     1,000 engines, 4,096 ranks, 1 to 16 rollout workers
    .venv/bin/python benchmarks/simulate.py engines             engines doubled from 8 on, and where the knee is
    .venv/bin/python benchmarks/simulate.py check               against real Ray with 50 scripted engines (20 minutes)
    ... [--workers 1 2 4] [--seed 0] [--json] and the numbers of a run, see --help

Every process with Python code is a server that works on one thing at a time (its GIL); router, network interfaces and
disks are servers too. Groups move between them, tokens do not: a group of 16 completions costs a server what so many
tokens cost. Figures are in COSTS of simulated_run.py, each with the place where it was measured; what nobody measured
is in `Assumed`. docs/scale.md says what came out and what it does not show.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.simulated_run import COSTS, Assumed, Result, Run, simulate

KINDS_OF_PROCESS = (
    "coordinator",
    "worker",
    "ledger",
    "queue controller",
    "storage unit",
    "router",
    "API server",
    "driver",
    "source rank",
    "rank 0, weight update",
)
EVERY_KIND = frozenset(
    {*KINDS_OF_PROCESS, "storage unit's network", "router's network", "worker's network", "worker's disk"}
)
ENOUGH = 0.9
"""Of what the engines would do if every other part took no time; below it is the knee."""


@functools.cache
def _free(run: Run) -> Result:
    return simulate(run)


def free_rate(run: Run) -> Result:
    """The same run with parts that take no time: what slots, order of rounds, trainers and long completions leave."""
    return _free(dataclasses.replace(run, workers=1, without=EVERY_KIND))


def at_target(run: Run, workers: Sequence[int]) -> tuple[Result, list[Result]]:
    return free_rate(run), [simulate(dataclasses.replace(run, workers=count)) for count in workers]


def scaled(run: Run, engines: int) -> Run:
    """A run of the same shape with so many engines: groups and ranks in the same proportion."""
    share = engines / run.engines

    def of(count: int) -> int:
        return max(1, round(count * share))

    sources = of(run.sources)
    return dataclasses.replace(
        run,
        engines=engines,
        groups=2 * sources,
        ranks=of(run.ranks),
        sources=sources,
        warm_up=2 * (run.staleness + 1),
        rounds=min(run.rounds, 16 if engines < 256 else 8),  # more groups in each
    )


@dataclass(frozen=True, kw_only=True)
class Knee:
    """Where more engines stop to bring more tokens."""

    workers: int
    without: tuple[str, ...]  # kinds that take no time here: the knees before
    engines: int
    tokens_s: float
    full: str  # the kind whose busiest server is busiest there
    cause: str  # the kind without whose work the most tokens come: a long wait counts as much as a full server
    tokens_s_without: float  # without the cause's work


def cause(run: Run, result: Result) -> tuple[str, float]:
    """Of the kinds that may be it, by name, and tokens/s without its work."""
    candidates = {*result.ranked[:4], "driver", "rank 0, weight update"} & set(result.kinds)
    rates = {
        kind: simulate(dataclasses.replace(run, without=run.without | {kind})).tokens_s for kind in sorted(candidates)
    }
    found = max(rates, key=lambda kind: rates[kind])
    return found, rates[found]


def knees(run: Run, most: int, *, count: int = 2, fewest: int = 8) -> tuple[list[Result], list[Knee]]:
    """Double the engines until the knee; then continue without its cause. Results are those up to the first; fewer
    knees than `count` when there is none up to `most` engines."""
    without = frozenset[str]()
    tried: list[Result] = []
    found: list[Knee] = []
    while len(found) < count:
        engines = fewest if not found else max(fewest, found[-1].engines // 2)
        while True:
            larger = dataclasses.replace(scaled(run, engines), without=without)
            result = simulate(larger)
            if not found:
                tried.append(result)
            if result.tokens_s < ENOUGH * free_rate(larger).tokens_s:
                break
            if 2 * engines > most:
                return tried, found
            engines *= 2
        kind, rate = cause(larger, result)
        found.append(
            Knee(
                workers=run.workers,
                without=tuple(sorted(without)),
                engines=engines,
                tokens_s=result.tokens_s,
                full=result.ranked[0],
                cause=kind,
                tokens_s_without=rate,
            )
        )
        without |= {kind}
    return tried, found


# ---- the check against real Ray ----


@dataclass(frozen=True, kw_only=True)
class Checked:
    """One kind of process in a real run and in the simulated one: its share of all CPU time, and CPU s a round."""

    workers: int
    kind: str
    real_share: float
    simulated_share: float
    real_s: float
    simulated_s: float

    @property
    def off(self) -> float:
        return self.simulated_share / self.real_share - 1 if self.real_share else math.inf


def check(workers: int, rounds: int, token_s: float, seed: int) -> tuple[list[Checked], dict[str, float]]:
    """Run the real rollout half and the simulated one."""
    from benchmarks import rollout_half

    setting = rollout_half.Setting(workers=workers, rounds=rounds, token_s=token_s)
    found = rollout_half.measure(setting)
    chance = random.Random(0)
    pool = [rollout_half.answer(chance, setting)[1:] for _ in range(rollout_half.POOL)]
    result = simulate(
        Run(
            engines=setting.engines,
            groups=setting.groups,
            samples=setting.samples,
            ranks=rollout_half.NUM_RANKS,
            sources=rollout_half.NUM_RANKS,
            tokens=sum(size for _, size in pool) // len(pool) // setting.samples,
            workers=workers,
            staleness=setting.staleness,
            is_async=False,
            token_s=token_s,
            sizes=pool,
            is_scripted=True,
            warm_up=setting.warm_up,
            rounds=40,
            seed=seed,
        )
    )
    shares, total = result.shares(), sum(found.cpu_s.values())
    lines = []
    for kind in sorted({*found.cpu_s, *shares}, key=lambda name: -found.cpu_s.get(name, 0.0)):
        seconds = result.kinds[kind].cpu_s / 40 if kind in result.kinds else 0.0
        real_s = found.cpu_s.get(kind, 0.0)
        lines.append(
            Checked(
                workers=workers,
                kind=kind,
                real_share=real_s / total,
                simulated_share=shares.get(kind, 0.0),
                real_s=real_s / rounds,
                simulated_s=seconds,
            )
        )
    facts = {
        "real_round_s": found.wall_s / rounds,
        "simulated_round_s": result.round_s,
        "real_groups_a_write": found.num_groups / max(1, found.num_writes),
        "simulated_groups_a_write": result.groups_a_write,
        "real_cores": total / found.wall_s,
        "real_tokens_s": found.num_tokens / found.wall_s,
        "simulated_tokens_s": result.tokens_s,
    }
    return lines, facts


# ---- the command ----


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("mode", nargs="?", default="target", choices=("target", "engines", "check", "costs"))
    parser.add_argument("--workers", type=int, nargs="+", help="rollout workers (default: 1 2 4 8 16; check: 1 2 4)")
    parser.add_argument("--engines", type=int, default=Run.engines, help=f"engines (default: {Run.engines})")
    parser.add_argument("--engine-tokens-s", type=float, default=Run.engine_tokens_s, help="of each (default: 5000)")
    parser.add_argument("--groups", type=int, default=Run.groups, help=f"prompts of a round (default: {Run.groups})")
    parser.add_argument("--tokens", type=int, default=Run.tokens, help="of a completion (default: 16384)")
    parser.add_argument("--staleness", type=int, default=Run.staleness, help=f"K (default: {Run.staleness})")
    parser.add_argument("--units", type=int, default=Run.units, help="storage units (default: 1)")
    parser.add_argument("--spread", type=float, default=Assumed.spread, help="of a group's tokens, std over mean")
    parser.add_argument("--most", type=int, default=4096, help="engines: up to so many (default: 4096)")
    parser.add_argument("--rounds", type=int, default=12, help="check: measured rounds of the real run (default: 12)")
    parser.add_argument("--token-s", type=float, default=0.004, help="check: seconds of a token (default: 0.004)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="JSON instead of tables")
    options = parser.parse_args()
    run = Run(
        engines=options.engines,
        engine_tokens_s=options.engine_tokens_s,
        groups=options.groups,
        tokens=options.tokens,
        staleness=options.staleness,
        units=options.units,
        seed=options.seed,
        assumed=Assumed(spread=options.spread),
    )
    if options.mode == "costs":
        for name, (seconds, what, source) in COSTS.items():
            print(f"| {name} | {seconds * 1e6:.4g} us | {what} | {source} |")
        return 0
    if options.mode == "check":
        return said_check(options)
    began = time.monotonic()
    if options.mode == "engines":
        found = [
            knees(dataclasses.replace(run, workers=count), options.most) for count in options.workers or (1, 4, 16)
        ]
        record: object = {
            "runs": [as_json(result) for tried, _ in found for result in tried],
            "knees": [dataclasses.asdict(knee) for _, of in found for knee in of],
        }
        if not options.json:
            for tried, of in found:
                say_results(tried)
                say_knees(tried[0].workers, of, options.most)
    else:
        free, results = at_target(run, options.workers or (1, 2, 4, 8, 16))
        record = {"free": as_json(free), "runs": [as_json(result) for result in results]}
        if not options.json:
            print(f"parts that take no time: {free.tokens_s:,.0f} tokens/s, engines busy {free.engines_busy:.0%}\n")
            say_results(results)
            say_limits(results)
    if options.json:
        print(json.dumps(record, indent=1))
    else:
        print(f"{time.monotonic() - began:.0f} s")
    return 0


def as_json(result: Result) -> dict[str, object]:
    """`kinds` in the order in which they would be full."""
    return {
        **dataclasses.asdict(result),
        "kinds": {name: dataclasses.asdict(result.kinds[name]) for name in result.ranked},
    }


def say_results(results: Sequence[Result]) -> None:
    print("| engines | workers | tokens/s | s a round | engines busy | groups a write | fullest | next | third |")
    print("|---|---|---|---|---|---|---|---|---|")
    for result in results:
        full = [f"{name} {result.kinds[name].utilisation:.0%}" for name in result.ranked[:3]]
        print(
            f"| {result.engines} | {result.workers} | {result.tokens_s:,.0f} | {result.round_s:.1f} "
            f"| {result.engines_busy:.0%} | {result.groups_a_write:.1f} | {' | '.join(full)} |"
        )
    print()


def say_limits(results: Sequence[Result]) -> None:
    """At which rate the busiest server of each kind would be full, by the work that it had at the simulated rate."""
    names = sorted(
        {name for result in results for name in result.kinds},
        key=lambda name: results[-1].kinds[name].limit_tokens_s if name in results[-1].kinds else 0.0,
    )
    print(f"| full at, million tokens/s (utilisation) | {' | '.join(f'W = {result.workers}' for result in results)} |")
    print(f"|---|{'---|' * len(results)}")
    for name in names:
        cells = []
        for result in results:
            kind = result.kinds.get(name)
            cells.append(f"{kind.limit_tokens_s / 1e6:.1f} ({kind.utilisation:.1%})" if kind else "")
        print(f"| {name} | {' | '.join(cells)} |")
    print()


def say_knees(workers: int, found: Sequence[Knee], most: int) -> None:
    without = ""
    for knee in found:
        print(
            f"W = {workers}{without}: knee at {knee.engines} engines, {knee.tokens_s:,.0f} tokens/s; {knee.full} is "
            f"fullest; without the work of {knee.cause}: {knee.tokens_s_without:,.0f}"
        )
        without = f" without {', '.join(sorted({*knee.without, knee.cause}))}"
    if len(found) < 2:
        print(f"W = {workers}{without}: no knee up to {most} engines")
    print()


def said_check(options: argparse.Namespace) -> int:
    record = []
    for workers in options.workers or (1, 2, 4):
        lines, facts = check(workers, options.rounds, options.token_s, options.seed)
        record.append({"workers": workers, "facts": facts, "kinds": [dataclasses.asdict(line) for line in lines]})
        if options.json:
            continue
        print(f"W = {workers}: " + ", ".join(f"{name} {value:.4g}" for name, value in facts.items()))
        print(
            "| process | share of CPU, real | simulated | off by | CPU s a round, real | simulated |\n"
            "|---|---|---|---|---|---|"
        )
        for line in lines:
            print(
                f"| {line.kind} | {line.real_share:.1%} | {line.simulated_share:.1%} | {line.off:+.0%} "
                f"| {line.real_s:.3f} | {line.simulated_s:.3f} |"
            )
        print(flush=True)
    if options.json:
        print(json.dumps(record, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
