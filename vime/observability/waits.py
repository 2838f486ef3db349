"""The processes of a run as seen from outside: which live, what each waits for and works on.

Reads RUN_DIR/waits, which `vime/utils/waits.py` writes in each of them, and /proc.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from vime.utils.processes import ON_DISK, STOPPED, TRACED, SeenProcess, place, read_processes, title, tree
from vime.utils.waits import DIRECTORY, FORMAT, HEARTBEAT_S, WaitsFile

logger = logging.getLogger(__name__)

SILENT_AFTER_S = 6 * HEARTBEAT_S
BUSY_SHARE = 0.1
"""Of one CPU. An idle Ray worker, router or engine uses a few hundredths."""
_RAY_ACTOR = re.compile(r"ray::(?P<name>\w+)")
_RAY_OWN = ("IDLE", "DashboardAgent", "RuntimeEnvAgent")


class _SeenFile(WaitsFile):
    """A process's file."""

    touched: float  # unix time of its last change


class State(StrEnum):
    """State of a process of the run."""

    ALIVE = "alive"
    DEAD = "DEAD"
    STOPPED = "STOPPED"  # SIGSTOP, Ctrl-Z or a debugger, itself or a process below it
    SILENT = "SILENT"  # its registry does not run: dead or stopped on another host, or a blocked interpreter here


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenWait:
    """A wait of one process; `count` equal ones, of which the oldest has lasted `age_s`."""

    name: str
    owners: tuple[str, ...] = ()
    count: int = 1
    age_s: float
    deadline_s: float | None = None

    @property
    def left_s(self) -> float | None:
        """Return the seconds to its deadline."""
        return None if self.deadline_s is None else self.deadline_s - self.age_s


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenWork:
    """What a process works on."""

    name: str
    age_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProcess:
    """One process of a run. Of a dead one ages are those when it was seen last."""

    name: str
    pid: int
    state: State = State.ALIVE
    detail: str = ""  # which process below it is stopped, or on which host it was
    cpu_share: float | None = None  # of one CPU, with everything below it; None: not measured
    waits: tuple[SeenWait, ...] = ()  # oldest first
    work: tuple[SeenWork, ...] = ()  # outermost first
    last_seen: float  # unix time

    @property
    def is_busy(self) -> bool:
        """Whether it computes, or may do so unseen."""
        return self.cpu_share is None or self.cpu_share >= BUSY_SHARE


def read_run(run_dir: Path, *, sample_s: float) -> list[RunProcess]:
    """Return every known process by name. Takes `sample_s` to see which of them compute; 0: does not look."""
    records = _newest(_read(path) for path in sorted((Path(run_dir) / DIRECTORY).glob("*.json")))
    before, asked = read_processes(), time.monotonic()
    here = place() if before else ""  # without /proc every process is elsewhere

    def is_here(record: _SeenFile, table: dict[int, SeenProcess]) -> bool:
        seen = table.get(record["pid"])
        return record["place"] == here and seen is not None and seen.start == record["start"]

    if sample_s and any(is_here(record, before) for record in records):
        time.sleep(sample_s)
    table, elapsed_s = (read_processes(), time.monotonic() - asked) if sample_s else (before, 0.0)
    living = {record["pid"]: record["process"] for record in records if is_here(record, table)}
    driver = next((pid for pid, name in living.items() if name == "driver"), None)
    strangers = _unregistered(driver, table, living)
    roots = {**living, **strangers}
    found = [_process(record, is_here=record["place"] == here, is_living=record["pid"] in living) for record in records]
    found += [RunProcess(name=name, pid=pid, last_seen=time.time()) for pid, name in strangers.items()]
    seen = [
        _looked_at(process, tree(process.pid, table, without=roots), before, elapsed_s)
        if process.pid in roots and process.state is not State.DEAD
        else process
        for process in found
    ]
    return sorted(seen, key=lambda process: (process.name != "driver", process.name))


def _read(path: Path) -> _SeenFile | None:
    """Read a file with the time it was last touched; None when it is not a process's file."""
    try:
        record = json.loads(path.read_text())
        return _checked(record, path.stat().st_mtime) if record["format"] == FORMAT else None
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        logger.warning("%s: left out, it cannot be read: %s: %s", path, type(error).__name__, error)
        return None


def _checked(record: WaitsFile, touched: float) -> _SeenFile:
    """Make every field what its readers expect: ValueError, KeyError or TypeError where that cannot be done."""
    return {
        "format": FORMAT,
        "process": str(record["process"]),
        "pid": int(record["pid"]),
        "start": int(record["start"]),
        "place": str(record["place"]),
        "epoch": float(record["epoch"]),
        "waits": [
            {
                "name": str(wait["name"]),
                "owners": [str(owner) for owner in wait["owners"]],
                "count": int(wait["count"]),
                "since": float(wait["since"]),
                "deadline_s": None if wait["deadline_s"] is None else float(wait["deadline_s"]),
            }
            for wait in record["waits"]
        ],
        "work": [{"name": str(work["name"]), "since": float(work["since"])} for work in record["work"]],
        "touched": touched,
    }


def _newest(records: Iterable[_SeenFile | None]) -> list[_SeenFile]:
    """Keep the newest: a process that was started again left an older file under its name."""
    newest: dict[str, _SeenFile] = {}
    for record in records:
        if record is not None:
            held = newest.get(record["process"])
            if held is None or held["touched"] <= record["touched"]:
                newest[record["process"]] = record
    return list(newest.values())


def _process(record: _SeenFile, *, is_here: bool, is_living: bool) -> RunProcess:
    """Return the process of a file; `is_here`: its pid is one of this machine."""
    is_quiet = time.time() - record["touched"] > SILENT_AFTER_S
    state = State.DEAD if is_here and not is_living else State.SILENT if is_quiet else State.ALIVE
    last_seen = record["touched"] if state is not State.ALIVE else time.time()
    # monotonic time is one clock for all processes of a host; elsewhere, or back then, the date has to do
    now = time.monotonic() if is_living else last_seen - record["epoch"]
    host = record["place"].split(" ")[0]
    return RunProcess(
        name=record["process"],
        pid=record["pid"],
        state=state,
        detail="" if is_here else f"on {host}",
        waits=tuple(
            SeenWait(
                name=wait["name"],
                owners=tuple(wait["owners"]),
                count=wait["count"],
                age_s=max(0.0, now - wait["since"]),
                deadline_s=wait["deadline_s"],
            )
            for wait in record["waits"]
        ),
        work=tuple(SeenWork(name=work["name"], age_s=max(0.0, now - work["since"])) for work in record["work"]),
        last_seen=last_seen,
    )


def _looked_at(
    process: RunProcess, members: list[SeenProcess], before: dict[int, SeenProcess], elapsed_s: float
) -> RunProcess:
    """Add what /proc says about it and the processes below it."""
    held = next((member for member in members if member.state in (STOPPED, TRACED)), None)
    if held is not None:
        how = "SIGSTOP" if held.state == STOPPED else "a debugger holds it"
        who = how if held.pid == process.pid else f"{title(held.pid)}, pid {held.pid}: {how}"
        return replace(process, state=State.STOPPED, detail=who)
    if not elapsed_s:
        return process
    used_s = sum(member.cpu_s - before[member.pid].cpu_s for member in members if member.pid in before)
    on_disk = any(member.state == ON_DISK for member in members)
    share = used_s / elapsed_s
    return replace(
        process,
        cpu_share=max(share, BUSY_SHARE) if on_disk else share,
        detail="waits for a disk" if on_disk else process.detail,
    )


def _unregistered(driver: int | None, table: dict[int, SeenProcess], living: dict[int, str]) -> dict[int, str]:
    """Find actors of this run's own Ray that keep no registry (TransferQueue's), by the name of their class."""
    if driver is None:
        return {}
    found = {}
    for member in tree(driver, table, without=living):
        actor = _RAY_ACTOR.match(title(member.pid))
        if actor is not None and actor["name"] not in _RAY_OWN:
            found[member.pid] = actor["name"]
    names = list(found.values())
    return {pid: f"{name}-{names[:at].count(name)}" for at, (pid, name) in enumerate(found.items())}
