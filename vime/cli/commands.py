"""Where the commands of `vime` are added: what argparse answers, whose own class has no public name."""

from __future__ import annotations

import argparse
from typing import Protocol


class Commands(Protocol):
    """`add_parser` gives the parser of one more command; `help` is its line in `vime --help`."""

    def add_parser(
        self, name: str, *, help: str, description: str | None = None, add_help: bool = True
    ) -> argparse.ArgumentParser: ...
