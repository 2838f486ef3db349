"""What the user sees, on a terminal and in a pipe."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from vime.cli.main import main
from vime.config.run import TrackingConfig
from vime.observability.events import EventKind, EventLog
from vime.observability.metrics import Tracker
from vime.observability.report import duration, plain
from vime.observability.run_dir import RunDir
from vime.observability.screen import Screen

ROUND = {"rollout/reward_mean": 0.4125, "rollout/response_len_mean": 8.06, "perf/tokens_per_sec": 2310.4}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def small_run(root: Path) -> Path:
    with RunDir.create(str(root / "run"), "{}") as run:
        events = EventLog(run.path, "driver")
        events.emit(EventKind.RUN_STARTED)
        tracker = Tracker(TrackingConfig(), run.path, {})
        for step in range(4):
            tracker.log(step, {"rollout/reward_mean": step / 4, "rollout/num_samples": 8, "perf/train_time": 1.5})
        tracker.close()
        events.emit(EventKind.RUN_FINISHED)
        return run.path


def test_in_a_pipe_each_stage_and_each_round_is_one_plain_line(tmp_path: Path) -> None:
    pipe = io.StringIO()
    screen = Screen(tmp_path, stream=pipe)
    screen.stage("starting Ray")
    screen.begin(0, 30)
    screen.activity("round 0: 3/16 groups")
    screen.round_done(0, ROUND)
    screen.note_eval(1, {"eval/held_out/reward_mean": 0.5, "eval/held_out/num_tokens": 800.0})
    lines = pipe.getvalue().splitlines()
    assert lines[:3] == [f"Run directory: {tmp_path}", "[0:00] starting Ray", "training: rounds 0 to 29"]
    assert lines[3].startswith("round 1/30: reward 0.412, length 8.1, 2310 tokens/s, 0.0 s, left 0:0")
    assert lines[4:] == ["evaluation after 1 of 30 rounds: held_out/reward_mean 0.5"]  # and nothing for the activity
    assert "\x1b" not in pipe.getvalue()


def test_a_metric_that_is_not_there_is_left_out(tmp_path: Path) -> None:
    pipe = io.StringIO()
    screen = Screen(tmp_path, stream=pipe)
    screen.begin(0, 2)
    screen.round_done(0, {"train/loss": 0.1})
    assert pipe.getvalue().splitlines()[-1].startswith("round 1/2: 0.0 s, left")


def test_time_left_is_judged_by_the_mean_of_the_rounds_so_far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 100.0, 104.0, 112.0])  # made, begun, first round took 4 s, second 8 s
    # of this module alone: threads of other tests go on to ask `time`
    own = SimpleNamespace(monotonic=lambda: next(clock), strftime=time.strftime)
    monkeypatch.setattr("vime.observability.screen.time", own)
    pipe = io.StringIO()
    screen = Screen(tmp_path, stream=pipe)
    screen.begin(0, 20)
    screen.round_done(0, {})
    screen.round_done(1, {})
    # 19 rounds x 4 s = 76 s; then 18 rounds x (4 + 8) / 2 s = 108 s
    assert pipe.getvalue().splitlines()[-2:] == ["round 1/20: 4.0 s, left 1:16", "round 2/20: 8.0 s, left 1:48"]


def test_a_resumed_run_counts_from_its_round(tmp_path: Path) -> None:
    pipe = io.StringIO()
    screen = Screen(tmp_path, stream=pipe)
    screen.begin(5, 8)
    screen.round_done(5, {})
    assert "training: rounds 5 to 7" in pipe.getvalue()
    assert "round 6/8" in pipe.getvalue()


def test_on_a_terminal_a_bar_and_the_activity_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "140")
    terminal = Terminal()
    screen = Screen(tmp_path, stream=terminal)
    screen.stage("starting Ray")
    screen.begin(0, 30)
    screen.round_done(0, ROUND)
    screen.activity("round 1: 3/16 groups")
    screen.failed("stopped here")
    shown = terminal.getvalue()
    assert re.search(r"starting Ray \.\.\. done \(\d+\.\d s\)", shown)
    assert "round 1: 3/16 groups" in shown
    assert "reward 0.412, length 8.1, 2310 tokens/s" in shown


def test_a_failure_says_what_happened_and_where_to_look(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Screen(tmp_path, stream=io.StringIO()).failed("engine-0 died")
    assert capsys.readouterr().err == f"failed: engine-0 died\nRun directory: {tmp_path}\n"


def test_the_end_screen_shows_curve_totals_and_paths(tmp_path: Path) -> None:
    run_dir, pipe = small_run(tmp_path), io.StringIO()
    Screen(run_dir, stream=pipe).finish()
    shown = pipe.getvalue()
    assert "Reward, mean of 3 rounds, rounds 0 to 3:" in shown
    # mean(0, .25, .5) = 0.25 first; mean(0, .25, .5, .75) = 0.375 of the last (at most ten)
    assert "0.250 over the first 3 rounds, 0.375 over the last 4" in shown
    assert "4 rounds, 32 samples" in shown
    assert "train 6.0" in shown
    assert str(run_dir / "reward_curve.png") in shown
    assert (run_dir / "reward_curve.png").is_file()


def test_report_prints_the_same_end_screen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = small_run(tmp_path)
    assert main(["report", str(run_dir)]) == 0
    assert "4 rounds, 32 samples" in capsys.readouterr().out


def test_report_of_a_run_that_died_before_its_first_round_still_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with RunDir.create(str(tmp_path / "run"), "{}") as run:
        EventLog(run.path, "driver").emit(EventKind.RUN_FAILED, error="no Ray")
    assert main(["report", str(tmp_path / "run")]) == 0
    assert "failed: no Ray" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "reason"), [("", "without config.json"), ("nowhere", "is no directory")])
def test_report_of_something_else_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, reason: str
) -> None:
    assert main(["report", str(tmp_path / name)]) == 2
    assert reason in capsys.readouterr().err


def test_text_of_a_model_cannot_steer_the_terminal() -> None:
    assert plain("a\nb\x1b[31mc\x07") == "a\\nb?[31mc?"
    assert plain("é", is_ascii=True) == "\\xe9"
    assert plain("x" * 200, limit=10) == "xxxxxxx..."


def test_durations_read_like_a_clock() -> None:
    assert [duration(seconds) for seconds in (0, 75, 3700)] == ["0:00", "1:15", "1:01:40"]


def test_a_terminal_keeps_a_line_every_n_rounds_and_the_last(tmp_path: Path) -> None:
    terminal = Terminal()
    screen = Screen(tmp_path, stream=terminal, log_interval=3)
    screen.begin(0, 8)
    for rollout_id in range(8):
        screen.round_done(rollout_id, ROUND)
    screen._close_live()
    kept = re.findall(r"round (\d+)/8: reward", re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", terminal.getvalue()))
    assert kept == ["3", "6", "8"]


def test_the_log_has_every_line_with_its_date_and_without_control_codes(tmp_path: Path) -> None:
    screen = Screen(tmp_path, stream=Terminal(), log_interval=100)
    screen.stage("starting Ray")
    screen.begin(0, 3)
    for rollout_id in range(3):
        screen.round_done(rollout_id, ROUND)
    screen.note_eval(1, {"eval/held_out/reward_mean": 0.5})
    screen.warn("two\nlines")
    screen.failed("out of memory")
    text = (tmp_path / "logs" / "progress.log").read_text()
    lines = [re.sub(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", "", line) for line in text.splitlines()]
    assert all(line not in text.splitlines() for line in lines)  # each had a date
    assert [line.split(":")[0] for line in lines] == [
        "Run directory", "[0", "starting Ray ... done (0.0 s)", "training", "round 1/3", "round 2/3", "round 3/3",
        "evaluation after 1 of 3 rounds", "warning", "lines", "failed",
    ]  # fmt: skip
    assert "\x1b" not in text


def test_a_log_that_cannot_be_written_does_not_end_the_run(tmp_path: Path) -> None:
    (tmp_path / "logs" / "progress.log").mkdir(parents=True)
    pipe = io.StringIO()
    Screen(tmp_path, stream=pipe).note("still there")
    assert pipe.getvalue().endswith("still there\n")


TELLS = """
import sys
from pathlib import Path
from vime.observability.screen import Screen
screen = Screen(Path(sys.argv[1]))
sys.stdin.readline()  # whoever reads the screen has ended
for number in range(3):
    screen.note(f"line {number}")
screen.begin(0, 1)
screen.round_done(0, {})
screen.failed("no such rubric")
"""


@pytest.mark.parametrize("where", ["a pipe that nobody reads", "a full disk"])
def test_a_run_goes_on_when_nobody_can_read_its_screen(where: str, tmp_path: Path) -> None:
    """As with `| head`, or `| tee log` in a terminal that was closed. rich would end the process with code 1."""
    reads, writes = os.pipe() if where.startswith("a pipe") else (None, os.open("/dev/full", os.O_WRONLY))
    with subprocess.Popen(
        [sys.executable, "-c", TELLS, str(tmp_path)], stdin=subprocess.PIPE, stdout=writes, stderr=writes
    ) as process:
        os.close(writes)
        if reads is not None:
            assert os.read(reads, 9) == b"Run direc"
            os.close(reads)
        process.communicate(b"\n", timeout=60)
    assert process.returncode == 0 or reads is None, "on a full disk Python itself ends with 120"
    assert (tmp_path / "logs" / "progress.log").read_text().splitlines()[-1].endswith("failed: no such rubric")
