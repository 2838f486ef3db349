"""scripts/lint.sh and scripts/nightly.sh go on behind a part that fails, name it at their end, and fail."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
# Stands for python, install.sh, test.sh and chaos.sh: fails when FAILS is on its command line, hangs when HANGS is.
STAND_IN = """#!/usr/bin/env bash
echo "${0##*/} $*"
case "$0 $*" in *"${FAILS:-nothing}"*) exit 1 ;; *"${HANGS:-nothing}"*) exec sleep 300 ;; esac
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with the two scripts, whose parts are stand-ins."""
    parts = ("install.sh", "test.sh", "chaos.sh", "agents_chaos.sh")
    for name in (*(f"scripts/{part}" for part in parts), ".venv/bin/python"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(STAND_IN)
        path.chmod(0o755)
    for name in ("lint.sh", "nightly.sh"):
        shutil.copy(ROOT / "scripts" / name, tmp_path / "scripts")
    return tmp_path


def run(place: Path, *command: str, **environment: str) -> tuple[int, list[str]]:
    """Exit code and lines of output."""
    done = subprocess.run(
        [place / "scripts" / command[0], *command[1:]],
        env={"PATH": "/usr/bin:/bin", **environment}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    return done.returncode, (done.stdout + done.stderr).splitlines()


def test_lint_passes_when_every_check_does(place: Path) -> None:
    code, lines = run(place, "lint.sh")
    assert (code, lines[-1]) == (0, "lint: passed")


@pytest.mark.parametrize(
    ("fails", "name"),
    [("ruff check", "ruff"), ("ruff format", "format"), ("shape_check", "shape"),
     ("--check", "format, flags page, families"), ("-m mypy", "mypy")],
)  # fmt: skip
def test_lint_runs_every_check_and_names_those_that_failed(place: Path, fails: str, name: str) -> None:
    code, lines = run(place, "lint.sh", FAILS=fails)
    assert (code, lines[-1]) == (1, f"lint: FAILED: {name}")
    assert sum(line.startswith("lint: ") for line in lines[:-1]) == 6


def test_the_night_runs_every_part_and_says_which_failed(place: Path) -> None:
    code, lines = run(place, "nightly.sh", "out", SEED="7", KILLS="15", DEADLINE="1", FAILS="run_flips")
    table = lines[lines.index("| part (seed 7) | outcome | took | its last line |") + 2 :]
    rows = [tuple(cell.strip() for cell in row.split("|")[1:5]) for row in table]
    out = place / "out"
    assert [(part, outcome, last) for part, outcome, _, last in rows] == [
        ("tests", "passed", "test.sh -m nightly and not gpu"),
        ("matrix", "passed", f"chaos.sh {out}/matrix"),
        ("random", "passed", f"chaos.sh {out}/random --random 15 --seed 7"),
        ("workers", "passed", f"chaos.sh {out}/workers --random 15 --seed 7"),
        ("vllm", "passed", f"chaos.sh {out}/vllm --random 2 --seed 7"),
        ("agents", "passed", f"agents_chaos.sh {out}/agents 150 15 7"),
        ("flips", "FAILED: exit code 1", f"python -m tests.helpers.run_flips {out}/flips --seed 7"),
        ("inputs", "passed", "python -m tests.helpers.broken_inputs"),
    ]
    assert code == 1


def test_a_part_of_the_night_has_a_deadline(place: Path) -> None:
    code, lines = run(place, "nightly.sh", "out", "inputs", DEADLINE="1", HANGS="broken_inputs")
    assert lines[-1].startswith("| inputs | FAILED: not done in 1 s |")
    assert code == 1


def test_some_parts_of_the_night_alone(place: Path) -> None:
    code, lines = run(place, "nightly.sh", "out", "inputs", "tests")
    assert [line.split()[1] for line in lines[-2:]] == ["inputs", "tests"]
    assert code == 0
    assert run(place, "nightly.sh", "out", "input")[0] == 2
