"""What happened in a run, in order: one append-only JSON-lines file for each process, merged when read.

An event is one line, handed to the kernel in one write before `emit` returns: it survives kill -9 of its process (not
a power cut; the ledger is the truth about groups, events are for the reader). `EventKind` is the whole vocabulary,
docs/metrics.md has the spans; `vime report` makes a Chrome trace of them (trace.py).
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from vime.types import DataError
from vime.utils.waits import doing

logger = logging.getLogger(__name__)

_PROCESS_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_OWN_FIELDS = ("t", "mono", "process", "kind")
_SPAN = b'"kind": "span_'  # as `emit` writes it


class EventKind(StrEnum):
    """Every kind of event, with its fields besides time and process."""

    RUN_STARTED = "run_started"
    RUN_FINISHED = "run_finished"
    RUN_FAILED = "run_failed"  # error
    RUN_RESTARTED = "run_restarted"  # error, load
    PART_STARTED = "part_started"  # part, duration_s
    ROUND_GENERATED = "round_generated"  # rollout_id
    WORKER_LOST = "worker_lost"  # worker, prompts; within_s: from its last sign of life until others had its prompts
    ENGINE_LOST = "engine_lost"  # engine, error, start_in_s
    ENGINE_STARTING = "engine_starting"  # engine: it is started again
    ENGINE_WITHOUT_NODE = "engine_without_node"  # engine: no node of the cluster has room; it starts when one has
    ENGINE_READY = "engine_ready"  # engine: it responds, and gets weights with the next update
    ENGINE_READMITTED = "engine_readmitted"  # engine, version, lost_s
    ENGINE_ADDED = "engine_added"  # engine: one more, asked for by a user; it starts
    ENGINE_DRAINING = "engine_draining"  # engine: it gets no new request, asked for by a user
    ENGINE_STOPPED = "engine_stopped"  # engine, reason: it is not started again
    ROUTER_LOST = "router_lost"  # router, error, start_in_s
    ROUTER_READY = "router_ready"  # router, lost_s: it responds again, at its address
    QUEUE_LOST = "queue_lost"  # error, start_in_s: a part of TransferQueue died
    QUEUE_READY = "queue_ready"  # lost_s: another one holds what is still to be read
    DISAGREEMENT = "disagreement"  # rollout_id, difference, threshold, cause, path of its record
    ROUND_TRAINED = "round_trained"  # rollout_id, version, receipt
    WEIGHTS_CONFIRMED = "weights_confirmed"  # version, content_hash, engines
    CHECKPOINT_SAVED = "checkpoint_saved"  # rollout_id, path
    EVAL_DONE = "eval_done"  # rollout_id, metrics by name
    SPAN_STARTED = "span_started"  # name
    SPAN_ENDED = "span_ended"  # name, duration_s, error


_LOOKED_UP: Mapping[str, Mapping[str, type]] = {
    EventKind.ROUND_TRAINED: {"rollout_id": int, "version": int},
    EventKind.WEIGHTS_CONFIRMED: {"version": int, "content_hash": str},
    EventKind.SPAN_STARTED: {"name": str},
    EventKind.SPAN_ENDED: {"name": str},
}
"""Fields that readers rely on. A line where a damaged disk changed a name is still JSON, but not an event."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One line of the log."""

    time_s: float  # unix time, comparable between processes of one machine
    monotonic_s: float  # comparable inside one process only; never jumps
    process: str
    kind: str  # an EventKind, or a kind of a newer Vime
    fields: Mapping[str, object] = field(default_factory=dict)


class EventLog:
    """Appends the events of one process to `RUN_DIR/events/<process>.jsonl`. Safe to call from any thread."""

    def __init__(self, run_dir: Path, process: str) -> None:
        if not _PROCESS_NAME.fullmatch(process):
            raise ValueError(f"EventLog: process name {process!r} cannot be a file name; use letters, digits, . _ -")
        self.process = process
        self.path = Path(run_dir) / "events" / f"{process}.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        _end_torn_line(self._file)
        self._is_broken = False

    def emit(self, kind: str, *, ago_s: float = 0.0, **fields: object) -> None:
        """Append one event. `kind` is an EventKind; fields are JSON values (others are written as text). On a full disk
        it is lost, with a warning: what must not be lost reports that itself (spool, ledger, checkpoint)."""
        self._write(kind, fields, ago_s=ago_s)

    def _write(self, kind: str, fields: Mapping[str, object], *, ago_s: float = 0.0) -> None:
        record: dict[str, object] = {
            "t": time.time() - ago_s,
            "mono": time.monotonic() - ago_s,
            "process": self.process,
            "kind": str(EventKind(kind)),
        }
        clash = sorted(set(fields) & set(_OWN_FIELDS))
        if clash:
            raise ValueError(f"event {kind}: the fields {clash} are written by the log itself; rename them")
        line = json.dumps({**record, **fields}, default=str) + "\n"
        with self._lock:
            if self._file < 0:
                raise ValueError(f"event {kind}: the log {self.path} is closed")
            try:
                if self._is_broken:
                    _end_torn_line(self._file)
                _write_all(self._file, line.encode())
                self._is_broken = False
            except OSError as error:
                if not self._is_broken:
                    logger.warning("%s cannot be written: %s. Events are lost until it can be.", self.path, error)
                self._is_broken = True

    @contextlib.contextmanager
    def span(self, name: str, **fields: object) -> Iterator[None]:
        """Log a piece of work: `span_started`, then `span_ended` with its duration, also when the work raises.
        Meanwhile `vime why-stuck` shows it."""
        self._write(EventKind.SPAN_STARTED, {"name": name, **fields})
        start, failure = time.monotonic(), None
        try:
            with _doing(name, fields):
                yield
        except BaseException as error:
            failure = f"{type(error).__name__}: {error}"
            raise
        finally:
            duration_s = time.monotonic() - start
            ended = {"name": name, **fields, "duration_s": duration_s, "error": failure}
            self._write(EventKind.SPAN_ENDED, ended)

    def close(self) -> None:
        with self._lock:
            if self._file >= 0:
                os.close(self._file)
                self._file = -1


def open_events(run_dir: Path, process: str) -> EventLog:
    """Open the log of this process, where `span` writes from now on. Called once per process; a second call replaces
    the first."""
    global _log
    _log = EventLog(run_dir, process)
    return _log


def span(name: str, **fields: object) -> AbstractContextManager[object]:
    """`EventLog.span` in the log of this process. Where none was opened (a test, an example) only the registry of waits
    is updated."""
    return _doing(name, fields) if _log is None else _log.span(name, **fields)


def note_span(name: str, duration_s: float, *, ago_s: float = 0.0) -> None:
    """Log a span that another process has measured; it ended `ago_s` ago."""
    if _log is not None:
        _log.emit(EventKind.SPAN_STARTED, ago_s=ago_s + duration_s, name=name)
        _log.emit(EventKind.SPAN_ENDED, ago_s=ago_s, name=name, duration_s=duration_s, error=None)


_log: EventLog | None = None


def _doing(name: str, fields: Mapping[str, object]) -> AbstractContextManager[object]:
    """Leave out numbers of single groups: many are in the same step, and `vime why-stuck` shows it once."""
    shown = ", ".join(f"{key} {value}" for key, value in fields.items() if key not in ("group", "attempt"))
    return doing(f"{name} ({shown})" if shown else name)


def read_events(
    run_dir: Path, process: str = "*", *, newest_bytes: int | None = None, with_spans: bool = True
) -> list[Event]:
    """Return all events of `process` (default: of all), oldest first; or those in the `newest_bytes` of each file. A
    line that a crash tore is left out and named in a warning. Most lines are spans: without them a long run is read
    quickly."""
    directory = Path(run_dir) / "events"
    if not directory.is_dir():
        raise DataError(f"{run_dir}: has no events directory. Expected the run directory of a Vime run.")
    paths = sorted(directory.glob(f"{process}.jsonl"))
    events = [event for path in paths for event in _read_file(path, newest_bytes, with_spans)]
    return sorted(events, key=lambda event: event.time_s)


def outcome(events: Iterable[Event]) -> str:
    """Return how the run ended: "finished", "failed: why", or "not finished"."""
    found = "not finished"
    for event in events:
        if event.kind == EventKind.RUN_STARTED:
            found = "not finished"
        elif event.kind == EventKind.RUN_FINISHED:
            found = "finished"
        elif event.kind == EventKind.RUN_FAILED:
            found = f"failed: {event.fields.get('error', 'no reason given')}"
    return found


def _read_file(path: Path, newest_bytes: int | None, with_spans: bool) -> Iterator[Event]:
    with path.open("rb") as file:
        skipped = 0 if newest_bytes is None else max(0, os.fstat(file.fileno()).st_size - newest_bytes)
        if skipped:
            file.seek(skipped)
            file.readline()  # the rest of a line
        data = file.read()
    for number, line in enumerate(data.split(b"\n"), start=1):
        if not line.strip() or (not with_spans and _SPAN in line):
            continue
        try:
            event = _read_line(line)
        except (ValueError, KeyError, TypeError):
            where = f"{path}:{number}" if not skipped else f"{path}: line {number} behind byte {skipped}"
            logger.warning("%s: left out a line that is not an event (torn by a crash?)", where)
        else:
            yield event


def _read_line(line: bytes) -> Event:
    """Parse a line. ValueError, KeyError or TypeError for what no writer of ours has written."""
    record = json.loads(line)
    kind = str(record["kind"])
    for name, expected in _LOOKED_UP.get(kind, {}).items():
        if not isinstance(record[name], expected):
            raise TypeError(name)
    if not math.isfinite(record["t"]):
        raise ValueError("t")
    return Event(
        time_s=float(record["t"]),
        monotonic_s=float(record["mono"]),
        process=str(record["process"]),
        kind=kind,
        fields={name: value for name, value in record.items() if name not in _OWN_FIELDS},
    )


def _end_torn_line(file: int) -> None:
    """End the line of a process that died inside a write, so that ours starts on a new one."""
    size = os.fstat(file).st_size
    if size and os.pread(file, 1, size - 1) != b"\n":
        os.write(file, b"\n")


def _write_all(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]
