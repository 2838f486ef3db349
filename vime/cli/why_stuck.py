"""`vime why-stuck RUN`: every process of a run with what it waits for, and one line that names the blocking party."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.text import Text

from vime.cli.commands import Commands
from vime.observability.run_dir import check_run_dir
from vime.observability.stuck import Verdict, explain, quoted
from vime.observability.waits import RunProcess, SeenWait, State

STUCK = 1


def add_parsers(commands: Commands) -> None:
    parser = commands.add_parser(
        "why-stuck", help="what every process of a run waits for, and who blocks it; exit 1 when something is stuck"
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the run directory")
    parser.set_defaults(run_command=run_why_stuck)


def run_why_stuck(arguments: argparse.Namespace) -> int:
    """Return the exit code: 0 when nothing is stuck, 1 when something is, or when the run died or failed."""
    check_run_dir(arguments.run)
    verdict = explain(arguments.run.resolve())
    console = Console(highlight=False, soft_wrap=True)
    for line in _lines(verdict):
        console.print(line)
    return STUCK if verdict.is_stuck else os.EX_OK


def _lines(verdict: Verdict) -> Iterator[Text]:
    width = max(len(process.name) for process in verdict.processes)
    for process in verdict.processes:
        yield _heading(process, width)
        for work in process.work:
            yield Text(f"    works {work.age_s:6.0f} s  on {work.name}")
        for wait in process.waits:
            yield Text(f"    waits {wait.age_s:6.0f} s  for {_described(wait)}")
    yield Text()
    said = verdict.line if verdict.is_stuck else f"nothing is stuck: {verdict.line}"
    yield Text(said, style="bold red" if verdict.is_stuck else "bold green")


def _heading(process: RunProcess, width: int) -> Text:
    line = Text(f"{process.name:<{width}}", style="bold") + Text(f"  pid {process.pid:<8}")
    line.append(str(process.state), style="" if process.state is State.ALIVE else "bold red")
    facts = [process.detail] if process.detail else []
    if process.cpu_share is not None:
        facts.append(f"CPU {process.cpu_share:.0%}")
    return line.append(f"  {', '.join(facts)}" if facts else "", style="dim")


def _described(wait: SeenWait) -> str:
    source = f" from {', '.join(wait.owners)}" if wait.owners else ""
    left = wait.left_s
    if left is None:
        return f"{quoted(wait)}{source}"
    until = f"{left:.0f} s to its deadline" if left >= 0 else f"{-left:.0f} s past its deadline"
    return f"{quoted(wait)}{source}, {until}"
