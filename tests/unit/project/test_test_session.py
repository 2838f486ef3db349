"""The test session itself: a left process fails it, an endless test ends it, GPU tests are skipped without a GPU.

Each test runs a small pytest session of its own, with this project's conftest, in a subprocess.
"""

from __future__ import annotations

import fnmatch
import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.helpers.shape_check import clone_files

ROOT = Path(__file__).resolve().parents[3]


def run_session(directory: Path, source: str, *flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    tests = directory / "tests"
    (tests / "unit").mkdir(parents=True)
    (tests / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    (tests / "unit" / "test_inner.py").write_text(source)
    (directory / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib\nmarkers =\n    gpu: x\n")
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *flags, "tests"],
        cwd=directory, env={**os.environ, **environment}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


def is_gone(pid: int) -> bool:
    """Also a moment after it was killed."""
    try:
        psutil.Process(pid).wait(30)
    except psutil.NoSuchProcess:
        return True
    except psutil.TimeoutExpired:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True


def test_processes_of_this_session_keep_the_bytecode_they_make() -> None:
    """Else each process of each run compiles torch and vLLM again, and the session takes more than twice as long."""
    assert not sys.dont_write_bytecode, "PYTHONDONTWRITEBYTECODE is set; unset it, as scripts/test.sh does"


TWO_WORKERS = ("-n", "2", "--dist", "loadfile", "--max-worker-restart", "0")


@pytest.mark.parametrize("flags", [(), TWO_WORKERS], ids=["alone", "workers"])
def test_a_process_left_behind_fails_the_session_and_is_ended(flags: tuple[str, ...], tmp_path: Path) -> None:
    source = f"""
import subprocess, sys
SLEEPER = "import os, time; print(os.getpid(), flush=True); time.sleep(300)"
def test_leaves_an_orphan():
    # The shell ends at once, so the sleeper belongs to init: only the session's mark finds it. It speaks when it runs:
    # a moment earlier, between fork and exec, it has no environment to be found by.
    command = f"'{{sys.executable}}' -c '{{SLEEPER}}' &"
    shell = subprocess.Popen(command, shell=True, stdout=subprocess.PIPE, text=True, start_new_session=True)
    open("{tmp_path}/pid", "w").write(shell.stdout.readline())
    shell.wait(10)
"""
    done = run_session(tmp_path, source, *flags, VIME_TEST_GRACE="5" if flags else "0.5")
    pid = int((tmp_path / "pid").read_text())
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert re.search(rf"pid {pid}: .*time\.sleep\(300\)", done.stdout)
    assert "1 passed, 1 error" in done.stdout.splitlines()[-1]
    assert is_gone(pid)


def test_a_session_over_its_deadline_shows_its_stacks_and_ends(tmp_path: Path) -> None:
    source = f"""
import subprocess, threading
def test_waits_forever():
    child = subprocess.Popen(["sleep", "300"])
    open("{tmp_path}/pid", "w").write(str(child.pid))
    threading.Event().wait()
"""
    done = run_session(tmp_path, source, VIME_TEST_DEADLINE="10")
    pid = int((tmp_path / "pid").read_text())
    assert done.returncode == 70
    assert "over 10 s (VIME_TEST_DEADLINE)" in done.stderr
    assert "test_waits_forever" in done.stderr
    assert is_gone(pid)


def test_a_test_that_keeps_the_interpreter_lock_is_ended_with_its_stack(tmp_path: Path) -> None:
    source = """
import ctypes
def test_keeps_the_lock(): ctypes.PyDLL(None).pause()
"""
    flags = ("-o", "faulthandler_timeout=5", "-o", "faulthandler_exit_on_timeout=true")
    done = run_session(tmp_path, source, *TWO_WORKERS, *flags)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert "in test_keeps_the_lock" in done.stderr
    assert "crashed while running 'tests/unit/test_inner.py::test_keeps_the_lock'" in done.stdout
    assert "1 failed" in done.stdout.splitlines()[-1]


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this machine has a GPU")
def test_a_gpu_test_is_skipped_without_a_gpu(tmp_path: Path) -> None:
    done = run_session(tmp_path, "import pytest\n@pytest.mark.gpu\ndef test_on_gpu(): assert False\n")
    assert done.returncode == 0
    assert "1 skipped" in done.stdout.splitlines()[-1]


def test_what_lint_found_beside_the_tests_fails_the_session(tmp_path: Path) -> None:
    (tmp_path / "lint.txt").write_text("a.py:1: error: no such name\nlint: mypy failed\nlint: FAILED: mypy\n")
    source = """
import os
def test_that_no_inner_session_waits_for_it(): assert "VIME_LINT_LOG" not in os.environ
"""
    done = run_session(tmp_path, source, VIME_LINT_LOG=str(tmp_path / "lint.txt"))
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert "1 passed, 1 error" in done.stdout.splitlines()[-1]
    assert "a.py:1: error: no such name" in done.stdout


@pytest.mark.parametrize(
    ("said", "error"),
    [
        ("lint: ruff passed in 1 s\nlint: passed\n", None),
        ("lint: mypy failed\nlint: FAILED: mypy\n", "lint: mypy failed\nlint: FAILED: mypy"),
        ("lint: ruff passed in 1 s\n", "lint: ruff passed in 1 s\nlint.sh was not done 0 s after the tests"),
    ],
    ids=["passed", "failed", "died"],
)
def test_lint_passed_when_its_last_line_says_so(
    tmp_path: Path, pytestconfig: pytest.Config, said: str, error: str | None
) -> None:
    (tmp_path / "lint.txt").write_text(said)
    conftest = pytestconfig.pluginmanager.getplugin(str(ROOT / "tests" / "conftest.py"))
    assert conftest.error_of_lint(tmp_path / "lint.txt", deadline_s=0) == error


def test_no_directory_with_tests_is_passed_over(pytestconfig: pytest.Config) -> None:
    """A session without arguments does not enter directories of this list, and does not say so."""
    directories = {path.parent.relative_to(ROOT) for path in clone_files(ROOT / "tests", "test_*.py")}
    assert Path("tests/dist/training") in directories
    passed_over = [
        str(directory)
        for directory in sorted(directories)
        for pattern in pytestconfig.getini("norecursedirs")
        if any(fnmatch.fnmatch(part, pattern) for part in directory.parts)
    ]
    assert passed_over == []
