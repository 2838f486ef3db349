"""docs/metrics.md as names: what a run may say, with `<placeholders>` for what a run chooses."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
FAMILIES = ("transferqueue", "rollout", "eval", "train", "perf", "weights", "engines")


def documented_metrics() -> list[str]:
    """`a/{b, c}` is two names; `<reason>` stays as it is."""
    return [name for name in _first_cells() if name.split("/")[0] in FAMILIES and "/" in name]


def documented_spans() -> list[str]:
    return [name for name in _first_cells() if "/" not in name]


def undocumented(names: Iterable[str]) -> list[str]:
    """Those that no line of the page covers."""
    patterns = [re.compile(as_pattern(name)) for name in documented_metrics()]
    return sorted(name for name in names if not any(pattern.fullmatch(name) for pattern in patterns))


def as_pattern(name: str) -> str:
    return re.sub(r"<\w*>", r"[\\w.-]+", re.escape(name))


def _first_cells() -> list[str]:
    cells = [line.split("|")[1] for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    return [name for cell in cells for entry in re.findall(r"`([^`]+)`", cell) for name in _expanded(entry)]


def _expanded(entry: str) -> list[str]:
    parts = [part.split(", ") for part in re.split(r"[{}]", entry)]
    return ["".join(choice) for choice in itertools.product(*parts)]
