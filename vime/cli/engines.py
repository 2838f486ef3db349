"""`vime engines RUN`: each engine of a run, what it serves, and what was lost and came back."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table
from rich.text import Text

from vime.cli.commands import Commands, wide_console
from vime.observability.events import Event, EventKind, outcome, read_events
from vime.observability.report import duration, plain
from vime.observability.run_dir import check_run_dir, is_alive

STATES = {
    EventKind.ENGINE_LOST: "lost",
    EventKind.ENGINE_STARTING: "starts again",
    EventKind.ENGINE_READY: "ready for the next update",
    EventKind.ENGINE_READMITTED: "serves",
}
MAX_REASON = 100


@dataclass(slots=True)
class SeenEngine:
    """What the events of the driver say of one engine, up to the newest. Times are unix times."""

    state: str = ""
    since_s: float = 0.0
    version: object = None  # the newest that it confirmed since it was lost
    num_losses: int = 0
    reason: str = ""  # of the last loss

    def now(self, state: str, time_s: float) -> None:
        if state != self.state:
            self.state, self.since_s = state, time_s


def add_parsers(commands: Commands) -> None:
    parser = commands.add_parser("engines", help="the engines of a run: what they serve, which were lost")
    parser.add_argument("run", type=Path, metavar="RUN", help="the run directory")
    parser.set_defaults(run_command=run_engines)


def run_engines(arguments: argparse.Namespace) -> None:
    """Print a line for each engine."""
    run: Path = arguments.run
    check_run_dir(run)
    events = read_events(run, "driver", with_spans=False)
    ended, engines = outcome(events), engines_of(events)
    console = wide_console()
    if not engines:
        console.print("no engine has confirmed a version yet")
        return
    is_over = not is_alive(run)
    until_s = max(event.time_s for event in events) if is_over else time.time()
    table = Table(*("engine", "state", "for", "version", "lost", "why, the last time"), box=None)
    for name, seen in engines.items():
        version = "none" if seen.version is None else str(seen.version)
        times = {0: "never", 1: "once"}.get(seen.num_losses, f"{seen.num_losses} times")
        age, reason = duration(until_s - seen.since_s), plain(seen.reason, limit=MAX_REASON)
        cells = (name, seen.state, age, version, times, reason)
        table.add_row(*map(Text, cells))  # a reason is not markup
    console.print(table)
    if is_over:
        console.print(f"as it was when the run ended ({plain(ended, limit=MAX_REASON)})")


def engines_of(events: Iterable[Event]) -> dict[str, SeenEngine]:
    """Return the engines by name. A restart of the whole run begins them anew and keeps their losses."""
    found: dict[str, SeenEngine] = {}
    for event in events:
        if event.kind == EventKind.RUN_RESTARTED:
            for seen in found.values():
                seen.now("starts with the run", event.time_s)
                seen.version = None
        elif event.kind == EventKind.WEIGHTS_CONFIRMED:
            for name in _names(event):
                seen = found.setdefault(name, SeenEngine())
                seen.now("serves", event.time_s)
                seen.version = event.fields["version"]
        elif event.kind in STATES:
            seen = found.setdefault(str(event.fields.get("engine")), SeenEngine())
            seen.now(STATES[EventKind(event.kind)], event.time_s)
            if event.kind == EventKind.ENGINE_LOST:
                seen.version, seen.reason = None, str(event.fields.get("error", ""))
                seen.num_losses += 1
    return dict(sorted(found.items(), key=lambda item: (len(item[0]), item[0])))


def _names(event: Event) -> Sequence[str]:
    """Return who confirmed weights, without a gateway, which reads them back for jobs outside."""
    names = event.fields.get("engines")
    return [name for name in names if str(name).startswith("engine-")] if isinstance(names, list) else []
