"""A command that is to end with its parent does not begin where the parent has ended before it."""

import os
import subprocess
import sys

import pytest

from vime.utils import die_with_parent

LAUNCHER = [sys.executable, "-I", "-S", die_with_parent.__file__]
COMMAND = [sys.executable, "-c", "import os; print('began', os.getppid())"]


def begin(parent: int) -> str:
    return subprocess.run([*LAUNCHER, str(parent), *COMMAND], capture_output=True, text=True, timeout=60).stdout.strip()


@pytest.mark.parametrize("named", [True, False])
def test_it_becomes_the_command_under_its_parent(named):
    assert begin(os.getpid() if named else 0) == f"began {os.getpid()}"


def test_a_parent_that_ended_while_it_started_is_known_by_its_number():
    ended = subprocess.Popen(["true"])
    ended.wait(60)
    assert begin(ended.pid) == ""
