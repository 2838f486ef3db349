"""Which processes count as a run's, in the whole-run tests and in `vime chaos`: what they do not see, they neither kill
nor miss."""

import os
import subprocess
import time
from collections.abc import Callable, Iterable

import psutil
import pytest

from tests.helpers.training import MARK, Training
from vime.cli import chaos_members


def of_tests() -> tuple[dict[str, str], Callable[[], Iterable[psutil.Process]]]:
    training = Training.__new__(Training)
    training._mark, training._seen = "of this test", set()
    return {MARK: training._mark}, lambda: [process for process, _ in training._members()]


def of_chaos() -> tuple[dict[str, str], Callable[[], Iterable[psutil.Process]]]:
    members = chaos_members.Members()
    return members.environment, members.all


@pytest.mark.parametrize("seen_by", [of_tests, of_chaos])
def test_processes_with_a_number_used_before_or_without_the_mark_are_members_too(seen_by) -> None:
    mark, members = seen_by()
    [name] = mark
    shell = subprocess.Popen(["sh", "-c", f"env -u {name} sleep 60 & wait"], env={**os.environ, **mark})
    try:
        ends = time.monotonic() + 10
        while not (children := psutil.Process(shell.pid).children()) and time.monotonic() < ends:
            time.sleep(0.01)
        list(psutil.process_iter())
        psutil._pids_reused.add(shell.pid)  # as when it sees another process under a number it remembers
        assert {process.pid for process in members()} == {shell.pid, *(child.pid for child in children)}
        assert shell.pid not in {process.pid for process in psutil.process_iter()}  # which is why it is not used
        shell.kill()
        shell.wait(10)
        assert [process.pid for process in members()] == [child.pid for child in children]  # no mark, and no parent
    finally:
        for child in children:
            child.kill()
        shell.kill()
        shell.wait(10)
