"""Start a Ray worker as a copy of the run's template process: `python fork_worker.py ARGUMENTS OF RAY`.

Ray's raylet runs this instead of its own `setup_worker.py`. It asks `vime/ray/template.py` for a copy, and lives as
long as that copy does; where no template responds, or its copy would not be what Ray asks for, it becomes
Ray's own program. By path and with the standard library only: whatever it imports, each worker would pay for.
"""

import array
import contextlib
import json
import os
import select
import signal
import socket
import struct
import sys
from collections.abc import Mapping
from typing import NoReturn

ADDRESS = "VIME_TEMPLATE"
"""In the environment of a local Ray: the template's name among the abstract Unix sockets of this machine."""
STOCK_PROGRAM = "VIME_TEMPLATE_STOCK"
"""In the same environment: path of Ray's own setup_worker.py."""
LENGTH = struct.Struct("!I")
CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid
PATIENCE_S = 50.0
"""For the template's imports on a busy machine. Ray's raylet waits 60 s for a worker, then starts another one."""


def main(arguments: list[str]) -> None:
    """Get a copy and wait for its end, or become Ray's own program."""
    pid = ask_for_copy(os.environ.get(ADDRESS, ""), arguments)
    if pid is None:
        become_stock(arguments)
    signal.signal(
        signal.SIGTERM, lambda number, _: hand_on(pid, number)
    )  # from the raylet, to a worker that is unknown yet
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    poll.poll()


def become_stock(arguments: list[str]) -> NoReturn:
    os.execv(sys.executable, [sys.executable, os.environ[STOCK_PROGRAM], *arguments])


def read_own(name: str) -> str:
    """Return a file of /proc about this process."""
    with open(f"/proc/self/{name}") as file:
        return file.read()


def hand_on(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def ask_for_copy(name: str, arguments: list[str]) -> int | None:
    """Return the pid of the copy, None where there is none."""
    request = {
        "arguments": arguments,
        "environment": dict(os.environ),
        "directory": os.getcwd(),
        "niceness": os.getpriority(os.PRIO_PROCESS, 0),
        "leads_group": os.getpgid(0) == os.getpid(),
        "oom_score_adj": read_own("oom_score_adj"),  # the raylet has set it from outside
        "blocked_signals": sorted(int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    }
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(PATIENCE_S)
            connection.connect("\0" + name)
            if not is_own(connection):
                raise PermissionError("it belongs to another user")
            send(connection, request, descriptors=(0, 1, 2))
            reply, _ = receive(connection)
    except OSError as error:  # no template; it was killed; it is stuck
        sys.stderr.write(f"this worker is a new process: its template does not respond: {error}\n")
        return None
    pid = reply.get("pid")
    if not isinstance(pid, int):
        sys.stderr.write(f"this worker is a new process: {reply.get('refused')}\n")
        return None
    return pid


def is_own(connection: socket.socket) -> bool:
    """Whether the other end belongs to this user: anybody on the machine can use such a name."""
    seen = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    return bool(CREDENTIALS.unpack(seen)[1] == os.getuid())


def send(connection: socket.socket, message: Mapping[str, object], descriptors: tuple[int, ...] = ()) -> None:
    body = json.dumps(message).encode()
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
    connection.sendmsg([LENGTH.pack(len(body))], rights)
    connection.sendall(body)


def receive(connection: socket.socket) -> tuple[dict[str, object], list[int]]:
    """Return a message and the file descriptors with it. Raises ConnectionError when the other end is gone."""
    length, rights, _, _ = connection.recvmsg(LENGTH.size, socket.CMSG_LEN(4 * 4))
    if len(length) != LENGTH.size:
        raise ConnectionError("the other end is gone")
    descriptors = array.array("i")
    for level, kind, data in rights:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(data)
    left = LENGTH.unpack(length)[0]
    parts = []
    while left:
        part = connection.recv(min(left, 1 << 16))
        if not part:
            raise ConnectionError("the other end is gone")
        parts.append(part)
        left -= len(part)
    message: dict[str, object] = json.loads(b"".join(parts))
    return message, list(descriptors)


if __name__ == "__main__":
    main(sys.argv[1:])
