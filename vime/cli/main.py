"""`vime <command>`, the same as `python -m vime <command>`."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import io
import sys
from collections.abc import Sequence
from typing import Protocol, cast

from vime.cli import produce, train
from vime.cli.commands import Commands
from vime.types import VimeError

MODULES = {
    **dict.fromkeys(train.COMMANDS, "train"),
    produce.COMMAND: "produce",
    "plan": "plan",
    "report": "report",
    "ls": "runs",
    "compare": "runs",
    "samples": "samples",
    "doctor": "doctor",
    "why-stuck": "why_stuck",
    "diagnose": "diagnose",
    "audit": "queue",
    "queue": "queue",
    "token": "token",
    "engine": "engine",
    "engines": "engines",
    "producers": "producers",
    "conformance": "conformance",
    "sessions-front": "sessions_front",
    "chaos": "chaos",
}
"""Command -> the module of `vime.cli` that adds it, in the order of `vime --help`. A command loads its own module only:
all of them together take a second."""


class _Module(Protocol):
    def add_parsers(self, commands: Commands) -> None: ...


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code (0 done, 1 `why-stuck` or `conformance` found something, 2 refused,
    3 failed, 130 asked to stop)."""
    words = sys.argv[1:] if argv is None else list(argv)
    word = words[0] if words else ""
    if word in train.COMMANDS:
        return train.run_train(word, words[1:])
    if word == produce.COMMAND:
        return produce.run_produce(words[1:])
    if word == "plan":
        from vime.cli.plan import run_plan  # not needed by the others

        return run_plan(words[1:])
    if word == "engine":
        from vime.cli.engine import run_engine  # not needed by the others

        return run_engine(words[1:])
    parser = argparse.ArgumentParser(prog="vime", description="Train, and look at runs.")
    parser.add_argument("--version", action="version", version=f"vime {version()}")
    commands = parser.add_subparsers(dest="command", required=True)
    for name in [MODULES[word]] if word in MODULES else dict.fromkeys(MODULES.values()):
        cast("_Module", importlib.import_module(f"vime.cli.{name}")).add_parsers(commands)
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
