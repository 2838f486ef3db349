"""Where the commands of `vime` are added: a protocol for the object of argparse, whose class has no public name."""

from __future__ import annotations

import argparse
from typing import Protocol


class Commands(Protocol):
    """`add_parser` returns the parser of one more command; `help` is its line in `vime --help`."""

    def add_parser(
        self, name: str, *, help: str, description: str | None = None, add_help: bool = True
    ) -> argparse.ArgumentParser: ...
