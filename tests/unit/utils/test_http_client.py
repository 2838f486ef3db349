"""HTTP over kept connections: when one is used again, what is never sent twice, and what is left after `close`."""

import asyncio
import contextlib
import gc
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import aiohttp
import pytest

from vime.utils import http
from vime.utils.http import HttpFailure, HttpSession, HttpThread, HttpTimeout, HttpUnreachable

DEADLINE_S = 20.0


class Server(ThreadingHTTPServer):
    """The path says what comes of a request:

    /200 (any status): the number of the connection, and the key
    /last: the same, and then the server closes the connection without having said that it will
    /drop: no response, if this connection has carried one before; else like /200
    /slow: a byte every 50 ms, for ever
    /away: sent elsewhere, to /200
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.requests: list[tuple[str, str, bytes]] = []
        self.num_connections, self.num_ended = 0, 0
        self.changed = threading.Condition()
        self.is_open = True

    def wait_until_ended(self, number: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.num_ended >= number, DEADLINE_S), self.num_ended


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def setup(self) -> None:
        super().setup()
        self.num_requests = 0
        with self.server.changed:
            self.server.num_connections += 1
            self.number = self.server.num_connections
            self.server.changed.notify_all()

    def finish(self) -> None:
        super().finish()
        with contextlib.suppress(OSError):  # the client may have closed it
            self.connection.shutdown(socket.SHUT_WR)  # the client hears of it before the test does
        with self.server.changed:
            self.server.num_ended += 1
            self.server.changed.notify_all()

    def do_GET(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.requests.append((self.command, self.path, content))
        self.num_requests += 1
        if self.path == "/drop" and self.num_requests > 1:
            self.close_connection = True
            return
        content = f"{self.number} {self.headers.get('X-Vime-Key')}".encode()
        self.send_response({"/away": 302}.get(self.path, int(self.path[1:]) if self.path[1:].isdigit() else 200))
        if self.path == "/away":
            self.send_header("Location", "/200")
        self.send_header("Content-Length", "1000" if self.path == "/slow" else str(len(content)))
        self.end_headers()
        if self.path == "/slow":
            self._dribble()
            return
        self.wfile.write(content)
        if self.path == "/last":
            self.close_connection = True

    do_POST = do_GET

    def _dribble(self) -> None:
        tick = threading.Event()
        try:
            while self.server.is_open:
                self.wfile.write(b"x")
                tick.wait(0.05)
        except OSError:
            self.close_connection = True

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server():
    with Server() as running:
        threading.Thread(target=running.serve_forever, args=(0.02,), daemon=True).start()
        yield running
        running.is_open = False
        running.shutdown()


@pytest.fixture
def client():
    made = HttpThread("vime-test-http", headers={"X-Vime-Key": "k"})
    yield made
    made.close()


def call(client: HttpThread, server: Server, method: str, path: str, deadline_s: float = DEADLINE_S) -> tuple[int, str]:
    response = client.call(method, server.url + path, b"{}" if method == "POST" else None, deadline_s=deadline_s)
    return response.status, response.content.decode()


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "vime-test-http"]


def test_a_connection_is_used_again_after_any_status_and_by_any_thread(client, server):
    assert call(client, server, "GET", "/200") == (200, "1 k")
    assert call(client, server, "POST", "/500") == (500, "1 k")
    with ThreadPoolExecutor(1) as other:
        assert other.submit(call, client, server, "POST", "/200").result(DEADLINE_S) == (200, "1 k")
    assert len(threads()) == 1


def test_calls_at_once_to_one_server_are_held_to_their_number(server):
    client = HttpThread("vime-test-http", calls_at_once=2)

    async def ask(session: HttpSession) -> list[Any]:
        return await asyncio.gather(*(session.call("GET", server.url + "/200") for _ in range(10)))

    assert len(client.run(ask, deadline_s=DEADLINE_S)) == len(server.requests) == 10
    assert server.num_connections <= 2
    client.close()


def test_a_connection_that_its_server_closed_between_calls_costs_no_call(client, server):
    assert call(client, server, "POST", "/last") == (200, "1 k")
    server.wait_until_ended(1)
    assert call(client, server, "POST", "/200") == (200, "2 k")
    assert [path for _, path, _ in server.requests] == ["/last", "/200"]  # each once


def test_a_post_that_a_server_took_without_a_response_fails_and_is_not_sent_twice(client, server):
    assert call(client, server, "POST", "/200") == (200, "1 k")
    with pytest.raises(HttpFailure, match="ServerDisconnectedError"):
        call(client, server, "POST", "/drop")
    assert server.requests == [("POST", "/200", b"{}"), ("POST", "/drop", b"{}")]


def test_a_get_that_a_kept_connection_swallowed_is_asked_over_another_one(client, server):
    assert call(client, server, "GET", "/200") == (200, "1 k")
    assert call(client, server, "GET", "/drop") == (200, "2 k")


def test_nobody_listening_is_said_in_the_words_of_the_socket(client):
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}/"
    with pytest.raises(HttpFailure, match=r"^ConnectionRefusedError: "):
        client.call("GET", url, deadline_s=DEADLINE_S)


async def test_an_address_that_takes_no_connection_has_not_had_the_request(monkeypatch):
    """A call may then go to another server; one that was sent may not."""
    monkeypatch.setattr(http, "UNBOUND", aiohttp.ClientTimeout(total=None, sock_connect=0.2))
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, contextlib.ExitStack() as waiting:
        place = full.getsockname()
        for one in [socket.socket() for _ in range(4)]:  # the kernel keeps one more than it is told to
            waiting.enter_context(one).setblocking(False)
            one.connect_ex(place)
        session = HttpSession()
        with pytest.raises(HttpUnreachable):
            await session.call("POST", f"http://127.0.0.1:{place[1]}/", b"{}", deadline_s=20)
        await session.close()


def test_the_deadline_is_of_the_whole_call_also_when_every_byte_is_in_time(client, server):
    with pytest.raises(HttpTimeout, match=r"no response within 0\.5 s"):
        call(client, server, "GET", "/slow", deadline_s=0.5)
    server.wait_until_ended(1)  # the connection was closed, which tells the server to stop


def test_a_key_goes_nowhere_else_and_no_proxy_stands_between(client, server, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.setenv("no_proxy", "")
    assert call(client, server, "GET", "/away")[0] == 302
    assert [path for _, path, _ in server.requests] == ["/away"]


async def test_a_service_outside_the_run_may_send_elsewhere(server):
    session = HttpSession(is_outside=True)
    assert (await session.call("GET", server.url + "/away")).status == 200
    await session.close()


def test_close_ends_thread_and_connections_and_may_be_called_again(client, server):
    async def ask(session: HttpSession) -> list[Any]:
        return await asyncio.gather(*(session.call("GET", server.url + "/200") for _ in range(3)))

    client.run(ask, deadline_s=DEADLINE_S)
    client.close()
    client.close()
    server.wait_until_ended(server.num_connections)
    assert threads() == []
    with pytest.raises(HttpFailure, match="is closed"):
        call(client, server, "GET", "/200")


def test_close_fails_the_calls_under_way(client, server):
    with ThreadPoolExecutor(1) as beside:
        asked = beside.submit(call, client, server, "GET", "/slow")
        with server.changed:
            assert server.changed.wait_for(lambda: server.num_connections == 1, DEADLINE_S)
        client.close()
        with pytest.raises(HttpFailure):
            asked.result(DEADLINE_S)
    assert threads() == []


def test_a_client_that_nobody_holds_any_more_is_closed(server):
    client = HttpThread("vime-test-http")
    call(client, server, "GET", "/200")
    del client
    gc.collect()
    assert threads() == []
    server.wait_until_ended(1)
