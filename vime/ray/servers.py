"""Watch the servers of Ray that a run cannot do without: this process must notice their end before Ray's library does.

Ray ends the driver's process when they are gone, without a word and past every `except`: after its node server (raylet)
by the next call, after its cluster server (GCS) in a minute.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

import psutil
import ray

logger = logging.getLogger(__name__)

GCS, RAYLET = "gcs_server", "raylet"
CONNECT_S, RETRY_S, JOIN_S = 10.0, 1.0, 10.0
GCS_PATIENCE_S = 45.0
"""The owner of a cluster may start its GCS again. Ray waits 60 s for it."""
GREETING_BYTES = 1 << 16
PIDFD_GETFD = 438  # the number of the system call, the same on every architecture


class _ServerHere:
    """A server on this machine: a child of this process, or the node server of a joined cluster. The kernel reports its
    end at once."""

    def __init__(self, process: psutil.Process, name: str = "") -> None:
        self.name = name or f"{process.name()} (pid {process.pid})"
        self._descriptor = os.pidfd_open(process.pid)
        self._held = _hold_connections(process.pid, self._descriptor)
        self.is_away = False

    def fileno(self) -> int:
        return self._descriptor

    def is_lost(self) -> bool:
        return True

    def close(self) -> None:
        for connection in self._held:
            connection.close()
        os.close(self._descriptor)


def _hold_connections(pid: int, pidfd: int) -> list[socket.socket]:
    """Hold the server's ends of its local connections with this process, so that they outlive the server: a call of
    Ray on them then waits, where it would end this process before the thread that watches has heard of the death. (A
    process that dies closes its files first, and is reported afterwards.) Empty where the kernel does not allow it."""
    library = ctypes.CDLL(None, use_errno=True)
    held: list[socket.socket] = []
    try:
        names = os.listdir(f"/proc/{pid}/fd")
    except OSError as error:  # another user's process
        logger.info("connections of Ray's servers cannot be held: %s", error)
        return held
    for name in names:
        descriptor = library.syscall(PIDFD_GETFD, pidfd, int(name), 0)
        if descriptor < 0:
            logger.info("connections of Ray's servers cannot be held: %s", os.strerror(ctypes.get_errno()))
            return held
        try:
            connection = socket.socket(fileno=descriptor)
        except OSError:  # another kind of file
            os.close(descriptor)
            continue
        if connection.family == socket.AF_UNIX and _peer(connection) == os.getpid():
            held.append(connection)
        else:
            connection.close()
    return held


def _peer(connection: socket.socket) -> int:
    """The process at the other end of a connection, 0 when it cannot be seen."""
    pid, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return int(pid)


class _JoinedServer:
    """A server of a cluster, watched through an idle connection. The connection ends with the server, or because it was
    idle; a new connection tells which. A server that is away for `patience_s` is lost."""

    def __init__(self, name: str, address: tuple[str, int], *, patience_s: float) -> None:
        self.name = _named(name, address)
        self._address, self._patience_s = address, patience_s
        self._connection = socket.create_connection(address, CONNECT_S)
        self.is_away, self._since = False, 0.0

    def fileno(self) -> int:
        return self._connection.fileno()

    def is_lost(self) -> bool:
        """Asked when there is something to read, and again and again while it is away."""
        if not self.is_away:
            with contextlib.suppress(OSError):
                if self._connection.recv(GREETING_BYTES):
                    return False
            self.is_away, self._since = True, time.monotonic()
        self._connection.close()
        try:
            self._connection = socket.create_connection(self._address, RETRY_S)
        except ConnectionRefusedError:
            return time.monotonic() - self._since >= self._patience_s
        except OSError:  # its machine is busy, or gone: Ray's own time-outs say which
            return False
        self.is_away = False
        return False

    def close(self) -> None:
        self._connection.close()


@contextlib.contextmanager
def watched_ray(on_lost: Callable[[str], None]) -> Iterator[None]:
    """Call `on_lost` from a thread with the name of the first server of Ray that is lost. Ray is about to end this
    process then, so `on_lost` has to end or replace it first. Leave the block before Ray is stopped."""
    servers = _own_servers() or _joined_servers()
    end, stop = os.pipe()

    def watch() -> None:
        """Waits for: the first of the servers to be lost, or the end of the block."""
        while True:
            away = [server for server in servers if server.is_away]
            here = [server for server in servers if not server.is_away]
            ready, _, _ = select.select([end, *here], [], [], RETRY_S if away else None)
            if end in ready:
                return
            for server in [*(server for server in here if server in ready), *away]:
                if server.is_lost():
                    on_lost(server.name)
                    return

    watcher = threading.Thread(target=watch, name="vime-ray-watch", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        os.close(stop)  # the other end becomes readable
        watcher.join(JOIN_S)
        os.close(end)
        for server in servers:
            server.close()


def _own_servers() -> list[_ServerHere | _JoinedServer]:
    return [_ServerHere(child) for child in psutil.Process().children() if child.name() in (GCS, RAYLET)]


def _joined_servers() -> list[_ServerHere | _JoinedServer]:
    """Return the cluster's GCS and the raylet of this node, as far as they can be watched."""
    if not ray.is_initialized():
        return []
    context = ray.get_runtime_context()
    host, _, port = context.gcs_address.rpartition(":")
    found: list[_ServerHere | _JoinedServer] = _reached(GCS, (host.strip("[]"), int(port)), GCS_PATIENCE_S)
    for node in ray.nodes():
        if node["NodeID"] == context.get_node_id():
            address = (node["NodeManagerAddress"], node["NodeManagerPort"])
            here = _server_at(node["RayletSocketName"], _named(RAYLET, address))
            found += [here] if here else _reached(RAYLET, address, 0.0)
    return found


def _reached(name: str, address: tuple[str, int], patience_s: float) -> list[_ServerHere | _JoinedServer]:
    try:
        return [_JoinedServer(name, address, patience_s=patience_s)]
    except OSError as error:
        logger.warning("Ray's %s cannot be watched: %s", _named(name, address), error)
        return []


def _server_at(path: str, name: str) -> _ServerHere | None:
    """Return the server that listens at this local socket. None when it cannot be seen as a process, as from another
    container: then only its port tells whether it lives."""
    try:
        with socket.socket(socket.AF_UNIX) as asked:
            asked.settimeout(CONNECT_S)
            asked.connect(path)
            return _ServerHere(psutil.Process(_peer(asked)), name)
    except (OSError, psutil.Error) as error:
        logger.info("Ray's %s is watched by its port: %s", name, error)
        return None


def _named(name: str, address: tuple[str, int]) -> str:
    return f"{name} ({address[0]}:{address[1]})"
