"""`vime engines RUN list|add|drain`: each engine of a run, what it serves, what was lost and came back; one more, or
one fewer, while the run goes on."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table
from rich.text import Text

from vime.cli.commands import Commands, wide_console
from vime.observability.events import Event, EventKind, outcome, read_events
from vime.observability.report import duration, plain
from vime.observability.requests import AnswerState, FleetRequest, ask, is_known, read_answer, withdraw
from vime.observability.run_dir import check_run_dir, config_value, is_alive, read_config
from vime.types import ConfigError, VimeError
from vime.utils.waits import waiting

DRAINS = "gets no new requests"
STATES = {
    EventKind.ENGINE_LOST: "lost",
    EventKind.ENGINE_STARTING: "starts again",
    EventKind.ENGINE_WITHOUT_NODE: "waits for a node with room",
    EventKind.ENGINE_READY: "ready for the next update",
    EventKind.ENGINE_READMITTED: "serves",
    EventKind.ENGINE_ADDED: "starts, as was asked",
    EventKind.ENGINE_DRAINING: DRAINS,
    EventKind.ENGINE_STOPPED: "stopped, as was asked",
}
MAX_REASON = 100
POLL_S, TAKEN_S = 0.2, 120.0


@dataclass(slots=True)
class SeenEngine:
    """What the events of the driver say of one engine, up to the newest. Times are unix times."""

    state: str = ""
    since_s: float = 0.0
    version: object = None  # the newest that it confirmed since it was lost
    num_losses: int = 0
    reason: str = ""  # of the last loss, or of its end
    is_configured: bool = True  # the run begins with it

    def now(self, state: str, time_s: float) -> None:
        if state != self.state:
            self.state, self.since_s = state, time_s


def add_parsers(commands: Commands) -> None:
    parser = commands.add_parser("engines", help="the engines of a run: what they serve; add some, drain one")
    parser.add_argument("run", type=Path, metavar="RUN", help="the run directory")
    parser.add_argument(
        "action",
        nargs="?",
        default="list",
        choices=("list", "add", "drain"),
        help="list (default): a line for each; add: start more; drain: stop one when its requests have ended",
    )
    parser.add_argument("what", nargs="?", help="add: how many (default 1); drain: the engine, for example engine-1")
    parser.add_argument(
        "--within",
        type=float,
        metavar="SECS",
        help="drain: what has not ended then is sent to other engines (default: the run's --generate-timeout-secs)",
    )
    parser.set_defaults(run_command=run_command)


class FleetRequestError(VimeError):
    """The run could not do what it was asked."""


def run_command(arguments: argparse.Namespace) -> None:
    """Do what the words after RUN say."""
    check_run_dir(arguments.run)
    request = request_of(arguments.action, arguments.what, arguments.within)
    if request is None:
        run_list(arguments.run)
    else:
        change(arguments.run, request)


def request_of(action: str, what: str | None, within_s: float | None) -> FleetRequest | None:
    """Return what to ask of the run; None: nothing, its engines are listed. ConfigError for other words."""
    if within_s is not None and (action != "drain" or not 0 < within_s < math.inf):
        raise ConfigError(f"--within {within_s:g}: expected a number of seconds above 0, with drain. Leave it out.")
    if action == "drain":
        if what is None:
            raise ConfigError("drain: which engine? Expected its name, as in `vime engines RUN drain engine-1`.")
        return FleetRequest(command="drain", engine=what, within_s=within_s)
    if action == "add":
        if what is not None and (not what.isdecimal() or int(what) < 1):
            raise ConfigError(f"add {what}: expected a number of engines, as in `vime engines RUN add 2`.")
        return FleetRequest(command="add", count=int(what or 1))
    if what is not None:
        raise ConfigError(f"list {what}: expected nothing after list. Leave it out.")
    return None


def change(run: Path, request: FleetRequest) -> None:
    """Ask the run, show what it says, and return when it is done. ConfigError when it is over or refuses,
    FleetRequestError when it could not do it."""
    over = "it is over, so its engines are gone. Expected a run that is live. Resume it, or look at it with `list`."
    if not is_alive(run):
        raise ConfigError(f"{run}: {over}")
    if config_value(read_config(run), "cluster", "rollout_num_engines") == 0:
        raise ConfigError(f"{run}: has no engines of its own (--rollout-num-engines 0): jobs outside generate.")
    name, console, shown = ask(run, request), wide_console(), ""
    asked = time.monotonic()
    try:
        with waiting("the run to answer", "driver", deadline_s=None):
            while True:
                was_known, was_alive = is_known(run, name), is_alive(run)
                said = read_answer(run, name)
                if said is not None and said.said != shown:
                    shown = said.said
                    console.print(shown, style=None if said.state is AnswerState.WORKING else "bold")
                if said is not None and said.state is not AnswerState.WORKING:
                    break
                if not was_alive:
                    raise ConfigError(f"{run}: {over}")
                if said is None and not was_known:
                    raise FleetRequestError(
                        f"{run}: started its parts again, with the number of engines of its flags, and forgot the "
                        "request. Ask again when its engines serve."
                    )
                if said is None and time.monotonic() - asked > TAKEN_S:
                    raise FleetRequestError(
                        f"{run}: has not taken the request within {TAKEN_S:g} s. Expected its driver to look every "
                        "second. `vime why-stuck` says what it waits for. Ask again."
                    )
                time.sleep(POLL_S)
    finally:
        withdraw(run, name)
    if said.state is AnswerState.REFUSED:
        raise ConfigError(f"{run} refused: {said.said}")
    if said.state is AnswerState.FAILED:
        raise FleetRequestError(f"{run}: {said.said}")


def run_list(run: Path) -> None:
    """Print a line for each engine."""
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
    """Return the engines by name. A restart of the whole run begins those of its flags anew, keeps their losses, and
    forgets what was added."""
    found: dict[str, SeenEngine] = {}
    for event in events:
        if event.kind == EventKind.RUN_RESTARTED:
            found = {name: seen for name, seen in found.items() if seen.is_configured}
            for seen in found.values():
                seen.now("starts with the run", event.time_s)
                seen.version = None
        elif event.kind == EventKind.WEIGHTS_CONFIRMED:
            for name in _names(event):
                seen = found.setdefault(name, SeenEngine())
                if seen.state != DRAINS:
                    seen.now("serves", event.time_s)
                seen.version = event.fields["version"]
        elif event.kind in STATES:
            seen = found.setdefault(str(event.fields.get("engine")), SeenEngine())
            seen.now(STATES[EventKind(event.kind)], event.time_s)
            if event.kind == EventKind.ENGINE_LOST:
                seen.version, seen.reason = None, str(event.fields.get("error", ""))
                seen.num_losses += 1
            elif event.kind == EventKind.ENGINE_ADDED:
                seen.is_configured = False
            elif event.kind == EventKind.ENGINE_STOPPED:
                seen.version, seen.reason = None, str(event.fields.get("reason", ""))
    return dict(sorted(found.items(), key=lambda item: (len(item[0]), item[0])))


def _names(event: Event) -> Sequence[str]:
    """Return who confirmed weights, without a gateway, which reads them back for jobs outside."""
    names = event.fields.get("engines")
    return [name for name in names if str(name).startswith("engine-")] if isinstance(names, list) else []
