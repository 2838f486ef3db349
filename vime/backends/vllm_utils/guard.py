"""A small parent for a server, so that the server and all its children end when its owner does, however that ends.

Run by path as a script (`python -I -S guard.py GRACE_S COMMAND...`) in a session of its own; standard library only,
about 10 MB. The owner holds the other end of stdin and writes nothing: end of file means the owner is gone, also after
`kill -9`. Then, or when the server ends by itself, everything left in the session is killed: a killed vLLM API server
leaves its EngineCore behind for ever otherwise, with the GPU memory it holds.

SIGTERM is passed on to the server, which then has GRACE_S to end. The exit code is the server's (128 + signal).

vLLM leaves files in the directory for temporary files: the sockets between its processes when it is killed, and how
they first met always. The server gets a directory of its own for them, which is removed behind it, or by a later guard
where this one was killed too: Ray kills the children of an actor with it.

PR_SET_PDEATHSIG alone would not do: it fires when the *thread* that started the child ends, and an owner may start
servers from a pool.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

PR_SET_PDEATHSIG = 1
GROUP_ATTEMPTS = 20
DIE_WITH_PARENT = "VIME_DIE_WITH_PARENT"
TEMPORARY = "vime-server-"  # short names: the path of a socket has at most 107 characters


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when the thread that started it ends, and end now where the process `parent`
    ended before. For children of one main thread."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def temporary_directory() -> str:
    """Return a new directory, and remove those of guards that were killed: each locks its own for as long as it
    lives."""
    with os.scandir(tempfile.gettempdir()) as entries:
        for path in [entry.path for entry in entries if entry.name.startswith(TEMPORARY)]:
            with contextlib.suppress(OSError), _opened(path) as directory:  # in use, or another user's
                fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
    while True:
        path = tempfile.mkdtemp(prefix=TEMPORARY)
        with contextlib.suppress(OSError):  # another guard has removed it already, or this file system has no locks
            fcntl.flock(os.open(path, os.O_RDONLY), fcntl.LOCK_EX)
        if os.path.isdir(path):
            return path


@contextlib.contextmanager
def _opened(directory: str) -> Iterator[int]:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def session_members(session: int) -> list[int]:
    """Living processes of a session, read from /proc; zombies do not count."""
    members = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat") as file:
                # "pid (name) state ppid pgrp session ...", where the name may itself hold blanks and brackets
                state, _, _, its_session = file.read().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(its_session) == session and state not in "ZX":
            members.append(int(entry))
    return members


def kill_session(session: int, *, spare: int | None = None) -> list[int]:
    """Send SIGKILL to every living member but `spare`; returns who was hit."""
    hit = [pid for pid in session_members(session) if pid != spare]
    for pid in hit:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return hit


def weigh_session(leader: int) -> None:
    """Where Linux sets sessions against each other (sched(7), autogroup), the niceness of a process counts among those
    of its own session only: give the session of `leader` the niceness of that process."""
    for _ in range(GROUP_ATTEMPTS):
        try:
            with open(f"/proc/{leader}/autogroup", "w") as file:
                file.write(str(os.getpriority(os.PRIO_PROCESS, leader)))
        except BlockingIOError:  # the kernel takes one such wish a tenth of a second from ordinary users
            time.sleep(0.1)
        except OSError:  # no such groups here
            return
        else:
            return


def main(grace_s: float, command: list[str]) -> int:
    # A pipe that every signal writes to: one select() then waits for the owner, for SIGTERM and for the child's end.
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    weigh_session(os.getpid())
    temporary = temporary_directory()
    environment = {**os.environ, "TMPDIR": temporary}
    tied = functools.partial(die_with_parent, os.getpid())
    server = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, preexec_fn=tied)
    left_s: float | None = None
    while server.poll() is None:
        ready, _, _ = select.select([wake_read, sys.stdin], [], [], left_s)
        if sys.stdin in ready or not ready:  # the owner is gone, or the grace is over
            server.kill()
            break
        received = os.read(wake_read, 64)
        if signal.SIGTERM in received or signal.SIGINT in received:
            server.terminate()
            left_s = grace_s
    code = server.wait()
    while kill_session(os.getpid(), spare=os.getpid()):
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, os.WNOHANG)
    shutil.rmtree(temporary, ignore_errors=True)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
