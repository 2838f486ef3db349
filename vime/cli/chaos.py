"""`vime chaos OUT -- FLAGS OF TRAIN.PY`: kill every process of a run in every phase, and see whether anything was lost.

First comes an undisturbed run. Then each case gets its own run: a failpoint (`utils/failpoints.py`) holds it in the
phase, the target is killed, the failpoint lets go; a run that ended is started again with the same command line, which
continues from its newest checkpoint, until it is complete. Then no process of it may be left, `vime audit` must find
nothing, and every version that it published must have the weights of the undisturbed run, bit for bit. So what is
trained must not depend on time: use the scripted engine, or --reference-mode.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import random
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from rich.console import Console

from vime.cli.chaos_faults import FAULTS, How
from vime.cli.chaos_members import TARGETS
from vime.cli.chaos_run import Case, ChaosRun, Outcome, Plan, Strike, published
from vime.cli.commands import Commands
from vime.config.queue_checks import EXTERNAL
from vime.types import ConfigError, VimeError
from vime.utils.failpoints import Point

OF_GROUPS = (Point.GENERATE, Point.REWARD, Point.SPOOL, Point.SPOOLED, Point.COMMIT, Point.COMMITTED)
"""Passed by every group, the last three by every write of groups; the others once a round or less often."""
PASSES = dict.fromkeys(OF_GROUPS, 6) | {Point.STOP: 1}
"""Which pass of a point is used; 2 for the others: not the first, so that there is something to lose."""
PHASES = tuple(point for point in Point if point is not Point.KEEP)
"""Points that a case can wait for. KEEP is passed when the parts are stopped, and the next case is armed after that."""
OWN = tuple(f"{point.partition('.')[0]}@{point}:{PASSES.get(point, 2)}" for point in PHASES)
"""Each point with the process that passes it."""
RAY = ("raylet", "gcs")
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
    *(f"{target}@manager.generate:6" for target in RAY),
    *(f"{target}@trainer.optimizer:2" for target in RAY),
    *(f"{target}@driver.checkpoint.written:2" for target in RAY),
    *("trainer+manager@trainer.optimizer:2", "driver+ledger@manager.commit:6", "engine+raylet@trainer.publish.send:2"),
    *("manager@manager.commit:6/stop-kill", "trainer@trainer.optimizer:2/stop-kill", "move@driver.clear:2"),
)
MATRIX = (*OWN, *OTHERS)
OF_WORKERS = tuple(
    f"worker@{point}:{PASSES.get(point, 2)}"
    for point in (Point.GENERATE, Point.COMMIT, Point.LEASED, Point.OPTIMIZER, Point.DURABLE, Point.STOP)
)
"""Added to the matrix when the flags have --num-rollout-workers."""
OF_GATEWAY = tuple(
    f"gateway@{point}:{PASSES.get(point, 2)}"
    for point in (Point.GENERATE, Point.COMMIT, Point.LEASED, Point.CONFIRMED, Point.DURABLE, Point.STOP)
)
"""Added to the matrix when the flags have --transferqueue-mode external."""
EVERY = tuple(f"{target}@{point}:{PASSES.get(point, 2)}" for point in PHASES for target in TARGETS)
ANY = "any"
AT_RANDOM = {ANY: 6, f"{ANY}+{ANY}": 2, f"{ANY}/{How.STOP_KILL}": 1, "move": 1}
"""Weights of the random faults: how often each comes, relative to the others."""
SAVE_INTERVALS = (1, 3, 5)
"""One of them for each run of random faults."""
AT_WORK, WORK_S, START_S = 1 / 2, 4.0, 22.0
"""The share of random kills that wait until rounds are trained, and up to how many seconds after that or the start.
A tiny model trains two to three rounds a second and starts in 20 s, so a run of 60 rounds takes ten kills."""


class ChaosError(VimeError):
    """A killed run lost something, repeated something or left something behind."""


def add_parsers(commands: Commands) -> None:
    parser = commands.add_parser(
        "chaos",
        help="kill processes of a run in every phase; exit 3 when anything was lost",
        description="Cases: TARGET[+TARGET]@POINT[:PASS][/stop|/stop-kill], for example trainer@trainer.optimizer:2. "
        f"Targets: {', '.join([*TARGETS, *FAULTS])}. Points: {', '.join(Point)}.",
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="new directory for all runs and the table")
    parser.add_argument("--case", nargs="+", default=[], metavar="CASE", help="these instead of the matrix")
    parser.add_argument("--random", type=int, default=0, metavar="N", help="N faults at random times instead")
    parser.add_argument("--kills-per-run", type=int, default=10, help="one after the other (default: 10)")
    parser.add_argument(
        "--most-runs",
        type=int,
        metavar="N",
        help="end after so many, also when fewer random faults hit than were asked for (default: as many as it takes)",
    )
    parser.add_argument("--every", action="store_true", help="every target at every point, hours")
    parser.add_argument("--seed", type=int, default=0, help="of --random")
    parser.add_argument(
        "--work-secs",
        type=float,
        default=WORK_S,
        help=f"half of the random faults come up to so long after the first weights (default: {WORK_S:g})",
    )
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
    if arguments.most_runs is not None and arguments.most_runs < 1:
        raise ConfigError(
            f"--most-runs {arguments.most_runs}: expected at least 1. Leave it out for as many as it takes."
        )
    plan = Plan(
        out=out,
        script=arguments.script,
        flags=tuple(arguments.flags),
        deadline_s=arguments.deadline,
        has_own_weights=arguments.own_weights,
    )
    say = Console(highlight=False, markup=False, soft_wrap=True).print
    matrix = (
        *MATRIX,
        *(OF_WORKERS if "--num-rollout-workers" in arguments.flags else ()),
        *(OF_GATEWAY if EXTERNAL in arguments.flags else ()),
    )
    cases = [parse_case(text) for text in arguments.case or (EVERY if arguments.every else matrix)]
    if arguments.random:
        cases = list(random_cases(arguments.random, arguments.seed, arguments.work_secs))
    intervals = random.Random(arguments.seed).choices(SAVE_INTERVALS if arguments.random else (1,), k=len(cases))
    with _stop_signals():
        outcomes = _complete(plan, cases, intervals, arguments, say)
    failed = [number for number, outcome in enumerate(outcomes) if not outcome.is_good]
    kills = sum(outcome.num_kills for outcome in outcomes)
    say(f"{len(outcomes)} runs, {kills} kills, {len(failed)} failed")
    if failed:
        raise ChaosError(f"runs {failed} failed; see {out}/table.md and the runs beside it.")
    if kills < arguments.random and arguments.most_runs is None:
        raise ChaosError(
            f"--random {arguments.random}: {kills} faults hit in {len(outcomes)} runs, the others came when a run was "
            "complete. Give the runs more rounds (--num-rollout)."
        )


@contextlib.contextmanager
def _stop_signals() -> Iterator[None]:
    """Treat SIGTERM and a closed terminal like Ctrl-C: the current run belongs to another session and would continue.
    Signals that were ignored when the command began, as under `nohup`, still are."""
    numbers = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is not signal.SIG_IGN]
    former = {number: signal.signal(number, signal.default_int_handler) for number in numbers}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _complete(
    plan: Plan,
    cases: Sequence[Case],
    intervals: Sequence[int],
    arguments: argparse.Namespace,
    say: Callable[[str], None],
) -> list[Outcome]:
    """Make the undisturbed run, then one run per batch of cases; each writes a line to the table and to the screen.
    `intervals`: --save-interval of each run. A random fault that hit nothing, because the run was complete before, is
    one of a later run, so that as many hit as were asked for."""
    expected = _undisturbed(plan, arguments.undisturbed, say)
    out, outcomes = plan.out, []
    out.mkdir(parents=True, exist_ok=True)
    (out / "table.md").write_text(HEAD)
    batches = list(in_runs(cases, arguments.kills_per_run))
    for number, interval in enumerate(intervals[: arguments.most_runs]):  # one for each case
        if not batches:
            break
        run = ChaosRun(plan, f"run-{number:03d}", expected=expected, save_interval=interval)
        outcome = run.complete(batches.pop(0))
        outcomes.append(outcome)
        if arguments.random and arguments.most_runs != number + 1:
            missed = [strike.case for strike in outcome.strikes if not strike.is_hit]
            outcome.strikes = [strike for strike in outcome.strikes if strike.is_hit]
            batches = list(in_runs([*itertools.chain(*batches), *missed], arguments.kills_per_run))
        with (out / "table.md").open("a") as table:
            table.writelines(f"{line}\n" for line in table_lines(number, outcome))
        (out / "summary.md").write_text("".join(f"{line}\n" for line in summary_lines(outcomes)))
        say(run_line(number, outcome))
    return outcomes


def _undisturbed(plan: Plan, earlier: Path | None, say: Callable[[str], None]) -> Mapping[int, str]:
    """Return the content hash by version of an undisturbed run."""
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
    """TARGET[+TARGET]@POINT[:PASS][/stop|/stop-kill]"""
    target, _, rest = text.partition("@")
    rest, _, how = rest.partition("/")
    name, _, count = rest.partition(":")
    points = {str(point): point for point in Point}
    if (
        not (target in FAULTS or set(target.split("+")) <= set(TARGETS))
        or name not in points
        or how not in ("", *How)
        or not (count or "1").isdigit()
    ):
        raise ConfigError(
            f"--case {text}: expected TARGET[+TARGET]@POINT[:PASS][/stop|/stop-kill]. See `vime chaos --help`."
        )
    return Case(target=target, point=points[name], count=int(count or 1), how=How(how or "kill"))


def random_cases(total: int, seed: int, work_s: float = WORK_S) -> Iterator[Case]:
    """Draw faults of AT_RANDOM, half of them while rounds are trained, the others in the start before."""
    chance = random.Random(seed)
    for fault in chance.choices(list(AT_RANDOM), list(AT_RANDOM.values()), k=total):
        names, _, how = fault.partition("/")
        drawn = iter(chance.sample(list(TARGETS), 2))
        is_at_work = chance.random() < AT_WORK
        yield Case(
            target="+".join(next(drawn) if name == ANY else name for name in names.split("+")),
            how=How(how or "kill"),
            draw=chance.random(),
            is_at_work=is_at_work,
            after_s=chance.uniform(0, work_s if is_at_work else START_S),
        )


def in_runs(cases: Sequence[Case], most: int) -> Iterator[list[Case]]:
    """Put up to `most` cases into each run, one after the other; a case at the end of a run is the last of it."""
    batch: list[Case] = []
    for case in sorted(cases, key=lambda case: case.point is Point.STOP):
        batch.append(case)
        if len(batch) >= most or case.point is Point.STOP:
            yield batch
            batch = []
    if batch:
        yield batch


COLUMNS = ("run", "killed", "how the run continued", "audit", "weights", "metrics", "left", "verdict")
HEAD = f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|\n"


def table_lines(number: int, outcome: Outcome) -> Iterator[str]:
    """Yield a row for each case; audit, weights and verdict are those of its run."""
    verdict = "good" if outcome.is_good else "FAILED"
    for strike in outcome.strikes:
        cells = (
            f"{number:03d}",
            strike,
            strike.then,
            outcome.audit,
            outcome.weights,
            outcome.metrics,
            ", ".join(outcome.left) or "none",
        )
        yield "| " + " | ".join(str(cell).replace("|", "/") for cell in (*cells, verdict)) + " |"


def summary_lines(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Yield a row for each run, then how often each target was hit in which way."""
    yield "| run | saves every | hits | starts | exit codes | audit | weights | metrics | verdict |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for number, outcome in enumerate(outcomes):
        starts = (outcome.save_interval, outcome.num_kills, outcome.num_restarts + 1, outcome.codes)
        ends = (outcome.audit, outcome.weights, outcome.metrics, "good" if outcome.is_good else "FAILED")
        yield f"| {number:03d} | {' | '.join(map(str, (*starts, *ends)))} |"
    yield ""
    yield f"| victim | {' | '.join(WAYS)} |"
    yield f"|---{'|---' * len(WAYS)}|"
    strikes = [strike for outcome in outcomes for strike in outcome.strikes if strike.is_hit]
    hits = Counter((name, _way(strike)) for strike in strikes for name in strike.hit.split("+"))
    for name in itertools.chain(TARGETS, FAULTS):
        if any(hits[name, way] for way in WAYS):
            yield f"| {name} | {' | '.join(str(hits[name, way]) for way in WAYS)} |"


WAYS = ("killed alone", "with another", "stopped 20 s", "stopped, then killed")


def _way(strike: Strike) -> str:
    alone, together, stopped, hung = WAYS
    if strike.case.how is not How.KILL:
        return stopped if strike.case.how is How.STOP else hung
    return together if "+" in strike.hit else alone


def run_line(number: int, outcome: Outcome) -> str:
    return (
        f"run {number:03d}: {'good' if outcome.is_good else 'FAILED'}, {outcome.num_kills} kills in "
        f"{outcome.seconds:.0f} s, {outcome.num_restarts} restarts, exit codes {outcome.codes}, audit {outcome.audit}, "
        f"weights {outcome.weights}, metrics {outcome.metrics}, left {outcome.left or 'nothing'}"
    )
