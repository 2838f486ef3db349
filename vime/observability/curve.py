"""The curves of a run, as a PNG and in the terminal. Rounds of few groups vary much, so curves are 3-round means."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vime.observability.metrics import read_metrics, series

if TYPE_CHECKING:
    from matplotlib.axes import Axes

REWARD = "rollout/reward_mean"
RESPONSE_LENGTH = "rollout/response_len_mean"
WINDOW = 3
CURVE_FILE = "reward_curve.png"
_ASCII = str.maketrans("┤╭╮╰╯─│", "|..''-|")


def smooth(values: Sequence[float], window: int = WINDOW) -> list[float]:
    """Return the mean of each value and the up to `window - 1` before it. [0, 1, 2, 3] -> [0, 0.5, 1, 2]."""
    return [sum(values[max(0, end - window) : end]) / min(end, window) for end in range(1, len(values) + 1)]


def reward_curve_png(run_dir: Path) -> Path:
    """Draw reward and response length by round to RUN_DIR/reward_curve.png; works without a display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rounds = read_metrics(run_dir)
    figure = Figure(figsize=(8, 6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, 1, sharex=True)
    _draw(panels[0], series(rounds, REWARD), "reward", "tab:blue")
    _draw(panels[1], series(rounds, RESPONSE_LENGTH), "response length, tokens", "tab:orange")
    panels[1].set_xlabel("round")
    figure.suptitle(f"{Path(run_dir).resolve().name}: each round, and the mean of {WINDOW} rounds")
    path = Path(run_dir) / CURVE_FILE
    figure.savefig(path, dpi=120)
    return path


def _draw(axes: Axes, by_round: Mapping[int, float], label: str, colour: str) -> None:
    steps, values = list(by_round), list(by_round.values())
    axes.plot(steps, values, ".", color=colour, alpha=0.4)
    axes.plot(steps, smooth(values), color=colour)
    axes.set_ylabel(label)
    axes.grid(visible=True, alpha=0.3)


def terminal_curve(values: Sequence[float], width: int = 60, height: int = 10, *, is_ascii: bool = False) -> str:
    """Draw `values` as a line of characters with a scale on the left; at most `width` columns and `height` rows.

    More values than columns: a column shows the mean of its share. Values that are not finite leave a gap.
    """
    columns = _columns(values, max(1, width - 9))
    finite = [value for value in columns if math.isfinite(value)]
    if not finite:
        return "(no values to draw)"
    low, high = min(finite), max(finite)
    span = (high - low) or 1.0
    levels = [round((value - low) / span * (height - 1)) if math.isfinite(value) else None for value in columns]
    grid = [[" "] * len(columns) for _ in range(height)]
    _trace(grid, levels)
    lines = []
    for level in range(height - 1, -1, -1):
        scale = f"{low + span * level / max(1, height - 1):7.3g}"
        lines.append(f"{scale} ┤{''.join(grid[level])}".rstrip())
    drawing = "\n".join(lines)
    return drawing.translate(_ASCII) if is_ascii else drawing


def _columns(values: Sequence[float], limit: int) -> list[float]:
    """Return one number per column: values repeated to about the full width, or averaged when there are too many."""
    if not values:
        return []
    if len(values) <= limit:
        repeat = max(1, min(4, limit // len(values)))
        return [value for value in values for _ in range(repeat)]
    edges = [round(column * len(values) / limit) for column in range(limit + 1)]
    return [sum(values[start:end]) / (end - start) for start, end in itertools.pairwise(edges)]


def _trace(grid: list[list[str]], levels: Sequence[int | None]) -> None:
    """Draw the line: flat where the level stays, a corner above and below where it changes."""
    previous: int | None = None
    for column, level in enumerate(levels):
        if level is not None:
            if previous is None or previous == level:
                grid[level][column] = "─"
            else:
                is_up = level > previous
                grid[previous][column] = "╯" if is_up else "╮"
                grid[level][column] = "╭" if is_up else "╰"
                for between in range(min(level, previous) + 1, max(level, previous)):
                    grid[between][column] = "│"
        previous = level
