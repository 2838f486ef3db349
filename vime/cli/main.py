"""`vime <command>`, the same as `python -m vime <command>`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from vime.cli import chaos, queue, why_stuck
from vime.observability.report import show_report
from vime.observability.run_dir import check_run_dir
from vime.observability.summary import summarise
from vime.types import VimeError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; answers the exit code (0 done, 1 `why-stuck` found something, 2 refused, 3 failed, 130 told to
    stop)."""
    parser = argparse.ArgumentParser(prog="vime", description="Look at runs of Vime.")
    commands = parser.add_subparsers(dest="command", required=True)
    report_parser = commands.add_parser(
        "report", help="summary, reward curve and answers of a run; draws its PNG again"
    )
    report_parser.add_argument("run", type=Path, metavar="RUN", help="the run directory")
    report_parser.set_defaults(run_command=lambda arguments: report(arguments.run))
    why_stuck.add_parser(commands)
    queue.add_parsers(commands)
    chaos.add_parser(commands)
    arguments = parser.parse_args(argv)
    try:
        code: int | None = arguments.run_command(arguments)
    except VimeError as error:
        sys.stderr.write(f"vime {arguments.command}: {error}\n")
        return error.exit_code
    except KeyboardInterrupt:
        sys.stderr.write(f"vime {arguments.command}: stopped before it was done.\n")
        return 130
    return code or 0


def report(run: Path) -> None:
    """Print what came out of `run`, a live, finished or dead one."""
    check_run_dir(run)
    show_report(summarise(run.resolve()), Console(highlight=False))
