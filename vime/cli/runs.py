"""`vime ls [DIR]` and `vime compare RUN RUN...`: several runs side by side."""

from __future__ import annotations

import argparse
import contextlib
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.table import Table
from rich.text import Text

from vime.cli.commands import Commands, wide_console
from vime.config.rollout import LEASED_PROMPTS
from vime.observability.curve import RESPONSE_LENGTH
from vime.observability.events import EventKind, outcome, read_events
from vime.observability.html_report import CHARTS, by_name, flat_config, run_state
from vime.observability.metrics import METRICS_FILE, read_metrics
from vime.observability.page import Line, Page, chart_block, table_block
from vime.observability.report import duration, plain
from vime.observability.run_dir import check_run_dir, config_value, is_run_dir, read_config
from vime.observability.summary import RunSummary, summarise
from vime.types import ConfigError, VimeError

LAST = 10
"""A run's last reward is the mean of this many rounds."""
OWN = ("run_dir", "save", "wandb_group")
"""Flags that differ between runs by nature."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenRun:
    """One run as `vime compare` sees it."""

    name: str
    state: str
    summary: RunSummary
    metrics: Mapping[str, Mapping[int, float]]  # by name, by round
    config: Mapping[str, object]  # by flag


def add_parsers(commands: Commands) -> None:
    parser = commands.add_parser("ls", help="the runs of a directory: state, rounds, last reward")
    parser.add_argument(
        "directory", nargs="?", type=Path, default=Path("runs"), metavar="DIR", help="where runs are (default: runs)"
    )
    parser.set_defaults(run_command=run_ls)
    parser = commands.add_parser(
        "compare", help="runs side by side: a table, the flags that differ, overlaid curves in one HTML file"
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run directories, two or more")
    parser.add_argument(
        "--output", type=Path, default=Path("compare.html"), metavar="FILE", help="the page (default: compare.html)"
    )
    parser.add_argument(
        "--metric", nargs="+", default=[], metavar="NAME", help="overlay these metrics too; regular expressions"
    )
    parser.set_defaults(run_command=run_compare)


def run_ls(arguments: argparse.Namespace) -> None:
    """Print one line per run, the newest first; DataError when there is none."""
    directory: Path = arguments.directory
    if not directory.is_dir():
        raise ConfigError(
            f"{directory}: no such directory. Expected one that holds runs; a run's default place is runs."
        )
    found = sorted(_runs_in(directory), key=lambda run: -(run / "config.json").stat().st_mtime)
    if not found:
        raise ConfigError(f"{directory}: no run in it. Runs are in runs/ unless --run-dir.")
    table = _table("run", "state", "rounds", f"reward, last {LAST}", "wall time", "started")
    for run in found:
        table.add_row(*map(Text, _line_of(run, directory)))
    wide_console().print(table)


def run_compare(arguments: argparse.Namespace) -> None:
    """Print the table and the flags that differ; write the curves."""
    paths: list[Path] = arguments.runs
    if len(paths) < 2:
        raise ConfigError(f"got {len(paths)} run, expected two or more. `vime report` shows one.")
    for path in paths:
        check_run_dir(path)
    patterns = [_pattern(text) for text in arguments.metric]
    runs = [_seen(path, name) for path, name in zip(paths, _names(paths), strict=True)]
    differences = list(_differences(runs))
    console = wide_console()
    figures = list(_figures(runs))
    console.print(_filled(_table("", *(run.name for run in runs)), figures))
    console.print()
    if differences:
        console.print(_filled(_table("flag", *(run.name for run in runs)), differences))
    else:
        console.print("No flag differs but where the runs are.")
    page = _page(runs, figures, differences, patterns)
    try:
        page.write(arguments.output)
    except OSError as error:
        raise ConfigError(f"--output {arguments.output}: cannot be written: {error}. Choose another file.") from error
    console.print(Text(f"\nCurves: {arguments.output.resolve()}"), soft_wrap=True)


def _runs_in(directory: Path) -> Iterator[Path]:
    """Yield the directory itself, its entries, and theirs."""
    for pattern in (".", "*", "*/*"):
        for path in sorted(directory.glob(pattern)) if pattern != "." else [directory]:
            if is_run_dir(path):
                yield path


def _line_of(run: Path, directory: Path) -> tuple[str, ...]:
    """Summarise what can be read; a run whose files are damaged has its line too."""
    name = str(run.relative_to(directory)) if run != directory else str(run)
    try:
        summary = summarise(run)
        events = read_events(run, "driver", with_spans=False)
    except (VimeError, OSError) as error:
        return name, f"cannot be read: {plain(str(error), limit=60)}", "", "", "", ""
    rewards = list(summary.rewards.values())[-LAST:]
    started = next((event.time_s for event in events if event.kind == EventKind.RUN_STARTED), None)
    return (
        name,
        run_state(run, outcome(events)),
        _of_all(summary, run),
        f"{sum(rewards) / len(rewards):.3f}" if rewards else "",
        duration(summary.wall_s),
        "" if started is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(started)),
    )


def _of_all(summary: RunSummary, run: Path) -> str:
    """Return `12/30`, with the total of --num-rollout; of `vime produce`, which has no rounds, what it is."""
    with contextlib.suppress(VimeError):
        if config_value(read_config(run), "data", "data_source_path") == LEASED_PROMPTS:
            return "rollout job"
        wanted = config_value(read_config(run), "rollout", "num_rollout")
        return f"{summary.num_rounds}/{wanted}" if wanted else str(summary.num_rounds)
    return str(summary.num_rounds)


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise ConfigError(f"--metric {text}: no regular expression: {error}. Expected for example train/.*") from error


def _names(paths: Sequence[Path]) -> list[str]:
    """Return the directories' names, with as much of their path as is needed to distinguish them."""
    parts = [path.resolve().parts for path in paths]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    raise ConfigError(f"{paths[0]} is given twice. Name different runs.")


def _seen(path: Path, name: str) -> SeenRun:
    rounds = read_metrics(path) if (path / METRICS_FILE).is_file() else {}
    summary = summarise(path)
    state = run_state(path, summary.outcome)
    return SeenRun(
        name=name, state=state, summary=summary, metrics=by_name(rounds), config=flat_config(read_config(path))
    )


def _figures(runs: Sequence[SeenRun]) -> Iterator[tuple[str, ...]]:
    yield ("state", *(run.state for run in runs))
    yield ("rounds", *(f"{run.summary.num_rounds:,}" for run in runs))
    yield ("wall time", *(duration(run.summary.wall_s) for run in runs))
    yield ("response tokens", *(f"{run.summary.num_tokens:,}" for run in runs))
    yield ("best reward of a round", *map(_best, runs))
    names = {"rollout/reward_mean", RESPONSE_LENGTH, "train/entropy", "train/grad_norm", "perf/tokens_per_sec"}
    for name in sorted(names | {"perf/step_time"}, reverse=True):
        yield (f"{name}, last {LAST} rounds", *(_last(run, name, LAST) for run in runs))
    evaluations = {
        name for run in runs for name in run.metrics if re.fullmatch(r"eval/[^/]+/(reward_mean|pass@\d+)", name)
    }
    for name in sorted(evaluations):
        yield (f"{name}, newest", *(_last(run, name, 1) for run in runs))


def _last(run: SeenRun, name: str, count: int) -> str:
    """Return the mean of the last `count` values."""
    values = list(run.metrics.get(name, {}).values())[-count:]
    return f"{sum(values) / len(values):.4g}" if values else ""


def _best(run: SeenRun) -> str:
    rewards = run.summary.rewards
    if not rewards:
        return ""
    best = max(rewards, key=lambda round_id: rewards[round_id])
    return f"{rewards[best]:.4g} (round {best})"


def _differences(runs: Sequence[SeenRun]) -> Iterator[tuple[str, ...]]:
    """Return flags whose values differ between runs; `-` where a run does not know the flag."""
    for name in sorted({name for run in runs for name in run.config}):
        values = [_value(run.config[name]) if name in run.config else "-" for run in runs]
        if name not in OWN and len(set(values)) > 1:
            yield (f"--{name.replace('_', '-')}", *values)


def _value(value: object) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for column in columns:
        table.add_column(Text(column), overflow="fold")
    return table


def _filled(table: Table, rows: Sequence[Sequence[str]]) -> Table:
    for row in rows:
        table.add_row(*(Text(plain(cell, limit=400)) for cell in row))
    return table


def _page(
    runs: Sequence[SeenRun],
    figures: Sequence[Sequence[str]],
    differences: Sequence[Sequence[str]],
    patterns: Sequence[re.Pattern[str]],
) -> Page:
    """Make a chart for each metric, with a line for each run."""
    written = time.strftime("%Y-%m-%d %H:%M")
    page = Page(title=" / ".join(run.name for run in runs), subtitle=f"page written {written}", badge=("compared", ""))
    columns = [run.name for run in runs]
    page.add_section("", [table_block(("", *columns), figures)])
    page.add_section("Flags that differ", [table_block(("flag", *columns), differences)] if differences else [])
    names = sorted({name for run in runs for name in run.metrics})
    asked = {name: name for name in names if any(pattern.search(name) for pattern in patterns)}
    for section, titles in {"Asked for": asked, **_titles(names)}.items():
        charts = [chart_block(title, list(_lines(page, runs, name))) for name, title in titles.items()]
        page.add_section(section, [{"kind": "charts", "charts": charts}] if charts else [])
    return page


def _titles(names: Sequence[str]) -> dict[str, dict[str, str]]:
    """Map section -> metric -> title of its chart, as in a report; a chart of several metrics becomes one for each."""
    titles: dict[str, dict[str, str]] = {}
    for section, title, pattern, _ in CHARTS:
        matches = [match for name in names if (match := re.fullmatch(pattern, name))]
        for match in matches:
            titles.setdefault(section, {})[match[0]] = title if len(matches) == 1 else f"{title}: {match[1]}"
    return titles


def _lines(page: Page, runs: Sequence[SeenRun], name: str) -> Iterator[Line]:
    """Make a line for each run that has the metric; a run has the same colour everywhere."""
    for number, run in enumerate(runs):
        if name in run.metrics:
            page.add_points(f"{number}|{name}", run.metrics[name])
            yield Line(key=f"{number}|{name}", name=run.name, colour=number)
