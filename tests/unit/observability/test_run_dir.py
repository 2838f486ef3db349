"""The run directory: made, described, claimed by one live run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from vime.handoff.receipts import ReceiptFile
from vime.observability.run_dir import RunDir, check_run_dir, claimed_checkpoints
from vime.types import ConfigError


def test_a_new_directory_gets_its_layout_and_its_description(tmp_path: Path) -> None:
    with RunDir.create(str(tmp_path / "run"), '{"lr": 1}', argv=["python", "train.py", "--note", "two words"]) as run:
        assert run.path == tmp_path / "run"
        assert (run.path / "config.json").read_text() == '{"lr": 1}'
        assert {entry.name for entry in run.path.iterdir() if entry.is_dir()} == {
            "events", "logs", "eval", "checkpoints",
        }  # fmt: skip
        check_run_dir(run.path)


def test_the_command_script_gives_the_same_arguments_again(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", "import sys; print(sys.argv[1:])", "two words", "it's", "$HOME", "a;b"]
    with RunDir.create(str(tmp_path / "run"), "{}", argv=argv) as run:
        script = run.path / "command.sh"
    shown = subprocess.run([script], capture_output=True, text=True, check=True, timeout=30, cwd="/")
    assert shown.stdout.strip() == str(argv[3:])


def test_a_directory_of_a_live_run_is_refused_also_with_load(tmp_path: Path) -> None:
    with (
        RunDir.create(str(tmp_path), "{}"),
        pytest.raises(ConfigError, match=rf"a run that is alive \(pid {os.getpid()} on "),
    ):
        RunDir.create(str(tmp_path), "{}", resume=True)


def test_the_claim_ends_with_its_process_also_after_kill_9(tmp_path: Path) -> None:
    code = f"""
import os, signal
from vime.observability.run_dir import RunDir, claimed_checkpoints
run = RunDir.create({str(tmp_path)!r}, "{{}}")
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=30, check=False).returncode == -9
    with RunDir.create(str(tmp_path), "{}", resume=True) as run:
        assert run.path == tmp_path


def test_the_directory_of_an_earlier_run_needs_load(tmp_path: Path) -> None:
    RunDir.create(str(tmp_path), "{}").close()
    (tmp_path / "metrics.jsonl").write_text('{"rollout_id": 0}\n')
    with pytest.raises(ConfigError, match=r"holds an earlier run \(it has metrics.jsonl\).* --load"):
        RunDir.create(str(tmp_path), "{}")
    # The refusal gave its claim back.
    RunDir.create(str(tmp_path), "{}", resume=True).close()


@pytest.mark.parametrize(
    "trace",
    ["receipts.jsonl", "checkpoints/iter_0000000", "eval/held_0.jsonl", "spool/00000001", "events/driver.jsonl"],
)
def test_whatever_shows_that_a_round_was_generated_makes_it_an_earlier_run(tmp_path: Path, trace: str) -> None:
    RunDir.create(str(tmp_path), "{}").close()
    path = tmp_path / trace
    path.parent.mkdir(exist_ok=True)
    path.write_text('{"kind": "round_generated", "groups":[]}\n')
    with pytest.raises(ConfigError, match=f"it has {trace}"):
        RunDir.create(str(tmp_path), "{}")


def test_the_directory_of_a_start_that_failed_can_be_used_again_and_its_logs_are_kept(tmp_path: Path) -> None:
    ReceiptFile(tmp_path, start_round=0, link=None).close()  # says where it begins, and nothing of a round
    (tmp_path / "notes.txt").write_text("mine")
    for number in (1, 2):
        RunDir.create(str(tmp_path), f'{{"start": {number}}}').close()
        (tmp_path / "events" / "driver.jsonl").write_text('{"kind": "run_started"}\n{"kind": "run_failed"}\n')
        (tmp_path / "logs" / "driver.log").write_text(f"start {number} failed")
        (tmp_path / "ledger.db").write_text("")
    RunDir.create(str(tmp_path), '{"start": 3}').close()
    assert (tmp_path / "config.json").read_text() == '{"start": 3}'
    assert [*(tmp_path / "events").iterdir(), *(tmp_path / "logs").iterdir()] == []
    assert not (tmp_path / "ledger.db").exists()
    kept = {path.parent.parent.name: path.read_text() for path in tmp_path.glob("earlier-starts/*/logs/driver.log")}
    assert kept == {"1": "start 1 failed", "2": "start 2 failed"}
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_directory_with_other_files_may_become_a_run(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    RunDir.create(str(tmp_path), "{}").close()
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_path_that_cannot_be_a_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--run-dir .*file/run: cannot be made"):
        RunDir.create(str(tmp_path / "file" / "run"), "{}")


def test_without_a_path_two_runs_of_one_second_get_two_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda _: "20260101-120000")
    with RunDir.create(None, "{}") as first, RunDir.create(None, "{}") as second:
        assert (first.path.name, second.path.name) == ("20260101-120000", "20260101-120000-2")
        assert first.path.parent == tmp_path / "runs"


HOLDER = """
import sys
from pathlib import Path
from vime.observability.run_dir import claimed_checkpoints, claimed_checkpoints
with claimed_checkpoints(sys.argv[1] or None) as sign:
    sign(Path(sys.argv[2]))
    print("held", flush=True)
    sys.stdin.read()
"""


def holder(save: str, run_dir: Path) -> subprocess.Popen[str]:
    """A run in a process of its own that holds where it saves."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, save, str(run_dir)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_two_runs_do_not_save_into_one_directory(tmp_path: Path) -> None:
    first = holder(str(tmp_path / "save"), tmp_path / "first")
    try:
        message = rf"--save .*save: belongs to a run that is alive \(pid {first.pid} on .*, run directory .*/first\)"
        with pytest.raises(ConfigError, match=message), claimed_checkpoints(str(tmp_path / "save")):
            pass
        with claimed_checkpoints(str(tmp_path / "other")) as sign:  # another directory is another matter
            sign(tmp_path / "second")
    finally:
        first.kill()
        first.wait()
    with claimed_checkpoints(str(tmp_path / "save")) as sign:  # its file is still there, but nobody holds it
        sign(tmp_path / "second")


def test_where_a_run_saves_by_default_is_nobody_elses_either(tmp_path: Path) -> None:
    first = holder("", tmp_path / "first")
    try:
        with (
            pytest.raises(ConfigError, match=rf"--save .*first/checkpoints: .*pid {first.pid}"),
            claimed_checkpoints(str(tmp_path / "first" / "checkpoints")),
        ):
            pass
    finally:
        first.kill()
        first.wait()
