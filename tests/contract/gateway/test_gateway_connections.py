"""Connections to the gateway that bring nothing: they end, and nobody else is held up."""

from __future__ import annotations

import concurrent.futures
import contextlib
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.gateway_run import GatewayRun, lease

SERVER = "vime.utils.http_server"
HEAD = b"POST /v1/leases HTTP/1.1\r\nHost: m\r\n"
STRANGER = HEAD + b"Authorization: Bearer none\r\nContent-Length: 1000\r\n\r\n{"  # it gets 401 before its body is there


@pytest.fixture
def run(tmp_path: Path) -> Iterator[GatewayRun]:
    run = GatewayRun(tmp_path)
    yield run
    run.close()


def connect(run: GatewayRun, sends: bytes = b"") -> socket.socket:
    host, _, port = run.server.url.removeprefix("http://").rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=20)
    connection.sendall(sends)
    return connection


def is_closed(connection: socket.socket) -> bool:
    """Read to the end, as far as there is one within 20 s; with half a second between the bytes of a drip."""
    ends = time.monotonic() + 20
    connection.settimeout(0.1)
    with connection:
        while time.monotonic() < ends:
            try:
                if not connection.recv(4096):
                    return True
            except TimeoutError:
                with contextlib.suppress(OSError):
                    connection.sendall(b"x")
            except ConnectionError:
                return True
    return False


@pytest.mark.parametrize("sends", [b"", b"POST", HEAD + b"Long: ", STRANGER])
def test_a_connection_without_a_call_under_way_is_closed_whatever_drips_into_it(
    run: GatewayRun, monkeypatch: pytest.MonkeyPatch, sends: bytes
) -> None:
    monkeypatch.setattr(f"{SERVER}.SILENT_S", 0.5)
    assert is_closed(connect(run, sends))


def test_a_connection_that_says_nothing_at_all_is_closed(run: GatewayRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{SERVER}.SILENT_S", 0.5)
    with connect(run) as connection, contextlib.suppress(ConnectionError):
        assert connection.recv(1) == b""


def test_calls_under_way_outlive_the_time_of_silence_and_a_crowd_of_idle_connections(
    run: GatewayRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call waits 3 s for a slot: six times as long as a silent connection lives."""
    monkeypatch.setattr(f"{SERVER}.SILENT_S", 0.5)
    monkeypatch.setattr(f"{SERVER}.MOST_IDLE", 4)
    client = run.client()
    assert len(lease(client, 4)) == 4, "every slot"
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.post, "/v1/leases", json={"request": "next", "wait_s": 3})
        crowd = [connect(run) for _ in range(20)]
        assert all(is_closed(connection) for connection in crowd)
        assert not waiting.done()
        assert waiting.result(20).json()["waits_for"].startswith("a slot")


def test_a_crowd_of_idle_connections_is_closed_long_before_each_would_be(
    run: GatewayRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the clock of silence each would live for 60 s at least."""
    monkeypatch.setattr(f"{SERVER}.MOST_IDLE", 4)
    crowd = [connect(run) for _ in range(5)]
    assert all(is_closed(connection) for connection in crowd)
    assert run.client().post("/v1/producers/heartbeat", json={}).status_code == 200


def test_a_head_without_an_end_is_refused_after_64_kib(run: GatewayRun) -> None:
    with connect(run, HEAD + b"Long: ") as connection:
        with contextlib.suppress(ConnectionError):  # the response is there before it has read all
            connection.sendall(b"x" * (1 << 20))
        assert connection.recv(100).startswith(b"HTTP/1.1 400 ")


def test_a_body_that_is_longer_than_a_head_may_be_is_read_to_its_end(tmp_path: Path) -> None:
    """Sent slowly, so that it comes in several reads."""
    run = GatewayRun(tmp_path, limits={"max_body_bytes": 1 << 22})
    try:
        parts = (b"x" * (1 << 17) for _ in range(8))
        headers = {"content-type": "application/json"}
        response = run.client().post("/v1/producers/heartbeat", content=parts, headers=headers)
        assert (response.status_code, response.json()["code"]) == (400, "not_this_message")
    finally:
        run.close()
