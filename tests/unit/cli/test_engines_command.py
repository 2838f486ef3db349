"""`vime engines RUN` on the events of a driver."""

from __future__ import annotations

from pathlib import Path

import pytest

from vime.cli.main import main
from vime.observability.events import EventKind, EventLog
from vime.observability.run_dir import RunDir


@pytest.fixture
def run(tmp_path: Path):
    with RunDir.create(str(tmp_path / "run"), "{}") as claimed:
        yield claimed.path


def confirm(events: EventLog, version: int, *engines: str) -> None:
    events.emit(EventKind.WEIGHTS_CONFIRMED, version=version, content_hash="a", engines=list(engines))


def lines(capsys: pytest.CaptureFixture[str], run: Path) -> list[str]:
    assert main(["engines", str(run)]) == 0
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


def test_each_engine_has_its_state_version_and_losses(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = EventLog(run, "driver")
    events.emit(EventKind.RUN_STARTED)
    assert lines(capsys, run) == ["no engine has confirmed a version yet"]
    confirm(events, 0, "engine-0", "engine-1", "engine-2", "engine-10", "gateway")
    for engine in ("engine-1", "engine-2"):
        events.emit(EventKind.ENGINE_LOST, engine=engine, error="[red]exit code 137\nlast lines", start_in_s=0.0)
        events.emit(EventKind.ENGINE_STARTING, engine=engine)
    events.emit(EventKind.ENGINE_READY, engine="engine-2")
    confirm(events, 7, "engine-0", "engine-2", "engine-10")
    events.emit(EventKind.ENGINE_READMITTED, engine="engine-2", version=7, lost_s=9.0)
    found = lines(capsys, run)
    assert found[1:] == [
        "engine-0 serves 0:00 7 never",
        "engine-1 starts again 0:00 none once [red]exit code 137\\nlast lines",
        "engine-2 serves 0:00 7 once [red]exit code 137\\nlast lines",
        "engine-10 serves 0:00 7 never",
    ]
    events.emit(EventKind.RUN_RESTARTED, error="all engines are lost", load="x")
    assert "engine-0 starts with the run 0:00 none never" in lines(capsys, run)


def test_of_a_run_that_is_over_the_last_state_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunDir.create(str(tmp_path / "run"), "{}") as claimed:
        events = EventLog(claimed.path, "driver")
        events.emit(EventKind.RUN_STARTED)
        confirm(events, 3, "engine-0")
        events.emit(EventKind.RUN_FINISHED)
    assert lines(capsys, claimed.path)[1:] == [
        "engine-0 serves 0:00 3 never",
        "as it was when the run ended (finished)",
    ]


def test_what_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["engines", str(tmp_path / "nothing")]) == 2
    assert "no directory" in capsys.readouterr().err


def test_what_users_added_and_drained_is_shown_and_forgotten_when_the_run_starts_its_parts_again(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events = EventLog(run, "driver")
    confirm(events, 0, "engine-0", "engine-1")
    events.emit(EventKind.ENGINE_ADDED, engine="engine-2")
    events.emit(EventKind.ENGINE_DRAINING, engine="engine-1")
    assert lines(capsys, run)[2:] == [
        "engine-1 gets no new requests 0:00 0 never",
        "engine-2 starts, as was asked 0:00 none never",
    ]
    confirm(events, 1, "engine-0", "engine-1", "engine-2")  # a draining engine gets updates
    events.emit(EventKind.ENGINE_DRAINING, engine="engine-0")
    events.emit(EventKind.ENGINE_STOPPED, engine="engine-0", reason="drained")
    assert lines(capsys, run)[1:] == [
        "engine-0 stopped, as was asked 0:00 none never drained",
        "engine-1 gets no new requests 0:00 1 never",
        "engine-2 serves 0:00 1 never",
    ]
    events.emit(EventKind.RUN_RESTARTED, error="lost", load="x")
    assert lines(capsys, run)[1:] == [
        "engine-0 starts with the run 0:00 none never drained",
        "engine-1 starts with the run 0:00 none never",
    ]
