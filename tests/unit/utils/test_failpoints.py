"""Failpoints: what is armed fires once in a directory, at the pass that was asked for; what is not costs nothing."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.helpers.shape_check import clone_files
from vime.utils import failpoints
from vime.utils.failpoints import ARMED, DIRECTORY, FailpointError, Point, go_ahead, read_armed

ROOT = Path(__file__).resolve().parents[3]


def passing(tmp_path: Path, action: str, *, times: int = 3) -> subprocess.Popen[bytes]:
    """A process that passes `trainer.optimizer` several times, armed at the second, and says where it is."""
    code = (
        "from vime.utils.failpoints import Point, failpoint\n"
        f"for number in range({times}):\n"
        "    failpoint(Point.FETCH), failpoint(Point.OPTIMIZER)\n"
        "    print(number, flush=True)\n"
    )
    environment = {**os.environ, ARMED: f"trainer.optimizer:2:{action}", DIRECTORY: str(tmp_path / "notes")}
    return subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=environment, stdout=subprocess.PIPE)


def test_kill_ends_the_process_at_its_pass_and_lets_the_next_process_through(tmp_path: Path) -> None:
    first = passing(tmp_path, "kill")
    output, _ = first.communicate(timeout=60)
    assert (first.returncode, output) == (-signal.SIGKILL, b"0\n")
    second = passing(tmp_path, "kill")
    output, _ = second.communicate(timeout=60)
    assert (second.returncode, output) == (0, b"0\n1\n2\n")


def test_exit_skips_every_clean_up(tmp_path: Path) -> None:
    process = passing(tmp_path, "exit")
    output, _ = process.communicate(timeout=60)
    assert (process.returncode, output) == (failpoints.EXIT_CODE, b"0\n")


def test_stop_leaves_the_process_stopped(tmp_path: Path) -> None:
    process = passing(tmp_path, "stop")
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    os.kill(process.pid, signal.SIGCONT)
    output, _ = process.communicate(timeout=60)
    assert output == b"0\n1\n2\n"


def test_hold_lasts_until_the_go_ahead(tmp_path: Path) -> None:
    armed = read_armed({ARMED: "driver.clear:1:hold", DIRECTORY: str(tmp_path)})["driver.clear"]
    held = threading.Thread(target=armed.meet)
    held.start()
    held.join(0.1)
    assert held.is_alive()
    go_ahead(armed.note).touch()
    held.join(30)
    assert not held.is_alive()


def test_a_hold_that_nobody_ends_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failpoints, "HOLD_S", 0.0)
    armed = read_armed({ARMED: "driver.clear:1:hold", DIRECTORY: str(tmp_path)})["driver.clear"]
    with pytest.raises(FailpointError, match=r"driver\.clear\.1\.go was not made"):
        armed.meet()


def test_what_is_armed_may_change_while_a_process_runs_and_counts_from_then(tmp_path: Path) -> None:
    armed = failpoints.ArmedFile(tmp_path)
    assert armed.get(Point.CLEAR) is None
    for _ in range(2):  # the second time its note of the first is forgotten
        failpoints.arm(tmp_path, "driver.clear:2:raise")
        (first := armed.get(Point.CLEAR)).meet()
        assert armed.get(Point.CLEAR) is first
        assert armed.get(Point.STOP) is None
        with pytest.raises(FailpointError, match=r"driver.clear, pass 2"):
            first.meet()
    failpoints.arm(tmp_path, "")
    assert armed.get(Point.CLEAR) is None


def test_of_two_ranks_that_pass_one_fires(tmp_path: Path) -> None:
    ranks = [read_armed({ARMED: "trainer.fetch:1:raise", DIRECTORY: str(tmp_path)})["trainer.fetch"] for _ in range(2)]
    with pytest.raises(FailpointError, match=r"trainer.fetch, pass 1: a rank has its ticket"):
        ranks[0].meet()
    ranks[1].meet()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("trainer.optimiser:1:kill", "no failpoint is called 'trainer.optimiser'"),
        ("trainer.optimizer:0:kill", "expected NAME:PASS:ACTION"),
        ("trainer.optimizer:kill", "expected NAME:PASS:ACTION"),
        ("trainer.optimizer:1:explode", "with an action of kill, stop, exit, raise, hold"),
        ("trainer.optimizer:1:kill,trainer.optimizer:2:kill", "is there twice"),
    ],
)
def test_what_cannot_be_armed_is_refused(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        read_armed({ARMED: text, DIRECTORY: str(tmp_path)})


def test_a_point_without_a_place_to_note_it_is_refused() -> None:
    with pytest.raises(ValueError, match="needs VIME_FAILPOINTS_DIR"):
        read_armed({ARMED: "trainer.optimizer:1:kill"})


def test_every_point_of_the_table_is_passed_at_one_place() -> None:
    calls = [
        ast.unparse(node.args[0])
        for path in clone_files(ROOT / "vime", "*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "failpoint"
    ]
    assert sorted(calls) == sorted(f"Point.{point.name}" for point in Point)
