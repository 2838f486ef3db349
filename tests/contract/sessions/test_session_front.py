"""A front holds its clients while the server of sessions is away. The SDK of these tests repeats nothing itself.

The front is a process: `vime sessions-front SERVER`.
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import anthropic
import openai
import pytest

from tests.contract.sessions.test_sdk_sessions import LossyProxy, World, leave, plain
from tests.helpers.scripted_engine import Held, Reply
from vime.sessions.bodies import MOST_BYTES

ASKED = [{"role": "user", "content": "q"}]


class Front:
    """A front, which is started at the first use; `client` is an SDK before it."""

    def __init__(self, server_port: int, *flags: str, **limits: float) -> None:
        """`limits`: of vime/sessions/bodies.py and vime/utils/http_server.py, smaller than they are."""
        words = ["sessions-front", f"http://127.0.0.1:{server_port}", *flags]
        lines = ["import vime.cli.main, vime.sessions.bodies as bodies, vime.utils.http_server as server"]
        lines += [f"{'server' if name == 'SILENT_S' else 'bodies'}.{name} = {value}" for name, value in limits.items()]
        self._command = [sys.executable, "-c", "; ".join([*lines, f"vime.cli.main.main({words})"])]
        if not limits:
            self._command = [sys.executable, "-m", "vime", *words]

    def __enter__(self) -> Front:
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        host, _, port = self._process.stdout.readline().rpartition(":")
        assert host == "http://127.0.0.1"  # without --listen
        self.port = int(port)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        assert self._process.wait(30) in (0, -signal.SIGTERM)

    def client(self, session: dict[str, str]) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key=session["key"], max_retries=0)


def ask(client: openai.OpenAI) -> str:
    return str(client.chat.completions.create(model="m", messages=ASKED).choices[0].message.content)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path, "")
    with made.engine:
        try:
            made.start()
            yield made
        finally:
            made.kill()


def test_a_request_to_a_server_that_is_away_is_answered_when_it_is_back(world: World) -> None:
    session = world.session()
    with Front(world.port) as front, ThreadPoolExecutor(1) as threads:
        world.kill()
        answer = threads.submit(ask, front.client(session))
        world.start()
        assert answer.result(60) == "on the 0"
        streamed = anthropic.Anthropic(base_url=f"http://127.0.0.1:{front.port}", api_key=session["key"], max_retries=0)
        with streamed.messages.stream(model="m", max_tokens=100, messages=ASKED) as events:
            assert events.get_final_text() == "on the 1"


def test_a_turn_that_its_server_died_in_is_sampled_again_and_recorded_once(world: World) -> None:
    session = world.session()
    is_asked = threading.Event()
    script = world.engine._script

    def hold_the_first(request: object) -> object:
        is_asked.set()
        return Held(Reply(token_ids=[1])) if request.number == 0 else script(request)

    world.engine._script = hold_the_first
    with Front(world.port) as front, ThreadPoolExecutor(1) as threads:
        answer = threads.submit(ask, front.client(session))
        assert is_asked.wait(60)
        world.kill()
        world.start()
        assert answer.result(60) == "on the 1"
    assert world.call(session, "GET").json()["turns"] == 1


def test_a_turn_whose_answer_was_lost_behind_the_front_is_not_sampled_again(world: World) -> None:
    session = world.session()

    def kill_and_start() -> None:
        world.kill()
        world.start()

    with LossyProxy(world.port, {0}, kill_and_start) as proxy, Front(proxy.port) as front:
        client = front.client(session)
        assert [ask(client), ask(client)] == ["on the 0", "on the 1"]  # two equal first requests are two turns
        assert proxy.count == 3
    assert len(world.engine.requests) == 2


def test_a_client_that_leaves_the_front_and_asks_again_without_a_header_gets_the_turn(world: World) -> None:
    session = world.session()
    with Front(world.port) as front:
        at_front = {**session, "base_url": f"http://127.0.0.1:{front.port}/v1"}
        is_asked, may_answer = threading.Event(), threading.Event()
        script = world.engine._script

        def held(request: object) -> object:
            is_asked.set()
            assert may_answer.wait(60)
            return script(request)

        world.engine._script = held
        leave(front.port, session, "a", lambda _: is_asked.wait(60))
        with ThreadPoolExecutor(1) as threads:
            again = threads.submit(plain, at_front, "a")
            may_answer.set()
            assert again.result(60) == "on the 0"
        assert plain(at_front, "a") == "on the 1"


def test_a_server_that_stays_away_is_a_503_and_a_refusal_is_passed_on(world: World) -> None:
    session = world.session()
    with Front(world.port, "--patience-secs", "0.2") as front:
        with pytest.raises(openai.AuthenticationError):
            ask(front.client({"key": "guess"}))
        world.kill()
        with pytest.raises(openai.InternalServerError, match=r"away for 0\.2 s") as refusal:
            ask(front.client(session))
    assert refusal.value.status_code == 503


def test_a_server_that_hangs_is_a_504_after_the_deadline() -> None:
    hangs = socket.create_server(("127.0.0.1", 0))  # the system takes the connection, and nobody answers
    with (
        hangs,
        Front(hangs.getsockname()[1], "--deadline-secs", "0.2") as front,
        pytest.raises(openai.InternalServerError, match=r"has not answered for 0\.2 s") as refusal,
    ):
        ask(front.client({"key": "any"}))
    assert refusal.value.status_code == 504


@pytest.mark.parametrize(
    ("header", "sent"),
    [
        (f"Content-Length: {MOST_BYTES + 1}", b""),
        ("Transfer-Encoding: chunked", b"%x\r\n" % (MOST_BYTES + 1) + b"x" * (MOST_BYTES + 1) + b"\r\n"),
    ],
)
def test_a_body_that_the_server_would_refuse_is_refused_before_it_is_kept(header: str, sent: bytes) -> None:
    with Front(1) as front, socket.create_connection(("127.0.0.1", front.port), timeout=20) as client:
        client.sendall(f"POST /v1/messages HTTP/1.1\r\nHost: m\r\n{header}\r\n\r\n".encode() + sent)
        assert client.recv(1000).startswith(b"HTTP/1.1 413 ")  # though its end was never sent


def begun(front: Front, head: str) -> socket.socket:
    """A request whose body has not come."""
    client = socket.create_connection(("127.0.0.1", front.port), timeout=20)
    client.sendall(f"POST /v1/messages HTTP/1.1\r\nHost: m\r\n{head}\r\n\r\n".encode())
    return client


def answered(client: socket.socket) -> tuple[int, str]:
    """Return the status of an error, and its code."""
    received = b""
    while not received.endswith(b"}}"):
        part = client.recv(4096)
        assert part, received
        received += part
    head, _, body = received.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]["code"]


def test_bodies_that_are_held_at_a_time_have_a_bound_and_a_client_that_leaves_frees_its_part() -> None:
    """100 bytes fit, of what has arrived. The server is away: what is let in gets another 503."""
    with Front(1, "--patience-secs", "0.2", MOST_HELD_BYTES=100) as front:

        def code(header: str, body: bytes) -> str:
            with begun(front, header) as client:
                client.sendall(body)
                status, found = answered(client)
            assert status == 503
            return found

        def until(expected: str, header: str, body: bytes) -> None:
            ends = time.monotonic() + 20
            while code(header, body) != expected:  # the front has not yet heard of the other client
                assert time.monotonic() < ends

        with begun(front, "Content-Length: 90") as first:
            assert code("Content-Length: 100", b"x" * 100) == "server_away", "what is announced holds nothing"
            first.sendall(b"x" * 80)
            until("too_many_bodies", "Content-Length: 21", b"x" * 21)
            assert code("Content-Length: 20", b"x" * 20) == "server_away"
            assert code("Transfer-Encoding: chunked", b"14\r\n" + b"x" * 20 + b"\r\n0\r\n\r\n") == "server_away"
            assert code("Transfer-Encoding: chunked", b"15\r\n" + b"x" * 21 + b"\r\n") == "too_many_bodies"
        until("server_away", "Content-Length: 100", b"x" * 100)


def test_a_body_that_does_not_come_is_a_408_and_a_client_that_says_nothing_is_left() -> None:
    with Front(1, BODY_S=0.3, SILENT_S=0.5) as front:
        with begun(front, "Content-Length: 80") as client:
            assert answered(client) == (408, "body_missing")
        with socket.create_connection(("127.0.0.1", front.port), timeout=20) as client:
            assert client.recv(1) == b""
