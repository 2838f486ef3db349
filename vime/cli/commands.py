"""What the commands of `vime` share: where they are added, and how wide they print."""

from __future__ import annotations

import argparse
from typing import Protocol

from rich.console import Console

PIPE_WIDTH = 200


class Commands(Protocol):
    """The object of argparse, whose class has no public name. `add_parser` returns the parser of one more command;
    `help` is its line in `vime --help`."""

    def add_parser(
        self, name: str, *, help: str, description: str | None = None, add_help: bool = True
    ) -> argparse.ArgumentParser: ...


def wide_console() -> Console:
    """Make a console as wide as the terminal; a pipe has no width limit that a table could not keep."""
    console = Console(highlight=False, markup=False)
    return console if console.is_terminal else Console(highlight=False, markup=False, width=PIPE_WIDTH)
