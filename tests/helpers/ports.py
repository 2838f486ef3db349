"""The listening ports of a live run: who owns each, on which interface, and what it does for a stranger."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import zmq

from tests.helpers.training import Training

LOOPBACK = {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
OWNERS = {  # what the command line or title has in it -> the row of docs/security.md
    "gcs_server": "Ray", "raylet/raylet": "Ray", "ray/dashboard": "Ray", "autoscaler/_private/monitor.py": "Ray",
    "ray::DashboardAgent": "Ray", "ray::RuntimeEnvAgent": "Ray", "ray::IDLE": "Ray",
    "ray::TransferQueueController": "TransferQueue controller", "ray::SimpleStorageUnit": "TransferQueue storage unit",
    "ray::LedgerActor": "ledger", "ray::RolloutManager": "RolloutManager", "ray::EngineActor": "engine actor",
    "ray::RouterActor": "router actor", "ray::TrainerActor": "trainer rank", "train.py": "driver",
    "ray::RolloutWorkerActor": "rollout worker", "ray::GatewayActor": "gateway", "vime produce": "job",
    "VLLM::EngineCore": "vLLM's model", "cpu_server": "vLLM server", "scripted_server": "vLLM server",
    "vllm::router": "router",
}  # fmt: skip
PICKLE_FALLBACK = b"\xc1\xfe\xed"  # TransferQueue 0.1.11: the next frame is a pickle of the whole message
IDENTITY = b"TQ_STORAGE_stranger"  # a storage unit passes on what claims to be one of its clients
TURNED_AWAY = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH,
    zmq.EVENT_DISCONNECTED,
)
Introduce = Callable[[Any], None]


@dataclass(frozen=True)
class Port:
    """A listening TCP port; `owner` is empty for a process that docs/security.md does not know."""

    owner: str
    host: str
    number: int
    pid: int
    command: str


def listening_ports(training: Training) -> list[Port]:
    """Every listening TCP port of every process of a run."""
    return sorted(_ports(training), key=lambda port: (port.owner, port.number))


def ports_on_loopback(training: Training) -> list[Port]:
    """Return the same; the test fails when one is not on loopback, or has an owner that docs/security.md does not
    know."""
    ports = listening_ports(training)
    assert "\n".join(str(port) for port in ports if port.host not in LOOPBACK or not port.owner) == ""
    return ports


def _ports(training: Training) -> Iterator[Port]:
    for process, command in training._members():
        owner = next((name for part, name in OWNERS.items() if part in command), "")
        with contextlib.suppress(psutil.NoSuchProcess):
            for connection in process.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    yield Port(owner, connection.laddr.ip, connection.laddr.port, process.pid, command.strip()[:80])


class Touch:
    """Unpickling it creates a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._path,)


def no_keys(socket: Any) -> None:
    """A plain client: nothing to show."""


def send_pickle(address: str, introduce: Introduce, path: Path, *, deadline_ms: int = 20_000) -> bool | None:
    """Whether a ZeroMQ peer let us in, None when it said neither within the deadline. The pickle, which creates `path`,
    is sent when it does: libzmq takes the way to a peer that turned us away for gone, and a send would wait for another
    one."""
    context = zmq.Context()
    try:
        socket = context.socket(zmq.DEALER)
        socket.identity = IDENTITY
        introduce(socket)
        monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | sum(TURNED_AWAY))
        socket.connect(address)
        if not monitor.poll(deadline_ms):
            return None
        was_let_in = int.from_bytes(monitor.recv_multipart()[0][:2], "little") == zmq.EVENT_HANDSHAKE_SUCCEEDED
        if was_let_in:
            socket.send_multipart([PICKLE_FALLBACK, pickle.dumps(Touch(path))])
            socket.poll(deadline_ms)  # an answer comes from who has read it
        return was_let_in
    finally:
        context.destroy(linger=0)
