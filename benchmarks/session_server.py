"""What the server of sessions adds to a turn, what it costs, and how both grow with open sessions.

    .venv/bin/python benchmarks/session_server.py [--sessions 64] [--turns 8] [--open 64 1024 4096] [--kills 40]

An engine of fixed latency answers every prompt with the same number of tokens. `direct`: the same prompts sent to it by
the same client. `sessions`: chat completions through a server in a process of its own, that records each turn (SQLite,
synchronous=FULL) before it answers. Each session is a conversation that grows by a turn a request. Their first requests
are spread evenly over the latency of the engine; `at once`: all ask in the same moment, again and again. Added latency
is the difference of the quantiles of both. CPU time is the server's process.
Recovery: SIGKILL, start, and the first answer to a retry of a recorded turn; the start is a new Python each time. Exit
code 1 when the added p95 at --sessions is above 10 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import psutil

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from vime.utils.network import free_port

GOAL_S = 0.010
ADMIN = "admin"
TOKENS = 64  # of each completion
SPOKEN = "x" * TOKENS


def serve_engine(port: int, latency_s: float) -> None:
    from aiohttp import web

    ids = [ord("x")] * TOKENS
    choice = {
        "index": 0, "token_ids": ids, "finish_reason": "length",
        "logprobs": {"content": [{"token_id": token, "logprob": -0.5} for token in ids]},
        "weight_versions": [{"version": "0", "start": 0, "end": TOKENS}],
    }  # fmt: skip
    answer = json.dumps({"choices": [choice]}).encode()

    async def generate(request: web.Request) -> web.Response:
        await request.read()
        await asyncio.sleep(latency_s)
        return web.Response(body=answer, content_type="application/json")

    app = web.Application(client_max_size=1 << 26)
    app.router.add_post("/inference/v1/generate", generate)
    web.run_app(app, host="127.0.0.1", port=port, print=None, access_log=None, backlog=8192)


class Bytes:
    """A tokenizer of one token a character: what is measured is the server."""

    special_ids: tuple[int, ...] = (0,)

    def render(self, messages, tools, *, asks: bool) -> str:  # noqa: ARG002 - the signature of a tokenizer
        return "".join(f"{m['role'][0]}:{m['content']}\0" for m in messages) + ("a:" if asks else "")

    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, ids) -> str:
        return "".join(map(chr, ids))


def serve_sessions(port: int, engine: str, directory: Path) -> None:
    from vime.rollout.engine_client import EngineClient
    from vime.sessions.server import make_app
    from vime.sessions.service import Sessions
    from vime.sessions.store import Reply, SessionStore
    from vime.utils.http_server import HttpServer

    tokenizer = Bytes()

    async def sessions() -> Sessions:
        return Sessions(
            SessionStore(directory / "sessions.sqlite"),
            EngineClient(engine, max_in_flight=8192, timeout_s=300),
            tokenizer,
            lambda _prompt, ids, _tools: Reply(content=tokenizer.decode(ids)),
            context_length=1 << 20,
            sampling_params={"temperature": 1.0, "max_tokens": TOKENS},
            idle_s=3600,
        )

    app = make_app(sessions, admin_key=ADMIN, model="m")
    with socket.create_server(("127.0.0.1", port), backlog=8192) as listening:
        HttpServer(app, lifespan="on").run(sockets=[listening])


@contextmanager
def process(*command: str, port: int) -> Iterator[subprocess.Popen[bytes]]:
    started = start(*command, port=port)
    try:
        yield started
    finally:
        started.kill()
        started.wait(30)


def start(*command: str, port: int) -> subprocess.Popen[bytes]:
    """Return when it takes connections."""
    started = subprocess.Popen([sys.executable, __file__, "--serve", *command])
    ends = time.monotonic() + 120
    while True:
        try:
            asyncio.run(_connect(port))
            return started
        except OSError:
            if started.poll() is not None or time.monotonic() > ends:
                raise
            time.sleep(0.01)


async def _connect(port: int) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.close()


async def post(client: aiohttp.ClientSession, url: str, body: object, key: str = "", **headers: str) -> dict:
    async with client.post(url, json=body, headers={"Authorization": f"Bearer {key}", **headers}) as response:
        content = await response.read()
        assert response.status == 200, content
        return json.loads(content)


class Load:
    """A client beside the engine and the server."""

    def __init__(self, engine: int, server: int) -> None:
        self.engine, self.server = f"http://127.0.0.1:{engine}", f"http://127.0.0.1:{server}"

    async def open(self, client: aiohttp.ClientSession, count: int) -> list[str]:
        keys = []
        for begin in range(0, count, 256):
            bodies = [{"group_index": 0, "index": index} for index in range(begin, min(count, begin + 256))]
            made = await asyncio.gather(*(post(client, f"{self.server}/v1/sessions", body, ADMIN) for body in bodies))
            keys += [one["key"] for one in made]
        return keys

    async def direct(self, client: aiohttp.ClientSession, turns: int, took: list[float], after_s: float = 0.0) -> None:
        await asyncio.sleep(after_s)
        prompt = [ord(character) for character in "u:question 0\0a:"]
        for turn in range(turns):
            began = time.monotonic()
            body = {"token_ids": prompt, "sampling_params": {"n": 1, "max_tokens": TOKENS, "logprobs": 0}}
            await post(client, f"{self.engine}/inference/v1/generate", {**body, "request_id": "r", "stream": False})
            took.append(time.monotonic() - began)
            prompt += [ord(character) for character in f"{SPOKEN}\0u:question {turn}\0a:"]

    async def session(
        self, client: aiohttp.ClientSession, key: str, turns: int, took: list[float], after_s: float = 0.0
    ) -> None:
        await asyncio.sleep(after_s)
        messages: list[dict[str, str]] = []
        for turn in range(turns):
            messages.append({"role": "user", "content": f"question {turn}"})
            began = time.monotonic()
            answer = await post(client, f"{self.server}/v1/chat/completions", {"model": "m", "messages": messages}, key)
            took.append(time.monotonic() - began)
            messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})

    async def compare(self, count: int, turns: int, spread_s: float) -> tuple[list[float], list[float], list[str]]:
        """Latencies of both sides, one after the other; the sessions stay open."""
        direct: list[float] = []
        through: list[float] = []
        waits = [spread_s * number / count for number in range(count)]
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
            keys = await self.open(client, count)
            await asyncio.gather(*(self.direct(client, 1, []) for _ in range(count)))  # connections
            await asyncio.gather(*(self.direct(client, turns, direct, wait) for wait in waits))
            pairs = zip(keys, waits, strict=True)
            await asyncio.gather(*(self.session(client, key, turns, through, wait) for key, wait in pairs))
        return direct, through, keys


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def latency(load: Load, server: psutil.Process, count: int, turns: int, repeats: int, spread_s: float) -> float:
    """Return what the 95th percentile is above the engine's, the median of the repeats."""
    asyncio.run(load.compare(count, 2, spread_s))  # warms up
    added: dict[float, list[float]] = {0.5: [], 0.95: []}
    cpus = []
    for _ in range(repeats):
        cpu = cpu_of(server)
        direct, through, _keys = asyncio.run(load.compare(count, turns, spread_s))
        cpus.append((cpu_of(server) - cpu) / (count * turns))
        for share, found in added.items():
            found.append(quantile(through, share) - quantile(direct, share))
    middle, late = (statistics.median(found) for found in added.values())
    cpu_s = statistics.median(cpus)
    print(
        f"{count} sessions{'' if spread_s else ' at once'}: added p50 {1e3 * middle:.1f} ms, p95 {1e3 * late:.1f} ms "
        f"({', '.join(f'{1e3 * each:.1f}' for each in sorted(added[0.95]))}); {1e3 * cpu_s:.2f} ms of CPU a turn: "
        f"{1 / cpu_s:,.0f} turns/s a core, {10 / cpu_s:,.0f} sessions a core that take a turn every 10 s"
    )
    return late


def growth(counts: list[int], engine: int, directory: Path) -> None:
    """Each count has a server of its own; a turn in each session, then 512 turns of sessions spread over them."""
    found = []
    for count in counts:
        port = free_port()
        place = directory / f"open-{count}"
        place.mkdir()
        command = ("sessions", str(port), f"http://127.0.0.1:{engine}", str(place))
        with process(*command, port=port) as server:
            seen, load = psutil.Process(server.pid), Load(engine, port)
            empty = seen.memory_info().rss
            cpu_s, took = asyncio.run(_grow(load, seen, count))
            kept = (seen.memory_info().rss - empty) / count
            found.append((count, cpu_s))
            print(
                f"{count:6,} open sessions: {1e3 * cpu_s:.2f} ms of CPU a turn, p95 "
                f"{1e3 * quantile(took, 0.95):.1f} ms, {kept / 1024:.1f} KiB of memory a session"
            )
    if len(found) > 1:
        (first, least), (last, most) = found[0], found[-1]
        print(f"growth exponent of CPU a turn: {math.log(most / least) / math.log(last / first):.3f}")


async def _grow(load: Load, server: psutil.Process, count: int) -> tuple[float, list[float]]:
    """CPU seconds a turn and latencies of second turns, 32 at a time."""
    took: list[float] = []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=32)) as client:
        keys = await load.open(client, count)
        await asyncio.gather(*(load.session(client, key, 1, []) for key in keys))
        chosen = [keys[number * count // 512] for number in range(512)] if count > 512 else keys
        cpu = cpu_of(server)
        for begin in range(0, len(chosen), 32):
            await asyncio.gather(*(load.session(client, key, 4, took) for key in chosen[begin : begin + 32]))
        return (cpu_of(server) - cpu) / (4 * len(chosen)), took


def recovery(kills: int, engine: int, directory: Path) -> None:
    """Seconds from SIGKILL to the answer of a retry, with 64 sessions of 8 turns in the file."""
    port = free_port()
    command = ("sessions", str(port), f"http://127.0.0.1:{engine}", str(directory))
    server, took = start(*command, port=port), []
    try:
        load = Load(engine, port)
        _, _, keys = asyncio.run(load.compare(64, 8, 0.0))
        body = {"model": "m", "messages": [{"role": "user", "content": "question 0"}]}
        for number in range(kills):
            server.send_signal(signal.SIGKILL)
            server.wait(30)
            began = time.monotonic()
            server = start(*command, port=port)
            asyncio.run(_retry(load, keys[number % 64], body))
            took.append(time.monotonic() - began)
    finally:
        server.kill()
        server.wait(30)
    print(
        f"recovery after {kills} SIGKILLs of the server of sessions: median {statistics.median(took):.2f} s, "
        f"p95 {quantile(took, 0.95):.2f} s"
    )


async def _retry(load: Load, key: str, body: object) -> None:
    async with aiohttp.ClientSession() as client:
        await post(client, f"{load.server}/v1/chat/completions", body, key, **{"x-stainless-retry-count": "1"})


def cpu_of(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--latency", type=float, default=0.25, help="of the engine, seconds")
    parser.add_argument("--open", type=int, nargs="*", default=[64, 256, 1024, 4096])
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--serve", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        kind, port, *rest = arguments.serve
        if kind == "engine":
            serve_engine(int(port), float(rest[0]))
        else:
            serve_sessions(int(port), rest[0], Path(rest[1]))
        return 0
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as name:
        directory, engine, fast, port = Path(name), free_port(), free_port(), free_port()
        (directory / "latency").mkdir()
        (directory / "recovery").mkdir()
        added = 0.0
        with process("engine", str(engine), str(arguments.latency), port=engine):
            if arguments.repeats:
                command = ("sessions", str(port), f"http://127.0.0.1:{engine}", str(directory / "latency"))
                with process(*command, port=port) as server:
                    seen, load = psutil.Process(server.pid), Load(engine, port)
                    sizes = (arguments.sessions, arguments.turns, arguments.repeats)
                    added = latency(load, seen, *sizes, arguments.latency)
                    latency(load, seen, *sizes, 0.0)
        with process("engine", str(fast), "0.01", port=fast):
            if arguments.open:
                growth(arguments.open, fast, directory)
            if arguments.kills:
                recovery(arguments.kills, fast, directory / "recovery")
    return 0 if added <= GOAL_S else 1


if __name__ == "__main__":
    sys.exit(main())
