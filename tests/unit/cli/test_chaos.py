"""`vime chaos`: a run is killed where it was told to be, started again, and judged by what it published and left."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from vime.cli import chaos, chaos_run
from vime.cli.chaos import EVERY, MATRIX, OF_GATEWAY, OF_WORKERS, PHASES, in_runs, parse_case, random_cases
from vime.cli.chaos_faults import How
from vime.cli.chaos_members import TARGETS
from vime.cli.chaos_run import Case, ChaosRun, Outcome, Plan
from vime.cli.main import main
from vime.types import ConfigError
from vime.utils.failpoints import Point

SCRIPT = str(Path(__file__).resolve().parents[2] / "helpers" / "chaos_script.py")
EXPECTED = {version: str(version) for version in range(5)}
AT_THE_SECOND_STEP = Case(target="driver", point=Point.OPTIMIZER, count=2)


def complete(tmp_path: Path, *cases: Case, fault: str = "") -> Outcome:
    plan = Plan(out=tmp_path / "out", script=SCRIPT, flags=("--fault", fault), deadline_s=60)
    return ChaosRun(plan, "run", expected=EXPECTED).complete(cases)


def killed(outcome: Outcome) -> list[str]:
    return [str(strike) for strike in outcome.strikes]


def test_a_run_that_is_killed_and_goes_on_is_good(tmp_path: Path) -> None:
    outcome = complete(tmp_path, AT_THE_SECOND_STEP)
    assert killed(outcome) == ["driver@trainer.optimizer:2"]
    assert outcome.codes == [-signal.SIGKILL, 0]
    assert (outcome.weights, outcome.left, outcome.num_kills) == ("equal", [], 1)
    assert outcome.is_good


def test_each_kill_hits_an_attempt_of_its_own(tmp_path: Path) -> None:
    # each attempt counts its passes from 1 again: the second one dies at its third version
    later = Case(target="driver", point=Point.OPTIMIZER, count=3)
    outcome = complete(tmp_path, AT_THE_SECOND_STEP, later)
    assert outcome.codes == [-signal.SIGKILL, -signal.SIGKILL, 0]
    assert outcome.is_good


def test_a_point_that_is_not_reached_is_said(tmp_path: Path) -> None:
    outcome = complete(tmp_path, Case(target="driver", point=Point.CLEAR, count=1))
    assert killed(outcome) == ["driver@driver.clear:1 (not reached)"]
    assert (outcome.codes, outcome.num_kills) == ([0], 0)


def test_a_target_that_is_not_there_is_said_and_the_run_goes_on(tmp_path: Path) -> None:
    outcome = complete(tmp_path, Case(target="ledger", point=Point.OPTIMIZER, count=2))
    assert killed(outcome) == ["ledger@trainer.optimizer:2 (was not there)"]
    assert outcome.codes == [0]


def test_weights_that_differ_after_a_restart_are_found(tmp_path: Path) -> None:
    outcome = complete(tmp_path, AT_THE_SECOND_STEP, fault="forgets")
    assert outcome.weights == "version 0 is another"
    assert not outcome.is_good


@pytest.mark.parametrize("fault", ["leaves", "hides"])
def test_a_process_that_outlives_its_run_is_found_and_ended(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chaos_run, "END_GRACE_S", 0.5)
    outcome = complete(tmp_path, AT_THE_SECOND_STEP, fault=fault)
    assert outcome.left == ["sleep 300"]
    assert not [process for process in psutil.Process().children(recursive=True) if "sleep" in process.name()]


def test_a_run_that_never_becomes_complete_is_given_up(tmp_path: Path) -> None:
    outcome = complete(tmp_path, AT_THE_SECOND_STEP, fault="fails")
    assert outcome.codes == [-signal.SIGKILL, 3, 3, 3, 3]  # one kill and three more restarts, then no more
    assert not outcome.is_good


def test_the_command_writes_a_table_and_fails_with_its_worst_row(tmp_path: Path) -> None:
    case = ["--case", "driver@trainer.optimizer:2", "--script", SCRIPT]
    assert main(["chaos", str(tmp_path / "good"), *case, "--", "--fault", "none"]) == 0
    table = (tmp_path / "good" / "table.md").read_text().splitlines()
    went_on = "ended with -9, was started again"
    assert table[-1] == f"| 000 | driver@trainer.optimizer:2 | {went_on} | - | equal | - | none | good |"
    known = ["--undisturbed", str(tmp_path / "good" / "undisturbed")]
    assert main(["chaos", str(tmp_path / "again"), *case, *known, "--", "--fault", "none"]) == 0
    assert not (tmp_path / "again" / "undisturbed").exists()
    assert main(["chaos", str(tmp_path / "none"), *case, "--undisturbed", str(tmp_path), "--", "--fault", "none"]) == 2
    assert main(["chaos", str(tmp_path / "bad"), *case, "--", "--fault", "forgets"]) == 3
    assert main(["chaos", str(tmp_path / "own"), "--own-weights", *case, "--", "--fault", "forgets"]) == 3
    other = ["--own-weights", *case, *known, "--", "--fault", "differs"]
    assert main(["chaos", str(tmp_path / "differs"), *other]) == 0
    assert main(["chaos", str(tmp_path / "bad"), *case, "--", "--fault", "forgets"]) == 2  # the directory is used


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_command_that_is_told_to_stop_ends_its_run_first(number: signal.Signals, tmp_path: Path) -> None:
    command = [*(sys.executable, "-m", "vime", "chaos", str(tmp_path / "out")), "--script", SCRIPT]
    command += ["--", "--fault", "works"]
    former = signal.signal(number, signal.default_int_handler)  # what these tests are told to ignore is inherited
    chaos = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    signal.signal(number, former)
    events, ends = tmp_path / "out/undisturbed/events/driver.jsonl", time.monotonic() + 60
    while not events.exists() or "first_weights" not in events.read_text():  # it waits from then on, to be killed
        assert time.monotonic() < ends
        time.sleep(0.05)
    members = psutil.Process(chaos.pid).children(recursive=True)
    chaos.send_signal(number)
    _, said = chaos.communicate(timeout=60)
    assert members
    assert not [member for member in members if member.is_running()]
    assert (chaos.returncode, said) == (130, "vime chaos: stopped before it was done.\n")


def test_a_disk_that_was_filled_has_room_again_when_the_command_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    emptied: list[str] = []

    def stopped(_run: ChaosRun) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(chaos_run, "fill_disk", lambda _out: lambda: emptied.append("disk"))
    monkeypatch.setattr(ChaosRun, "_wait_for_end", stopped)
    with pytest.raises(KeyboardInterrupt):
        complete(tmp_path, Case(target="disk", point=Point.OPTIMIZER, count=2))
    assert emptied == ["disk"]


@pytest.mark.parametrize(
    "text", ["driver", "nobody@driver.clear", "driver+move@driver.clear", "driver@nowhere", "driver@driver.clear:x"]
)
def test_a_case_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"expected TARGET\[\+TARGET\]@POINT"):
        parse_case(text)


def test_a_case_is_read_as_it_is_written() -> None:
    assert parse_case("engine@trainer.publish.send:3/stop") == Case(
        target="engine", point=Point.SEND, count=3, how=How.STOP
    )


def test_a_case_may_name_two_victims_and_a_stop_that_ends_with_a_kill() -> None:
    case = parse_case("trainer+engine@trainer.optimizer:2/stop-kill")
    assert (case.victims, case.how) == (["trainer", "engine"], How.STOP_KILL)
    assert parse_case("move@driver.clear").victims == ["driver"]


def test_the_matrix_meets_every_point_and_every_target_and_each_case_can_be_read() -> None:
    assert len({str(parse_case(text)) for text in EVERY}) == len(TARGETS) * len(PHASES)
    cases = [parse_case(text) for text in (*MATRIX, *OF_WORKERS, *OF_GATEWAY)]
    assert {case.point for case in cases} == set(PHASES) == set(Point) - {Point.KEEP}
    assert {name for case in cases for name in case.victims} == set(TARGETS) - {"engine-core"}
    assert len({str(case) for case in cases}) == len(cases)


def test_a_run_takes_several_cases_and_one_that_waits_for_its_end_as_the_last() -> None:
    cases = [parse_case(f"driver@driver.{name}:1") for name in ("stop", "clear", "trained", "durable")]
    runs = [[str(case.point) for case in run] for run in in_runs([*cases, cases[0]], 2)]
    assert runs == [["driver.clear", "driver.trained"], ["driver.durable", "driver.stop"], ["driver.stop"]]


def test_random_kills_depend_on_the_seed_alone() -> None:
    cases = list(random_cases(20, seed=1))
    assert cases == list(random_cases(20, seed=1)) != list(random_cases(20, seed=2))
    assert {case.is_at_work for case in cases} == {True, False}
    assert [len(run) for run in in_runs(cases, 6)] == [6, 6, 6, 2]
    many = list(random_cases(300, seed=1))
    assert {name for case in many for name in case.target.split("+")} == {*TARGETS, "move"}
    assert {len(case.victims) for case in many} == {1, 2}
    assert {case.how for case in many} == {How.KILL, How.STOP_KILL}
    assert max(case.after_s for case in many if case.is_at_work) < 4
    later = [case.after_s for case in random_cases(300, seed=1, work_s=60.0) if case.is_at_work]
    assert 30 < max(later) < 60  # rounds of agents take half a minute


@pytest.mark.parametrize(("last", "code"), [(5, 0), (9, 3)])
def test_a_random_fault_that_comes_when_its_run_is_complete_is_one_of_a_later_run(
    last: int, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Killed at its fourth pass, the stand-in has three passes left: a fault at the fifth is for the next run, whose
    first attempt has five. None has nine."""
    cases = [Case(target="driver", point=Point.OPTIMIZER, count=count) for count in (4, last)]
    monkeypatch.setattr(chaos, "random_cases", lambda *_: iter(cases))
    command = ["chaos", str(tmp_path / "out"), "--random", "2", "--script", SCRIPT, "--", "--fault", "none"]
    assert main(command) == code
    said = capsys.readouterr()
    assert "run 000: good, 1 kills" in said.out
    later = 1 if code == 0 else 0
    assert f"run 001: good, {later} kills" in said.out
    assert f"2 runs, {1 + later} kills, 0 failed" in said.out
    assert ("--random 2: 1 faults hit in 2 runs" in said.err) == (code == 3)
    assert "not reached" not in (tmp_path / "out" / "table.md").read_text()


def test_random_faults_may_be_those_of_one_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = [Case(target="driver", point=Point.OPTIMIZER, count=count) for count in (4, 5)]
    monkeypatch.setattr(chaos, "random_cases", lambda *_: iter(cases))
    words = ["--random", "2", "--most-runs", "1", "--script", SCRIPT, "--", "--fault", "none"]
    assert main(["chaos", str(tmp_path / "out"), *words]) == 0
    assert "1 runs, 1 kills, 0 failed" in capsys.readouterr().out
    assert "driver@trainer.optimizer:5 (not reached)" in (tmp_path / "out" / "table.md").read_text()
    assert main(["chaos", str(tmp_path / "none"), "--most-runs", "0", "--", "--fault", "none"]) == 2
    assert "--most-runs 0: expected at least 1" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_a_kill_at_work_waits_for_the_weights_of_the_life_that_it_hits(tmp_path: Path) -> None:
    at_once = Case(target="driver", is_at_work=True)
    outcome = complete(tmp_path, at_once, at_once, fault="works")
    assert killed(outcome) == ["driver@work+0.0s"] * 2
    assert outcome.codes == [-signal.SIGKILL, -signal.SIGKILL, 0]


def test_a_directory_that_moved_between_two_lives_is_gone_on_with(tmp_path: Path) -> None:
    outcome = complete(tmp_path, Case(target="move", point=Point.OPTIMIZER, count=2))
    assert killed(outcome) == ["move@trainer.optimizer:2"]
    assert outcome.codes == [-signal.SIGKILL, 0]
    assert outcome.is_good  # the versions of both lives, and the second went on from the first
    assert [path.name for path in (tmp_path / "out").iterdir() if path.is_dir() and "run" in path.name] == [
        "run.failpoints",
        "run.moved",
    ]


def test_a_victim_that_was_stopped_is_killed_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chaos_run, "HUNG_S", 0.5)
    outcome = complete(tmp_path, Case(target="driver", point=Point.OPTIMIZER, count=2, how=How.STOP_KILL))
    assert killed(outcome) == ["driver@trainer.optimizer:2/stop-kill"]
    assert outcome.codes == [-signal.SIGKILL, 0]
    assert outcome.is_good
