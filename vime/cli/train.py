"""train.py and train_async.py; `vime train` and `vime train-async` are the same where there is no clone."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from vime.cli.commands import Commands

COMMANDS = {
    "train": "train a model; the same as train.py, whose flags follow",
    "train-async": "the same with one round of prefetch; the same as train_async.py",
}


def add_parsers(commands: Commands) -> None:
    """List both in the help of `vime`. `run_train` gets their command lines unparsed, because the flags have their own
    parser."""
    for name, text in COMMANDS.items():
        commands.add_parser(name, help=text, add_help=False).set_defaults(run_command=_unreachable)


def run_train(command: str, flags: Sequence[str] | None = None) -> int:
    """Train. Returns the exit code of the run. `flags`: None for those of this process."""
    try:
        # imports Ray, which other commands do not need; it takes a second, in which the user may press Ctrl-C
        from vime.ray.driver import train, train_async
        from vime.ray.launch import main

        is_async, called = command == "train-async", None if flags is None else f"vime {command}"
        return main(train_async if is_async else train, is_async=is_async, argv=flags, called=called)
    except KeyboardInterrupt:  # a started run handles it itself
        sys.stderr.write("\nstopped: nothing was started.\n")
        return 130


def _unreachable(arguments: argparse.Namespace) -> int:
    raise AssertionError(f"{arguments.command} is run before the command line is parsed")
