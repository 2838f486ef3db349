"""benchmarks/fleet.py says what a run must not have done."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks import fleet
from benchmarks.fleet import Rate, faults, findings
from vime.observability.events import EventKind, EventLog


def said(path: Path, part: str, *, kills: int, restarts: int, trained: Sequence[int]) -> list[str]:
    """What `faults` yields for a run with these events, each up to its colon."""
    log = EventLog(path, "driver")
    for number in trained:
        log.emit(EventKind.ROUND_TRAINED, rollout_id=number, version=number + 1)
    for _ in range(restarts):
        log.emit(EventKind.RUN_RESTARTED, error="its engine died", load="")
    log.close()
    return [fault.partition(":")[0] for fault in faults(path, kills, part)]


@pytest.mark.parametrize(
    ("part", "restarts", "trained", "expected"),
    [
        ("engine", 0, [0, 1, 2], []),
        ("engine", 1, [0, 1, 2], ["1 restarts of the run, expected 0"]),
        ("queue", 0, [0, 2], ["rounds [1] were not trained"]),
        ("worker", 0, [0, 1, 1, 2], ["rounds [1] were trained again without a restart"]),
        ("trainer", 2, [0, 1, 1, 2], []),  # what the checkpoint did not have is trained again
        ("trainer", 3, [0, 1], ["3 restarts of the run, expected 2"]),
        ("driver", 0, [0, 0, 1], []),  # started by hand
        ("driver", 1, [0, 1], ["1 restarts of the run, expected 0"]),
    ],
)
def test_a_restart_that_should_not_be_and_a_round_trained_twice_or_never_are_faults(
    tmp_path: Path, part: str, restarts: int, trained: list[int], expected: list[str]
) -> None:
    assert said(tmp_path, part, kills=2, restarts=restarts, trained=trained) == expected


def test_an_audit_that_fails_is_a_fault(tmp_path: Path) -> None:
    [fault] = findings(tmp_path)  # no run
    assert fault.startswith("the audit ended with 2: ")


@pytest.mark.parametrize(
    ("faulty", "code", "last"),
    [((), 0, "kept: queue, ledger"), (("queue",), 1, "FAILED: queue: a round is gone")],
)
def test_a_fault_of_one_run_fails_the_command_and_the_other_runs_are_made(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], faulty: Sequence[str], code: int, last: str
) -> None:
    monkeypatch.setattr("sys.argv", ["fleet.py", "--part", "queue", "ledger"])
    monkeypatch.setattr(fleet, "kill_in_a_run", lambda options: ["a round is gone"] * (options.part in faulty))
    assert fleet.main() == code
    lines = capsys.readouterr().out.splitlines()
    assert (lines[-1], "ledger:" in lines) == (last, True)


def test_the_rate_of_rounds_is_their_tokens_over_their_seconds() -> None:
    rate = Rate()
    rate.add(30, 1)
    rate.add(10, 3)  # 40 tokens in 4 s, not the mean of 30 and 3.3
    assert rate.mean == 10
