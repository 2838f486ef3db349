"""Run a command that ends when its parent does, however that ends: `python -I -S die_with_parent.py PARENT COMMAND...`.

PARENT is the pid of the process that starts it, or 0 where that is not known. By path and with the standard library
only: it becomes the command, under the same pid.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(parent: int, command: list[str]) -> None:
    """Become the command. Do nothing where the parent ended before the kernel was asked."""
    parent = parent or os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == parent:
        os.execv(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
