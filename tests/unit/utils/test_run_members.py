"""Which processes the whole-run tests count as the run's: what they do not see, they neither kill nor miss."""

import os
import subprocess
import time

import psutil

from tests.helpers.training import MARK, Training

SHELL = f"env -u {MARK} sleep 60 & wait"


def test_processes_with_a_number_used_before_or_without_the_mark_are_members_too() -> None:
    training = Training.__new__(Training)
    training._mark = "of this test"
    shell = subprocess.Popen(["sh", "-c", SHELL], env={**os.environ, MARK: training._mark})
    try:
        ends = time.monotonic() + 10
        while not (children := psutil.Process(shell.pid).children()) and time.monotonic() < ends:
            time.sleep(0.01)
        list(psutil.process_iter())
        psutil._pids_reused.add(shell.pid)  # as when it sees another process under a number it remembers
        members = {process.pid for process, _ in training._members()}
        assert members == {shell.pid, *(child.pid for child in children)}
        assert shell.pid not in {process.pid for process in psutil.process_iter()}  # which is why it is not used
    finally:
        for child in children:
            child.kill()
        shell.wait(10)
