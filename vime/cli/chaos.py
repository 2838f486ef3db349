"""`vime chaos OUT -- FLAGS OF TRAIN.PY`: kill every process of a run in every phase, and see whether anything was lost.

First a run that nobody disturbs. Then for each case a run of its own: a failpoint (`utils/failpoints.py`) holds it in
the phase, the target is killed, the failpoint lets go; a run that ended is started again with the same command line,
which goes on from its newest checkpoint, until it is complete. Then nothing may be left of it, `vime audit` must be
content, and every version that it published must have the weights of the run that nobody disturbed, bit for bit. So
what is trained must not depend on time: use the scripted engine, or --reference-mode.
"""

from __future__ import annotations

import argparse
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from vime.cli.chaos_run import ANY, TARGETS, Case, ChaosRun, Outcome, Plan
from vime.types import ConfigError, VimeError
from vime.utils.failpoints import Point

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
OF_GROUPS = (
    Point.GENERATE,
    Point.REWARD,
    Point.SPOOL,
    Point.SPOOLED,
    Point.COMMIT,
    Point.COMMITTED,
    Point.LEDGER_COMMIT,
)
PASSES = dict.fromkeys(OF_GROUPS, 6) | {Point.STOP: 1}
"""Which pass of a point is met; 2 for the others: not in the first round, so that there is something to lose."""

AT_WORK, WORK_S, START_S = 2 / 3, 6.0, 20.0
"""Of random kills: the share that waits until rounds are trained, and up to how many seconds after that or the start.
A tiny model trains two rounds a second and starts in 20 s, so a run of 60 rounds takes ten kills."""


class ChaosError(VimeError):
    """A killed run lost something, repeated something or left something behind."""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "chaos",
        help="kill processes of a run in every phase; exit 3 when anything was lost",
        description="Cases: TARGET@POINT[:PASS][/stop], for example trainer@trainer.optimizer:2. "
        f"Targets: {', '.join(TARGETS)}. Points: {', '.join(Point)}.",
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="directory for all runs and the table; must be new")
    parser.add_argument("--case", nargs="+", default=[], metavar="CASE", help="these instead of all")
    parser.add_argument("--random", type=int, default=0, metavar="N", help="N kills at random times instead")
    parser.add_argument("--kills-per-run", type=int, default=10, help="of --random, one after the other")
    parser.add_argument("--seed", type=int, default=0, help="of --random")
    parser.add_argument("--script", default="train.py", help="what to run (default: train.py)")
    parser.add_argument("--deadline", type=float, default=300, help="of one run from start to end, seconds")
    parser.add_argument(
        "flags", nargs="+", metavar="-- FLAGS", help="of train.py, without --run-dir, --load and --save"
    )
    parser.set_defaults(run_command=run_chaos)


def run_chaos(arguments: argparse.Namespace) -> None:
    """Print one line for each case and write OUT/table.md; ChaosError names how many failed."""
    out: Path = arguments.out.resolve()
    if out.exists():
        raise ConfigError(
            f"{out} is there already. Name a new directory: runs of another time would be mixed with these."
        )
    plan = Plan(out=out, script=arguments.script, flags=tuple(arguments.flags), deadline_s=arguments.deadline)
    say = Console(highlight=False, markup=False, soft_wrap=True).print
    cases = [parse_case(text) for text in arguments.case] or list(every_case())
    undisturbed = ChaosRun(plan, "undisturbed", expected=None)
    whole = undisturbed.complete()
    say(f"undisturbed: {whole.seconds:.1f} s, exit code {whole.codes}, versions {sorted(undisturbed.hashes)}")
    if len(whole.codes) != 1 or not whole.is_good:
        raise ChaosError(f"the undisturbed run failed: {whole}. Its output: {undisturbed.log}")
    batches = [[case] for case in cases]
    if arguments.random:
        batches = random_batches(arguments.random, arguments.kills_per_run, arguments.seed)
    (out / "table.md").write_text(HEAD)
    say(HEAD.rstrip())
    outcomes = []
    for number, batch in enumerate(batches):
        outcome = ChaosRun(plan, f"run-{number:03d}", expected=undisturbed.hashes).complete(batch)
        outcomes.append(outcome)
        line = table_line(number, outcome)
        say(line)
        with (out / "table.md").open("a") as table:
            table.write(f"{line}\n")
    failed = [number for number, outcome in enumerate(outcomes) if not outcome.is_good]
    kills = sum(outcome.num_kills for outcome in outcomes)
    say(f"{len(outcomes)} runs, {kills} kills, {len(failed)} failed")
    if failed:
        raise ChaosError(f"runs {failed} failed; see {out}/table.md and the runs beside it.")


def every_case() -> Iterator[Case]:
    """Every target in every phase."""
    for point in Point:
        for target in TARGETS:
            yield Case(target=target, point=point, count=PASSES.get(point, 2))


def parse_case(text: str) -> Case:
    """TARGET@POINT[:PASS][/stop]"""
    target, _, rest = text.partition("@")
    rest, _, how = rest.partition("/")
    name, _, count = rest.partition(":")
    points = {str(point): point for point in Point}
    if target not in TARGETS or name not in points or how not in ("", *SIGNALS) or not (count or "1").isdigit():
        raise ConfigError(f"--case {text}: expected TARGET@POINT[:PASS][/stop]. See `vime chaos --help`.")
    return Case(target=target, point=points[name], count=int(count or 1), signal=SIGNALS[how or "kill"])


def random_batches(total: int, per_run: int, seed: int) -> list[list[Case]]:
    """Kills of any process, two of three while rounds are trained, the others in the start before."""
    chance, cases = random.Random(seed), []
    for _ in range(total):
        is_at_work = chance.random() < AT_WORK
        after_s = chance.uniform(0, WORK_S if is_at_work else START_S)
        cases.append(Case(target=ANY, draw=chance.random(), is_at_work=is_at_work, after_s=after_s))
    return [cases[first : first + per_run] for first in range(0, total, per_run)]


COLUMNS = ("run", "killed", "exit codes", "restarts", "seconds", "audit", "weights", "left", "verdict")
HEAD = f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|\n"


def table_line(number: int, outcome: Outcome) -> str:
    cells = [
        f"{number:03d}",
        ", ".join(outcome.killed) or "nothing",
        " ".join(map(str, outcome.codes)),
        outcome.num_restarts,
        f"{outcome.seconds:.0f}",
        outcome.audit,
        outcome.weights,
        ", ".join(outcome.left) or "none",
        "good" if outcome.is_good else "FAILED",
    ]
    return "| " + " | ".join(str(cell) for cell in cells) + " |"
