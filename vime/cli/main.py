"""`vime <command>`, the same as `python -m vime <command>`."""

from __future__ import annotations

import argparse
import importlib.metadata
import io
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from vime.cli import (
    chaos,
    conformance,
    diagnose,
    doctor,
    produce,
    producers,
    queue,
    runs,
    samples,
    token,
    train,
    why_stuck,
)
from vime.handoff.queue_view import ledger_fates
from vime.observability.html_report import REPORT_FILE, write_report
from vime.observability.report import show_report
from vime.observability.run_dir import check_run_dir
from vime.observability.summary import summarise
from vime.types import VimeError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code (0 done, 1 `why-stuck` or `conformance` found something, 2 refused,
    3 failed, 130 asked to stop)."""
    words = sys.argv[1:] if argv is None else list(argv)
    if words and words[0] in train.COMMANDS:
        return train.run_train(words[0], words[1:])
    if words and words[0] == produce.COMMAND:
        return produce.run_produce(words[1:])
    parser = argparse.ArgumentParser(prog="vime", description="Train, and look at runs.")
    parser.add_argument("--version", action="version", version=f"vime {version()}")
    commands = parser.add_subparsers(dest="command", required=True)
    train.add_parsers(commands)
    produce.add_parser(commands)
    report_parser = commands.add_parser(
        "report", help="summary, reward curve and completions of a run; writes its report.html again"
    )
    report_parser.add_argument("run", type=Path, metavar="RUN", help="the run directory")
    report_parser.set_defaults(run_command=lambda arguments: report(arguments.run))
    runs.add_parsers(commands)
    samples.add_parser(commands)
    doctor.add_parser(commands)
    why_stuck.add_parser(commands)
    diagnose.add_parser(commands)
    queue.add_parsers(commands)
    token.add_parser(commands)
    producers.add_parser(commands)
    conformance.add_parser(commands)
    chaos.add_parser(commands)
    arguments = parser.parse_args(words)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # completions hold what the terminal's encoding may not know
    try:
        code: int | None = arguments.run_command(arguments)
    except VimeError as error:
        sys.stderr.write(f"vime {arguments.command}: {error}\n")
        return error.exit_code
    except KeyboardInterrupt:
        sys.stderr.write(f"vime {arguments.command}: stopped before it was done.\n")
        return 130
    return code or 0


def version() -> str:
    """Return the version of the installed package."""
    try:
        return importlib.metadata.version("vime")
    except importlib.metadata.PackageNotFoundError:
        return "of a clone that is not installed"


def report(run: Path) -> None:
    """Print the results of `run`, a live, finished or dead one."""
    check_run_dir(run)
    if write_report(run, ledger_fates) is None:
        sys.stderr.write(f"vime report: {REPORT_FILE} could not be written; the reason is above.\n")
    show_report(summarise(run.resolve()), Console(highlight=False))
