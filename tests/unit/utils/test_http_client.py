"""HTTP over kept connections: when one is used again, and when not."""

import socket
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest

from vime.utils import http
from vime.utils.http import FAILURES, HttpClient, status_of


class Server(ThreadingHTTPServer):
    """Answers the status that the path names, with the number of the connection; `/100` closes it without an answer."""

    daemon_threads = True
    num_connections = 0


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def setup(self) -> None:
        super().setup()
        self.server.num_connections += 1
        self.number = self.server.num_connections

    def do_GET(self) -> None:
        status = int(self.path[1:])
        if status == 100:
            self.close_connection = True
            return
        content = f"{self.number} {self.headers.get('X-Vime-Key')}".encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server():
    with Server(("127.0.0.1", 0), Handler) as running:
        Thread(target=running.serve_forever, args=(0.02,), daemon=True).start()
        yield running
        running.shutdown()


@pytest.fixture
def client(server):
    made = HttpClient(f"http://127.0.0.1:{server.server_port}", timeout_s=10, headers={"X-Vime-Key": "k"})
    yield made
    made.close()


def test_a_connection_is_used_again(client):
    assert [client.call("GET", "/200") for _ in range(3)] == [(200, b"1 k")] * 3


def test_after_an_answer_that_is_not_200_or_none_at_all_the_next_call_connects_anew(client):
    assert client.call("GET", "/500") == (500, b"1 k")
    assert client.call("GET", "/200") == (200, b"2 k")
    with pytest.raises(FAILURES):
        client.call("GET", "/100")
    assert client.call("GET", "/200") == (200, b"3 k")


def test_a_connection_that_was_idle_for_long_is_given_up(client, monkeypatch):
    assert client.call("GET", "/200") == (200, b"1 k")
    monkeypatch.setattr(http, "IDLE_S", 0.0)
    assert client.call("GET", "/200") == (200, b"2 k")


def test_a_server_that_does_not_answer_ends_at_the_timeout(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(TimeoutError):
        status_of(f"http://127.0.0.1:{silent.getsockname()[1]}/health", timeout_s=0.2)


def test_no_proxy_of_the_environment_stands_between(server, monkeypatch: Any):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert status_of(f"http://127.0.0.1:{server.server_port}/204", timeout_s=10) == 204
