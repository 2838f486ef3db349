"""The event log: order, survival, refusal."""

from __future__ import annotations

import json
import math
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vime.config.parse import Config
from vime.config.run import TrackingConfig
from vime.observability import events
from vime.observability.claims import read_claims
from vime.observability.events import EventKind, EventLog, note_span, read_events
from vime.observability.metrics import Tracker
from vime.observability.trace import trace_events
from vime.types import DataError


def test_events_of_all_processes_are_read_in_the_order_they_happened(tmp_path: Path) -> None:
    driver, manager = EventLog(tmp_path, "driver"), EventLog(tmp_path, "rollout-manager")
    driver.emit(EventKind.RUN_STARTED)
    manager.emit(EventKind.ROUND_GENERATED, rollout_id=0)
    driver.emit(EventKind.ROUND_TRAINED, rollout_id=0, version=1)
    events = read_events(tmp_path)
    assert [(event.process, event.kind) for event in events] == [
        ("driver", "run_started"),
        ("rollout-manager", "round_generated"),
        ("driver", "round_trained"),
    ]
    assert events[2].fields == {"rollout_id": 0, "version": 1}


def test_an_event_is_on_disk_when_emit_returns(tmp_path: Path) -> None:
    log = EventLog(tmp_path, "driver")
    log.emit(EventKind.RUN_STARTED)
    assert log.path.read_text().count("\n") == 1  # the log is still open: nothing was flushed by closing it


def test_a_torn_last_line_is_left_out_and_the_next_process_starts_on_a_new_line(tmp_path: Path) -> None:
    first = EventLog(tmp_path, "driver")
    first.emit(EventKind.RUN_STARTED)
    with first.path.open("a") as file:
        file.write('{"t": 1, "mono": 2, "proc')  # died inside a write
    assert [event.kind for event in read_events(tmp_path)] == ["run_started"]
    EventLog(tmp_path, "driver").emit(EventKind.RUN_FINISHED)
    assert [event.kind for event in read_events(tmp_path)] == ["run_started", "run_finished"]


def test_a_span_says_how_long_it_took_and_what_ended_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = EventLog(tmp_path, "driver")
    now = [100.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], time=time.time)
    monkeypatch.setattr("vime.observability.events.time", clock)

    def work() -> None:
        now[0] += 2.5
        raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"), log.span("train_round", rollout_id=3):
        work()
    started, ended = read_events(tmp_path)
    assert (started.kind, started.fields) == ("span_started", {"name": "train_round", "rollout_id": 3})
    assert (ended.kind, ended.fields["error"]) == ("span_ended", "RuntimeError: boom")
    assert ended.fields["duration_s"] == ended.monotonic_s - started.monotonic_s == 2.5


def test_a_span_that_another_process_measured_lies_where_it_was(tmp_path: Path, monkeypatch: Any) -> None:
    log = EventLog(tmp_path, "trainer-0")
    monkeypatch.setattr(events, "_log", log)
    note_span("pause_engines", 0.25, ago_s=0.5)
    log.emit(EventKind.RUN_FINISHED)
    started, ended, now = read_events(tmp_path)
    assert (started.kind, ended.kind, ended.fields["duration_s"]) == ("span_started", "span_ended", 0.25)
    assert ended.monotonic_s - started.monotonic_s >= 0.25
    assert now.monotonic_s - ended.monotonic_s >= 0.5


def test_the_end_of_a_long_log_and_a_log_without_spans_are_read_in_whole_lines(tmp_path: Path) -> None:
    log = EventLog(tmp_path, "driver")
    log.emit(EventKind.RUN_STARTED)
    with log.span("train"):
        pass
    log.emit(EventKind.ROUND_TRAINED, rollout_id=0, version=1)
    last = len(log.path.read_bytes().splitlines(keepends=True)[-1])
    # two bytes more than the last line: the line before is cut, and left out
    assert [event.kind for event in read_events(tmp_path, newest_bytes=last + 2)] == ["round_trained"]
    assert [event.kind for event in read_events(tmp_path, with_spans=False)] == ["run_started", "round_trained"]
    assert len(read_events(tmp_path, newest_bytes=1 << 20)) == 4


def test_no_flipped_bit_of_any_line_ends_a_reader(tmp_path: Path) -> None:
    """A name of a field that changed by a bit is JSON still: once it was a KeyError in the audit and in a resume."""
    log = EventLog(tmp_path, "driver")
    log.emit(EventKind.ROUND_TRAINED, rollout_id=12, version=13, receipt="ab12")
    log.emit(EventKind.WEIGHTS_CONFIRMED, version=13, content_hash="cd34", engines=["engine-0"])
    with log.span("train", rollout_id=12):
        pass
    whole = log.path.read_bytes()
    read = read_claims(tmp_path)
    assert (read.receipts, read.hashes) == ({12: {"ab12"}}, {13: {"cd34"}})
    for bit in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        log.path.write_bytes(damaged)
        read_claims(tmp_path)
        trace_events(read_events(tmp_path))


def test_a_run_claims_rows_for_its_receipts_and_in_a_run_without_that_metric_its_samples(tmp_path: Path) -> None:
    tracker = Tracker(TrackingConfig(), tmp_path, {})
    tracker.log(0, {"train/num_samples": 8.0, "train/num_rows": 11.0, "train/num_tokens": 90.0})
    tracker.log(1, {"train/num_samples": 8.0, "train/num_tokens": 70.0})
    tracker.close()
    assert read_claims(tmp_path).sizes == {0: (11, 90), 1: (8, 70)}
    assert read_claims(tmp_path).trained == {0}  # round 1 may be older than receipts


@pytest.mark.parametrize(
    ("changes", "is_unique"),
    [
        ({}, True),
        ({"data_source_path": "own.py:Source"}, False),
        ({"rollout_function_path": "own.py:rollout"}, False),
        ({"load_debug_rollout_data": "round_0.jsonl"}, False),  # the same round again and again
    ],
)
def test_groups_have_numbers_of_their_own_where_the_data_source_is_vime_s(
    tmp_path: Path, changes: dict[str, str], is_unique: bool
) -> None:
    assert not read_claims(tmp_path).has_unique_groups  # not known
    (tmp_path / "config.json").write_text(json.dumps(Config().replace(**changes).to_dict()))
    assert read_claims(tmp_path).has_unique_groups is is_unique


def test_an_event_without_a_time_is_left_out(tmp_path: Path) -> None:
    """Nothing can be drawn at NaN."""
    log = EventLog(tmp_path, "driver")
    log.emit(EventKind.RUN_STARTED)
    log.close()
    log.path.write_text(log.path.read_text() + '{"t": NaN, "mono": 1, "process": "driver", "kind": "run_finished"}\n')
    assert [entry["name"] for entry in trace_events(read_events(tmp_path))] == ["process_name", "run_started"]


def test_sizes_that_are_not_finite_are_no_claim(tmp_path: Path) -> None:
    tracker = Tracker(TrackingConfig(), tmp_path, {})
    tracker.log(0, {"train/num_samples": 8.0, "train/num_rows": math.inf, "train/num_tokens": 90.0})
    tracker.log(1, {"train/num_samples": 8.0, "train/num_tokens": math.nan})
    tracker.close()
    assert read_claims(tmp_path).sizes == {}


def test_threads_do_not_mix_their_lines(tmp_path: Path) -> None:
    log = EventLog(tmp_path, "driver")
    long = "x" * 10_000

    def emit() -> None:
        for _ in range(25):
            log.emit(EventKind.ROUND_GENERATED, note=long)

    threads = [threading.Thread(target=emit) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert [event.fields for event in read_events(tmp_path)] == [{"note": long}] * 100  # 4 threads x 25


def test_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'round_traned' is not a valid EventKind"):
        EventLog(tmp_path, "driver").emit("round_traned")


def test_a_field_that_the_log_writes_itself_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\['process'\]"):
        EventLog(tmp_path, "driver").emit(EventKind.PART_STARTED, process="engine-0")


@pytest.mark.parametrize("name", ["", "a/b", "../up", ".hidden"])
def test_a_process_name_that_is_no_file_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="cannot be a file name"):
        EventLog(tmp_path, name)


def test_reading_a_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="Expected the run directory"):
        read_events(tmp_path)
