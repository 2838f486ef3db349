"""`vime chaos OUT -- FLAGS OF TRAIN.PY`: kill every process of a run in every phase, and see whether anything was lost.

First a run that nobody disturbs. Then for each case a run of its own: a failpoint (`utils/failpoints.py`) holds it in
the phase, the target is killed, the failpoint lets go; a run that ended is started again with the same command line,
which goes on from its newest checkpoint, until it is complete. Then nothing may be left of it, `vime audit` must be
content, and every version that it published must have the weights of the run that nobody disturbed, bit for bit. So
what is trained must not depend on time: use the scripted engine, or --reference-mode.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from vime.cli.chaos_faults import FAULTS
from vime.cli.chaos_members import ANY, TARGETS
from vime.cli.chaos_run import Case, ChaosRun, Outcome, Plan, published
from vime.types import ConfigError, VimeError
from vime.utils.failpoints import Point

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
OF_GROUPS = (Point.GENERATE, Point.REWARD, Point.SPOOL, Point.SPOOLED, Point.COMMIT, Point.COMMITTED)
"""Passed by every group, the last three by every write of groups; the others once a round or more seldom."""
PASSES = dict.fromkeys(OF_GROUPS, 6) | {Point.STOP: 1}
"""Which pass of a point is met; 2 for the others: not the first, so that there is something to lose."""
PHASES = tuple(point for point in Point if point is not Point.KEEP)
"""Points that a case can wait for. KEEP is passed when the parts are stopped, and the next case is armed after that."""
OWN = tuple(f"{point.partition('.')[0]}@{point}:{PASSES.get(point, 2)}" for point in PHASES)
"""Each point with the process that passes it."""
OTHERS = (
    *(f"{target}@manager.generate:6" for target in ("driver", "trainer", "engine", "engine-actor", "router", "ledger")),
    *(f"{target}@manager.commit:6" for target in ("driver", "storage", "controller", "ledger", "engine")),
    *(f"{target}@manager.leased:2" for target in ("storage", "controller", "ledger", "trainer")),
    *(f"{target}@manager.put.half:2" for target in ("storage", "controller")),
    *(f"{target}@trainer.fetch:2" for target in ("manager", "storage", "controller")),
    *(f"{target}@trainer.optimizer:2" for target in ("driver", "manager", "engine", "router", "ledger")),
    *(f"{target}@trainer.publish.send:2" for target in ("driver", "engine", "engine-actor", "router", "ledger")),
    *(f"{target}@trainer.publish.confirmed:2" for target in ("driver", "engine", "manager")),
    *(f"{target}@driver.trained:2" for target in ("trainer", "manager", "ledger")),
    *(f"{target}@driver.checkpoint.draft:2" for target in ("trainer", "manager", "ledger")),
    *(f"{target}@driver.durable:2" for target in ("ledger", "manager")),
    *(f"{target}@manager.generate:6/stop" for target in ("driver", "manager", "engine", "router", "ledger", "storage")),
    *("manager@manager.commit:6/stop", "manager@manager.leased:2/stop", "engine@trainer.publish.send:2/stop"),
    *("trainer@trainer.optimizer:2/stop", "driver@trainer.optimizer:2/stop"),
    *(f"{target}@driver.stop:1" for target in ("trainer", "manager", "engine", "ledger", "controller")),
)
MATRIX = (*OWN, *OTHERS)
EVERY = tuple(f"{target}@{point}:{PASSES.get(point, 2)}" for point in PHASES for target in TARGETS)
AT_WORK, WORK_S, START_S = 1 / 2, 4.0, 22.0
"""Of random kills: the share that waits until rounds are trained, and up to how many seconds after that or the start.
A tiny model trains two to three rounds a second and starts in 20 s, so a run of 60 rounds takes ten kills."""


class ChaosError(VimeError):
    """A killed run lost something, repeated something or left something behind."""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "chaos",
        help="kill processes of a run in every phase; exit 3 when anything was lost",
        description="Cases: TARGET@POINT[:PASS][/stop], for example trainer@trainer.optimizer:2. "
        f"Targets: {', '.join([*TARGETS, *FAULTS])}. Points: {', '.join(Point)}.",
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="directory for all runs and the table; must be new")
    parser.add_argument("--case", nargs="+", default=[], metavar="CASE", help="these instead of the matrix")
    parser.add_argument("--random", type=int, default=0, metavar="N", help="N kills at random times instead")
    parser.add_argument("--kills-per-run", type=int, default=10, help="one after the other (default: 10)")
    parser.add_argument("--every", action="store_true", help="every target at every point, hours")
    parser.add_argument("--seed", type=int, default=0, help="of --random")
    parser.add_argument(
        "--undisturbed", type=Path, metavar="RUN_DIR", help="a complete run of the same flags, instead of a new one"
    )
    parser.add_argument(
        "--own-weights",
        action="store_true",
        help="what is trained depends on time (train_async.py): compare the attempts of a run with each other only",
    )
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
    plan = Plan(
        out=out,
        script=arguments.script,
        flags=tuple(arguments.flags),
        deadline_s=arguments.deadline,
        has_own_weights=arguments.own_weights,
    )
    say = Console(highlight=False, markup=False, soft_wrap=True).print
    cases = [parse_case(text) for text in arguments.case or (EVERY if arguments.every else MATRIX)]
    if arguments.random:
        cases = list(random_cases(arguments.random, arguments.seed))
    with _told_to_stop():
        outcomes = _complete(plan, cases, arguments, say)
    failed = [number for number, outcome in enumerate(outcomes) if not outcome.is_good]
    kills = sum(outcome.num_kills for outcome in outcomes)
    say(f"{len(outcomes)} runs, {kills} kills, {len(failed)} failed")
    if failed:
        raise ChaosError(f"runs {failed} failed; see {out}/table.md and the runs beside it.")


@contextlib.contextmanager
def _told_to_stop() -> Iterator[None]:
    """SIGTERM and a closed terminal unwind like Ctrl-C: the run under way is of another session and would live on.
    What was ignored when the command began, as under `nohup`, still is."""
    numbers = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is not signal.SIG_IGN]
    former = {number: signal.signal(number, signal.default_int_handler) for number in numbers}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _complete(
    plan: Plan, cases: Sequence[Case], arguments: argparse.Namespace, say: Callable[[str], None]
) -> list[Outcome]:
    """The undisturbed run, then each batch of cases; a table line and a line on the screen as each is done."""
    expected = _undisturbed(plan, arguments.undisturbed, say)
    out, outcomes = plan.out, []
    out.mkdir(parents=True, exist_ok=True)
    (out / "table.md").write_text(HEAD)
    for number, batch in enumerate(in_runs(cases, arguments.kills_per_run)):
        outcome = ChaosRun(plan, f"run-{number:03d}", expected=expected).complete(batch)
        outcomes.append(outcome)
        with (out / "table.md").open("a") as table:
            table.writelines(f"{line}\n" for line in table_lines(number, outcome))
        say(run_line(number, outcome))
    return outcomes


def _undisturbed(plan: Plan, earlier: Path | None, say: Callable[[str], None]) -> Mapping[int, str]:
    """Content hash by version of a run that nobody disturbs."""
    if earlier is not None:
        hashes = published(earlier)
        if not hashes:
            raise ConfigError(
                f"--undisturbed {earlier}: no version was published there. Name a complete run's directory."
            )
        return hashes
    run = ChaosRun(plan, "undisturbed", expected=None)
    whole = run.complete()
    say(f"undisturbed: {whole.seconds:.1f} s, exit code {whole.codes}, {len(run.hashes)} versions")
    if len(whole.codes) != 1 or not whole.is_good:
        raise ChaosError(f"the undisturbed run failed: {whole}. Its output: {run.log}")
    return run.hashes


def parse_case(text: str) -> Case:
    """TARGET@POINT[:PASS][/stop]"""
    target, _, rest = text.partition("@")
    rest, _, how = rest.partition("/")
    name, _, count = rest.partition(":")
    points = {str(point): point for point in Point}
    if (
        target not in {*TARGETS, *FAULTS}
        or name not in points
        or how not in ("", *SIGNALS)
        or not (count or "1").isdigit()
    ):
        raise ConfigError(f"--case {text}: expected TARGET@POINT[:PASS][/stop]. See `vime chaos --help`.")
    return Case(target=target, point=points[name], count=int(count or 1), signal=SIGNALS[how or "kill"])


def random_cases(total: int, seed: int) -> Iterator[Case]:
    """Kills of any process, half of them while rounds are trained, the others in the start before."""
    chance = random.Random(seed)
    for _ in range(total):
        is_at_work = chance.random() < AT_WORK
        after_s = chance.uniform(0, WORK_S if is_at_work else START_S)
        yield Case(target=ANY, draw=chance.random(), is_at_work=is_at_work, after_s=after_s)


def in_runs(cases: Sequence[Case], most: int) -> Iterator[list[Case]]:
    """Up to `most` cases one after the other in each run; one at the end of a run is the last of its run."""
    batch: list[Case] = []
    for case in sorted(cases, key=lambda case: case.point is Point.STOP):
        batch.append(case)
        if len(batch) >= most or case.point is Point.STOP:
            yield batch
            batch = []
    if batch:
        yield batch


COLUMNS = ("run", "killed", "how the run went on", "audit", "weights", "left", "verdict")
HEAD = f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|\n"


def table_lines(number: int, outcome: Outcome) -> Iterator[str]:
    """One for each case; audit, weights and verdict are those of its run."""
    verdict = "good" if outcome.is_good else "FAILED"
    for strike in outcome.strikes:
        cells = (
            f"{number:03d}",
            strike,
            strike.then,
            outcome.audit,
            outcome.weights,
            ", ".join(outcome.left) or "none",
        )
        yield "| " + " | ".join(str(cell).replace("|", "/") for cell in (*cells, verdict)) + " |"


def run_line(number: int, outcome: Outcome) -> str:
    return (
        f"run {number:03d}: {'good' if outcome.is_good else 'FAILED'}, {outcome.num_kills} kills in "
        f"{outcome.seconds:.0f} s, {outcome.num_restarts} restarts, exit codes {outcome.codes}, audit {outcome.audit}, "
        f"weights {outcome.weights}, left {outcome.left or 'nothing'}"
    )
