"""`vime report RUN`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console

from vime.cli.commands import Commands
from vime.handoff.queue_view import ledger_fates
from vime.observability.html_report import REPORT_FILE, write_report
from vime.observability.report import show_report
from vime.observability.run_dir import check_run_dir
from vime.observability.summary import summarise


def add_parsers(commands: Commands) -> None:
    parser = commands.add_parser(
        "report", help="summary, reward curve and completions of a run; writes its report.html again"
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the run directory")
    parser.set_defaults(run_command=run_report)


def run_report(arguments: argparse.Namespace) -> None:
    """Print the results of a live, finished or dead run."""
    run: Path = arguments.run
    check_run_dir(run)
    if write_report(run, ledger_fates) is None:
        sys.stderr.write(f"vime report: {REPORT_FILE} could not be written; the reason is above.\n")
    show_report(summarise(run.resolve()), Console(highlight=False))
