"""Ray's servers, watched: one that ends is named at once, one that lives or comes back is not."""

from __future__ import annotations

import queue
import socket
import subprocess
from collections.abc import Iterator

import pytest

from vime.ray import servers
from vime.ray.servers import _JoinedServer, watched_ray


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """A server of a joined cluster that greets whoever connects."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


def test_a_server_of_a_local_ray_that_ends_is_named_and_one_that_lives_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "RAYLET", "sleep")
    server = subprocess.Popen(["sleep", "600"])
    said: queue.Queue[str] = queue.Queue()
    try:
        with watched_ray(said.put):
            pass
        assert said.empty()
        with watched_ray(said.put):
            server.kill()
            assert said.get(timeout=30) == f"sleep (pid {server.pid})"
    finally:
        server.kill()
        server.wait()


def test_a_server_of_a_joined_cluster_is_lost_when_its_port_refuses(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = listener.getsockname()
    said: queue.Queue[str] = queue.Queue()
    monkeypatch.setattr(servers, "_joined_servers", lambda: [_JoinedServer("raylet", address, patience_s=0)])
    with watched_ray(said.put):
        first, _ = listener.accept()
        first.sendall(b"settings")  # gRPC greets
        first.close()  # and closes what stays silent
        second, _ = listener.accept()  # it looks again
        assert said.empty()
        listener.close()
        second.close()
        assert said.get(timeout=30) == f"raylet (127.0.0.1:{address[1]})"


def test_a_server_that_its_cluster_starts_again_in_time_is_not_lost(listener: socket.socket) -> None:
    address = listener.getsockname()
    server = _JoinedServer("gcs_server", address, patience_s=600)
    connection, _ = listener.accept()
    listener.close()
    connection.close()
    assert not server.is_lost()
    assert server.is_away
    with socket.create_server(address):
        assert not server.is_lost()
        assert not server.is_away
    server.is_away, server._patience_s = True, 0
    assert server.is_lost()
    server.close()
