"""The tests' own way to wait for processes that must end."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil
import pytest

from tests.helpers.processes import assert_ended, find_processes, has_ended


def test_a_process_that_is_gone_has_ended_and_so_has_a_zombie() -> None:
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as child:
        process = psutil.Process(child.pid)
        assert not has_ended(process)
        assert child.stdin is not None
        child.stdin.close()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and nobody has waited for it
        assert process.status() == psutil.STATUS_ZOMBIE
        assert has_ended(process)
    assert has_ended(process)
    assert find_processes([os.getpid(), child.pid]) == [psutil.Process()]
    assert_ended([process, child.pid], within_s=0.1)


def test_a_process_that_runs_on_is_named() -> None:
    with pytest.raises(AssertionError, match=str(os.getpid())):
        assert_ended([os.getpid()], within_s=0.01)
