"""What this process waits for and works on: registered in a microsecond, and on disk when it lasts over a second.

    with waiting("a round of generation", "rollout-manager", deadline_s=1800):
        ...

A wait names its owner: the process that must end it. It has a deadline, which the code around it turns into an error;
the registry itself never raises. Any thread and any coroutine may enter. One daemon thread looks once a second and
rewrites RUN_DIR/waits/<process>.<pid>.json when something changed, so a killed process leaves a record of its last
waits. `vime why-stuck` reads those files (`vime/observability/waits.py`).

Standard library only and below every package, so that all blocking code can use it. A process that never calls
`open_registry` (an engine's worker, a test) pays the microsecond and writes nothing.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import TypedDict

from vime.utils.processes import place, read_process

logger = logging.getLogger(__name__)

DIRECTORY = "waits"
FORMAT = 1
TICK_S = 1.0
SHOWN_AFTER_S = 1.0
JOB = "job://"
"""Begins the name of an owner that is a rollout job outside of the run: it has no file, so what it owes has its
deadline when its leases end."""
AGENT, CLIENT = "agent", "client"
"""Owners that are programs of others: an agent, or who sends a request. They have no file either."""
STARTS_AGAIN = "starting again: "
"""Begins the name of the driver's work while a process of this name, which was lost, is started again."""
NO_NODE = "no node has room for "
"""Begins that work's name while the cluster has no node for it."""
HEARTBEAT_S = 5.0
"""Seconds after which an unchanged file is touched: an older one belongs to a process whose threads do not run."""
OVERDUE_GRACE_S = 30.0
"""Seconds beyond a deadline in which the code around the wait must raise an error; later it is logged."""


class WaitRecord(TypedDict):
    """One line of a process's file: `count` equal waits, the oldest of them since `since` (monotonic)."""

    name: str
    owners: list[str]
    count: int
    since: float
    deadline_s: float | None


class WorkRecord(TypedDict):
    """A piece of work in the file, since `since` (monotonic)."""

    name: str
    since: float


class WaitsNow(TypedDict):
    """The part of the file that changes."""

    waits: list[WaitRecord]
    work: list[WorkRecord]


class WaitsFile(WaitsNow):
    """RUN_DIR/waits/<process>.<pid>.json, with its writer. `start`: of the process, as /proc counts it."""

    format: int
    process: str
    pid: int
    start: int
    place: str
    epoch: float  # adding it to `since` gives the date, for a reader on another machine


class Stretch:
    """Time that one thread or task spends waiting, or working. Entered once."""

    __slots__ = ("deadline_s", "is_wait", "name", "owners", "since")

    def __init__(self, name: str, owners: tuple[str, ...], deadline_s: float | None, is_wait: bool) -> None:
        self.name, self.owners, self.deadline_s, self.is_wait = name, owners, deadline_s, is_wait

    def __enter__(self) -> Stretch:
        self.since = time.monotonic()
        _OPEN[id(self)] = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        del _OPEN[id(self)]


def waiting(name: str, *owners: str, deadline_s: float | None) -> Stretch:
    """Register a wait for `name`, which all (or any) of `owners` must end.

    An owner is the name of a process (`engine-0`), the common part of such names (`engine`), or something outside the
    run (a URL). None: something in this process. `owners` may be replaced as they finish. `deadline_s` None: it
    ends with the wait around it. Equal names and owners are shown as one line with a count: leave numbers of single
    requests out.
    """
    return Stretch(name, owners, deadline_s, True)


def doing(name: str) -> Stretch:
    """Register a piece of work, so that `vime why-stuck` can show what this process does."""
    return Stretch(name, (), None, False)


def open_registry(run_dir: Path, process: str) -> None:
    """Keep the waits of this process on disk from now on. Called once per process; a second call replaces the first."""
    global _registry
    close_registry()
    _registry = _Registry(Path(run_dir) / DIRECTORY, process)


def close_registry() -> None:
    """Stop writing; the file stays as it is."""
    global _registry
    if _registry is not None:
        _registry.close()
        _registry = None


def run_directory() -> Path | None:
    """Return the run directory of this process."""
    return None if _registry is None else _registry.directory.parent


def peer(rank: int | None = None) -> str:
    """Return the process name of another rank of this trainer's world, or the common part of all."""
    world = "rank" if _registry is None else _registry.process.rpartition("-")[0]
    return world if rank is None else f"{world}-{rank}"


_OPEN: dict[int, Stretch] = {}
"""Every open wait and work of this process. A dict operation is one step of the interpreter, so no lock is needed."""
_registry: _Registry | None = None


class _Registry:
    """The file of one process, and the thread that keeps it.

    The thread *consumes* `_OPEN`, *waits for* the clock, and is *unblocked by* `close`.
    """

    def __init__(self, directory: Path, process: str) -> None:
        self.directory, self.process = directory, process
        self._path = directory / f"{process}.{os.getpid()}.json"
        seen = read_process(os.getpid())
        self._start = seen.start if seen is not None else 0
        self._place = place()
        self._epoch = time.time() - time.monotonic()
        self._written: WaitsNow | None = None
        self._touched, self._is_broken = 0.0, False
        self._reported: set[int] = set()
        self._closing = threading.Event()
        self.tick()
        self._thread = threading.Thread(target=self._run, name="vime-waits", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join(TICK_S)

    def tick(self) -> None:
        """Bring the file up to date; a disk that is full or gone is logged once and tried again."""
        now = time.monotonic()
        stretches = _OPEN.copy()
        self._report_overdue(stretches, now)
        found = _described(stretches, now)
        try:
            if found != self._written:
                self._write(found)
                self._written, self._touched = found, now
            elif now - self._touched >= HEARTBEAT_S:
                os.utime(self._path)
                self._touched = now
            self._is_broken = False
        except OSError as error:
            if not self._is_broken:
                logger.warning(
                    "%s cannot be written: %s. `vime why-stuck` will not see this process.", self._path, error
                )
            self._is_broken, self._written = True, None

    def _run(self) -> None:
        while not self._closing.wait(TICK_S):
            self.tick()

    def _write(self, found: WaitsNow) -> None:
        record: WaitsFile = {
            "format": FORMAT,
            "process": self.process,
            "pid": os.getpid(),
            "start": self._start,
            "place": self._place,
            "epoch": self._epoch,
            **found,
        }
        self.directory.mkdir(parents=True, exist_ok=True)
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps(record))
        partial.replace(self._path)

    def _report_overdue(self, stretches: dict[int, Stretch], now: float) -> None:
        self._reported &= stretches.keys()
        for key, stretch in stretches.items():
            if stretch.deadline_s is None or now - stretch.since < stretch.deadline_s + OVERDUE_GRACE_S:
                continue
            if key not in self._reported:
                self._reported.add(key)
                logger.warning(
                    "%s waits %.0f s for %s from %s, past its deadline of %g s. `vime why-stuck %s` says why.",
                    self.process, now - stretch.since, stretch.name, ", ".join(stretch.owners) or "itself",
                    stretch.deadline_s, self.directory.parent,
                )  # fmt: skip


def _described(stretches: dict[int, Stretch], now: float) -> WaitsNow:
    """Return what has lasted long enough, oldest first; of equal waits the oldest and their number."""
    groups: dict[tuple[str, tuple[str, ...], bool], list[Stretch]] = {}
    for stretch in stretches.values():
        groups.setdefault((stretch.name, stretch.owners, stretch.is_wait), []).append(stretch)
    oldest = [(min(group, key=lambda each: each.since), len(group)) for group in groups.values()]
    shown = sorted((each for each in oldest if now - each[0].since >= SHOWN_AFTER_S), key=lambda each: each[0].since)
    return {
        "waits": [
            {
                "name": stretch.name,
                "owners": list(stretch.owners),
                "count": count,
                "since": stretch.since,
                "deadline_s": stretch.deadline_s,
            }
            for stretch, count in shown
            if stretch.is_wait
        ],
        "work": [{"name": stretch.name, "since": stretch.since} for stretch, _ in shown if not stretch.is_wait],
    }
