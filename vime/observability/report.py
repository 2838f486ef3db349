"""The end screen: reward curve, completions before and after, totals, and where everything is."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vime.observability.curve import WINDOW, reward_curve_png, smooth, terminal_curve
from vime.observability.summary import CompletionPair, RunSummary
from vime.observability.trace import write_trace

CURVE_HEIGHT = 10
ANSWER_CHARS = 120


def show_report(summary: RunSummary, console: Console) -> None:
    """Print everything that `summary` knows; also draws the PNG and writes the trace again."""
    is_ascii = console.options.ascii_only
    console.print()
    if summary.rewards:
        first, last = min(summary.rewards), max(summary.rewards)
        values = smooth(list(summary.rewards.values()))
        console.print(f"Reward, mean of {WINDOW} rounds, rounds {first} to {last}:", highlight=False)
        drawing = terminal_curve(values, width=min(100, console.width), height=CURVE_HEIGHT, is_ascii=is_ascii)
        console.print(Text(drawing))
        console.print()
    if summary.answers:
        console.print(Text(_answers_title(summary)), soft_wrap=True)
        console.print(_answers(summary, is_ascii))
        console.print()
    _totals(summary, console)
    if (page := summary.run_dir / "report.html").is_file():
        _line(console, "Report", f"{page} (open it in a browser; it needs no network)")
    if summary.rewards:
        _line(console, "Curve", _written(reward_curve_png, summary.run_dir))
    _line(console, "Trace", _written(write_trace, summary.run_dir, " (open it in ui.perfetto.dev)"))
    _line(console, "Run directory", str(summary.run_dir))


def _written(write: Callable[[Path], Path], run_dir: Path, then: str = "") -> str:
    """Return where the file is, or why not: the run may belong to another user, or its disk be full."""
    try:
        return f"{write(run_dir)}{then}"
    except OSError as error:
        return f"not written: {error}"


def duration(seconds: float) -> str:
    """75 -> "1:15"; 3700 -> "1:01:40"."""
    whole = round(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def plain(text: str, *, limit: int = ANSWER_CHARS, is_ascii: bool = False) -> str:
    """Make the text of a model safe for a terminal: one line, no control characters, at most `limit` characters."""
    shown = "".join("\\n" if char == "\n" else char if unicodedata.category(char)[0] != "C" else "?" for char in text)
    if is_ascii:
        shown = shown.encode("ascii", "backslashreplace").decode()
    return shown if len(shown) <= limit else shown[: limit - 3] + "..."


def _answers_title(summary: RunSummary) -> str:
    pairs = summary.answers
    before, after = sum(pair.is_before_right for pair in pairs), sum(pair.is_after_right for pair in pairs)
    return f"{summary.answers_title} ({before} -> {after} of these {len(pairs)} right)"


def _answers(summary: RunSummary, is_ascii: bool) -> Table:
    table = Table()
    for heading in ("prompt", "label", "before", "after"):
        table.add_column(heading, overflow="fold")
    for pair in summary.answers:
        table.add_row(
            Text(plain(pair.prompt, is_ascii=is_ascii)),
            Text(plain(pair.label, is_ascii=is_ascii)),
            *_marked(pair, is_ascii),
        )
    return table


def _marked(pair: CompletionPair, is_ascii: bool) -> tuple[Text, Text]:
    def marked(answer: str, is_right: bool) -> Text:
        mark = Text("ok ", style="green") if is_right else Text("no ", style="red")
        return mark + Text(plain(answer, is_ascii=is_ascii))

    return marked(pair.before, pair.is_before_right), marked(pair.after, pair.is_after_right)


def _totals(summary: RunSummary, console: Console) -> None:
    _line(console, "Outcome", plain(summary.outcome, limit=400))
    if summary.rewards:
        rewards = list(summary.rewards.values())
        count = min(len(rewards), 10)
        start, end = rewards[: min(len(rewards), WINDOW)], rewards[-count:]
        _line(
            console,
            "Reward",
            f"{sum(start) / len(start):.3f} over the first {len(start)} rounds, "
            f"{sum(end) / count:.3f} over the last {count}",
        )
    _line(
        console,
        "Totals",
        f"{summary.num_rounds} rounds, {summary.num_samples:,} samples, {summary.num_tokens:,} response tokens, "
        f"{duration(summary.wall_s)} wall time",
    )
    if summary.phase_s:
        ordered = sorted(summary.phase_s.items(), key=lambda item: -item[1])
        _line(console, "Seconds by phase", ", ".join(f"{name} {seconds:.1f}" for name, seconds in ordered))


def _line(console: Console, name: str, value: str) -> None:
    console.print(Text(f"{name + ':':<18}{value}"), soft_wrap=True)
