"""A cluster that `ray start` made, with a home, ports and a temporary directory of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from vime.utils.network import free_port

RAY = (sys.executable, "-m", "ray.scripts.scripts")


@dataclass(frozen=True)
class Head:
    """A cluster of one node."""

    address: str
    dashboard: str
    home: Path
    pid: int

    def server(self, name: str) -> psutil.Process:
        [found] = [child for child in psutil.Process(self.pid).children(recursive=True) if child.name() == name]
        return found


def environment(home: Path, **more: str) -> dict[str, str]:
    """This process's without what it says of Ray's tokens, and what a local Ray of another test said of torch."""
    not_kept = ("RAY_AUTH_", "RAY_ADDRESS", "TORCH")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(not_kept)}
    return {**kept, "HOME": str(home), **more}


def live_in(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the runs of a test join a cluster of this home as a user of it would: without this process's token of Ray,
    and without what a local run says to its processes by Ray's environment."""
    for name in [name for name in os.environ if name.startswith(("RAY_AUTH_", "TORCH"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(home))


@contextlib.contextmanager
def running_head(home: Path, *, with_dashboard: bool, flags: Sequence[str] = (), **variables: str) -> Iterator[Head]:
    """`flags` of `ray start` and `variables` of its environment, beside the usual ones."""
    port, dashboard = free_port(), free_port()
    directory = tempfile.mkdtemp(prefix="vime-head-", dir="/tmp")  # Ray's sockets allow no longer path
    ports = {"port": port, "dashboard-port": dashboard}
    for name in ("ray-client-server-port", "dashboard-agent-listen-port", "dashboard-agent-grpc-port"):
        ports[name] = free_port()
    command = [*RAY, "start", "--head", "--block", "--temp-dir", directory, "--num-cpus", "4", "--disable-usage-stats"]
    command += [f"--{name}={value}" for name, value in ports.items()]
    command += [f"--include-dashboard={str(with_dashboard).lower()}", "--object-store-memory=200000000", *flags]
    log = Path(directory) / "head.out"
    with log.open("w") as output:
        head = subprocess.Popen(
            command,
            env=environment(home, PYTHONUNBUFFERED="1", RAY_worker_niceness="0", **variables),
            cwd=home,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        wait_for_line(log, head, "Ray runtime started")
        yield Head(address=f"127.0.0.1:{port}", dashboard=f"http://127.0.0.1:{dashboard}", home=home, pid=head.pid)
    finally:
        if head.poll() is None:  # else it failed at its start, which has been said
            members = [head_process := psutil.Process(head.pid), *head_process.children(recursive=True)]
            head.send_signal(signal.SIGTERM)
            _, left = psutil.wait_procs(members, timeout=60)
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            head.wait(60)
        shutil.rmtree(directory)


@contextlib.contextmanager
def joined_node(head: Head, *, num_cpus: int) -> Iterator[psutil.Process]:
    """One more node of that cluster, as `ray start --address` makes it."""
    log = head.home / f"node-{free_port()}.out"
    ports = [f"--{name}={free_port()}" for name in ("dashboard-agent-listen-port", "dashboard-agent-grpc-port")]
    command = [*RAY, "start", "--block", "--address", head.address, "--num-cpus", str(num_cpus), *ports]
    with log.open("w") as output:
        node = subprocess.Popen(
            [*command, "--object-store-memory=200000000"],
            env=environment(head.home, PYTHONUNBUFFERED="1", RAY_worker_niceness="0"),
            cwd=head.home,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    process = psutil.Process(node.pid)
    try:
        wait_for_line(log, node, "Ray runtime started")
        yield process
    finally:
        for member in [*process.children(recursive=True), process] if node.poll() is None else []:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        node.wait(60)


def wait_for_line(log: Path, process: subprocess.Popen[bytes], text: str) -> None:
    """Until the output has `text` in it; the head's own time-outs bound it."""
    with log.open() as lines:
        while True:
            line = lines.readline()
            if text in line:
                return
            if not line:
                if process.poll() is not None:
                    pytest.fail(f"the head ended with {process.returncode}:\n{log.read_text()}")
                time.sleep(0.1)  # the core is the head's
