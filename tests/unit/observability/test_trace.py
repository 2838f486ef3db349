"""The trace of a run: what Perfetto is given for spans, nested, side by side and unfinished, and for events."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vime.observability import events as events_module
from vime.observability.events import Event, EventLog, open_events, read_events, span
from vime.observability.trace import trace_events, write_trace


def event(time_s: float, kind: str, process: str = "driver", **fields: object) -> Event:
    return Event(time_s=time_s, monotonic_s=time_s, process=process, kind=kind, fields=fields)


def began(time_s: float, name: str, **fields: object) -> Event:
    return event(time_s, "span_started", name=name, **fields)


def ended(time_s: float, name: str, duration_s: float, error: str | None = None, **fields: object) -> Event:
    return event(time_s, "span_ended", name=name, duration_s=duration_s, error=error, **fields)


def spans(found: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [(entry["name"], entry["ts"], entry.get("dur"), entry["tid"]) for entry in found if entry["ph"] in "XB"]


def test_a_span_inside_another_shares_its_row_and_one_beside_it_gets_its_own() -> None:
    # microseconds since the first event, at 100 s: round 0 to 10 s, inside it groups 1 to 4 s and 2 to 5 s
    history = [
        began(100.0, "round"), began(101.0, "group", group=1), began(102.0, "group", group=2),
        ended(104.0, "group", 3.0, group=1), ended(105.0, "group", 3.0, group=2), ended(110.0, "round", 10.0),
    ]  # fmt: skip
    assert spans(trace_events(history)) == [
        ("round", 0, 10_000_000, 1),
        ("group", 1_000_000, 3_000_000, 1),
        ("group", 2_000_000, 3_000_000, 2),
    ]


def test_a_row_is_used_again_when_what_lay_in_it_is_over() -> None:
    history = [began(0.0, "a"), ended(1.0, "a", 1.0), began(2.0, "b"), ended(3.0, "b", 1.0)]
    assert [row for *_, row in spans(trace_events(history))] == [1, 1]


def test_a_span_whose_process_was_killed_begins_and_does_not_end() -> None:
    found = trace_events([began(0.0, "publish", version=3), event(2.0, "run_started")])
    [unfinished] = [entry for entry in found if entry["ph"] == "B"]
    assert (unfinished["name"], unfinished["args"]) == ("publish", {"version": 3})


def test_a_span_is_as_long_as_it_measured_when_the_date_was_set_back_meanwhile() -> None:
    found = trace_events([began(1000.0, "train"), ended(400.0, "train", 5.0)])
    assert [length for _, _, length, _ in spans(found)] == [5_000_000]


def test_an_error_and_other_events_are_in_the_trace_under_their_process() -> None:
    history = [
        began(0.0, "save"), ended(1.0, "save", 1.0, "OSError: disk full"),
        event(2.0, "queue_lost", "rollout-manager", start_in_s=7),
    ]  # fmt: skip
    found = trace_events(history)
    names = {entry["pid"]: entry["args"]["name"] for entry in found if entry["ph"] == "M"}
    assert [entry["args"]["error"] for entry in found if entry["ph"] == "X"] == ["OSError: disk full"]
    [moment] = [entry for entry in found if entry["ph"] == "i"]
    assert (moment["name"], names[moment["pid"]], moment["args"]) == (
        "queue_lost", "rollout-manager", {"start_in_s": 7},
    )  # fmt: skip


def test_spans_go_to_the_log_that_the_process_opened(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(events_module, "_log", None)
    with span("nobody_listens"):  # no log: only the registry of waits is told
        pass
    EventLog(tmp_path, "other")  # a log of its own does not become the process's
    open_events(tmp_path, "driver")
    with span("train", rollout_id=2):
        pass
    document = json.loads(write_trace(tmp_path).read_text())
    assert [name for name, *_ in spans(document["traceEvents"])] == ["train"]
    assert [entry.process for entry in read_events(tmp_path)] == ["driver", "driver"]
