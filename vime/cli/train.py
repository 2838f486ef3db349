"""`vime train` and `vime train-async`: train.py and train_async.py where Vime is installed and no clone is at hand."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

COMMANDS = {
    "train": "train a model; the same as train.py, whose flags follow",
    "train-async": "the same with one round of prefetch; the same as train_async.py",
}


def add_parsers(commands: Any) -> None:
    """List both in the help of `vime`. `run_train` gets their command lines unread: the flags have a parser of their
    own."""
    for name, text in COMMANDS.items():
        commands.add_parser(name, help=text, add_help=False).set_defaults(run_command=_unreachable)


def run_train(command: str, flags: Sequence[str]) -> int:
    """Train; answers the exit code of the run."""
    from vime.ray.launch import main  # brings Ray, which a look at a run does without
    from vime.ray.rhythms import train, train_async

    is_async = command == "train-async"
    return main(train_async if is_async else train, is_async=is_async, argv=flags, called=f"vime {command}")


def _unreachable(arguments: argparse.Namespace) -> int:
    raise AssertionError(f"{arguments.command} is run before the command line is parsed")
