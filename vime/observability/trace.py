"""The spans and events of a run as a Chrome trace: RUN_DIR/trace.json, for ui.perfetto.dev or chrome://tracing.

Made from the event logs whenever a report is shown, so a killed run has one too. Spans of one process that overlap
without nesting get separate rows. A span whose process died in it has no end.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from vime.observability.events import Event, EventKind, read_events

TRACE_FILE = "trace.json"
NEWEST_BYTES = 4 << 20
"""Bytes of each process's log that are read: about its last 12,000 spans. No viewer opens the trace of a month."""
_OWN = ("name", "duration_s", "error")
_JUMP_S = 0.1  # beyond this, dates and the measured duration disagree: the date was changed meanwhile


@dataclass(slots=True)
class _Span:
    process: str
    name: str
    start_s: float  # unix time
    end_s: float | None  # None: its process never logged it
    arguments: dict[str, object]


def write_trace(run_dir: Path) -> Path:
    """Write the trace of all processes, of a long run its end. Returns its path."""
    path = Path(run_dir) / TRACE_FILE
    events = read_events(run_dir, newest_bytes=NEWEST_BYTES)
    document = {"displayTimeUnit": "ms", "traceEvents": trace_events(events)}
    path.write_text(json.dumps(document, default=str))
    return path


def trace_events(events: Iterable[Event]) -> list[dict[str, object]]:
    """Trace Event Format: `M` names a process, `X` is a span with its duration, `B` one without end, `i` a moment.
    Times are microseconds since the first event."""
    events = list(events)
    origin_s = min((event.time_s for event in events), default=0.0)
    pids = {name: pid for pid, name in enumerate(dict.fromkeys(event.process for event in events), start=1)}
    found: list[dict[str, object]] = [
        {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}} for name, pid in pids.items()
    ]
    for event in events:
        if event.kind not in (EventKind.SPAN_STARTED, EventKind.SPAN_ENDED):
            time_us = _microseconds(event.time_s - origin_s)
            place = {"pid": pids[event.process], "tid": 0, "s": "p"}
            found.append({"ph": "i", "name": event.kind, "ts": time_us, **place, "args": dict(event.fields)})
    rows: dict[str, list[list[float]]] = {}
    for span in sorted(_spans(events), key=lambda span: (span.start_s, -(span.end_s or span.start_s))):
        row = _row(rows.setdefault(span.process, []), span)
        entry = {"name": span.name, "pid": pids[span.process], "tid": row, "args": span.arguments}
        entry["ts"] = _microseconds(max(0.0, span.start_s - origin_s))
        if span.end_s is None:
            found.append({"ph": "B", **entry})
        else:
            found.append({"ph": "X", "dur": _microseconds(span.end_s - span.start_s), **entry})
    return found


def _spans(events: Iterable[Event]) -> list[_Span]:
    """Pair each end with the oldest beginning of the same name and arguments; a beginning without end is kept."""
    spans: list[_Span] = []
    open_spans: dict[str, list[_Span]] = {}
    for event in events:
        if event.kind not in (EventKind.SPAN_STARTED, EventKind.SPAN_ENDED):
            continue
        arguments = {key: value for key, value in event.fields.items() if key not in _OWN}
        key = json.dumps([event.process, event.fields["name"], arguments], default=str)
        if event.kind == EventKind.SPAN_STARTED:
            span = _Span(event.process, str(event.fields["name"]), event.time_s, None, arguments)
            spans.append(span)
            open_spans.setdefault(key, []).append(span)
        elif open_spans.get(key):
            span, duration_s = open_spans[key].pop(0), _seconds(event.fields)
            is_jump = abs(event.time_s - span.start_s - duration_s) > _JUMP_S
            span.end_s = span.start_s + duration_s if is_jump else event.time_s
            if event.fields.get("error"):
                span.arguments["error"] = event.fields["error"]
    return spans


def _row(rows: list[list[float]], span: _Span) -> int:
    """Return the first row, from 1, in which the span nests inside the open ones. A row is a list of open ends."""
    end_s = float("inf") if span.end_s is None else span.end_s
    for number, open_ends in enumerate(rows, start=1):
        while open_ends and open_ends[-1] <= span.start_s:
            open_ends.pop()
        if not open_ends or end_s <= open_ends[-1]:
            open_ends.append(end_s)
            return number
    rows.append([end_s])
    return len(rows)


def _seconds(fields: Mapping[str, object]) -> float:
    value = fields.get("duration_s")
    return float(value) if isinstance(value, int | float) else 0.0


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)
