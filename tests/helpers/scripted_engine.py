"""A scripted stand-in for router + engine: speaks POST /inference/v1/generate over real HTTP, from a thread.

    with ScriptedEngine(lambda request: Reply(token_ids=[7, 2])) as engine:
        ... http://127.0.0.1:{engine.port}

The script sees a `Request` and answers one `Reply` for each of the n samples (called with `sample` 0..n-1). It may
answer a `Failure` (status code), `Hang()` (no answer until the client goes away or the engine is closed), or
`Held(Reply)`: the whole request waits until it is aborted, by its id or by `abort_all`, and that is what it is then
answered with. The engine is its own router: it says that it is the only worker; a real router finds it well.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any

from aiohttp import web


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    token_ids: tuple[int, ...]
    sampling_params: Mapping[str, Any]
    session_id: str
    number: int  # of the HTTP request, from 0
    sample: int  # 0..n-1


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    token_ids: Sequence[int]
    finish_reason: str = "stop"
    version: str = "default"
    log_prob: float = -0.5
    cached_tokens: int | None = None  # of the prompt, as an engine with prompt-tokens details says them
    spans: Sequence[tuple[str, int, int]] | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)  # overrides keys of the choice, for malformed answers


@dataclass(frozen=True, slots=True)
class Failure:
    status: int
    text: str = "scripted failure"


@dataclass(frozen=True, slots=True)
class Hang:
    """No answer."""


@dataclass(frozen=True, slots=True)
class Held:
    """What an aborted request is answered with; its finish reason becomes "abort"."""

    reply: Reply


Script = Callable[[Request], Reply | Failure | Hang | Held]


class ScriptedEngine:
    """Context manager. `requests` lists what arrived, `disconnects` counts clients that left before the answer,
    `most_at_once` is the largest number of requests that were open together."""

    def __init__(self, script: Script, *, answer_s: float = 0.0) -> None:
        """`answer_s`: how long each answer takes, so that requests sent side by side are open together."""
        self._script, self._answer_s = script, answer_s
        self.requests: list[dict[str, Any]] = []
        self.disconnects = self.most_at_once = self._open = 0
        self.disconnected = threading.Event()
        self.is_deaf = False  # as to aborts
        self.workers: list[str] | None = []  # that it names as a router; none: itself
        self.num_held = threading.Semaphore(0)  # acquire it once for each request that is to be held
        self._held: dict[str, asyncio.Event] = {}  # by the request's id, as the engine says it
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="scripted-engine", daemon=True)

    def __enter__(self) -> ScriptedEngine:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._serve(), self._loop).result(60)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(60)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        self._loop.close()

    async def _serve(self) -> None:
        app = web.Application(client_max_size=1 << 28)
        app.router.add_post("/inference/v1/generate", self._generate)
        app.router.add_get("/list_workers", self._list_workers)
        app.router.add_get("/health", self._well)
        app.router.add_post("/abort_requests", self._abort)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.port = self._runner.addresses[0][1]

    def abort_all(self) -> None:
        """What --pause-mode abort does to requests that are held. Any thread."""
        self._loop.call_soon_threadsafe(lambda: [aborted.set() for aborted in self._held.values()])

    async def _well(self, _: web.Request) -> web.Response:
        return web.json_response({})

    async def _list_workers(self, _: web.Request) -> web.Response:
        return web.json_response({"urls": [f"http://127.0.0.1:{self.port}"] if self.workers == [] else self.workers})

    async def _abort(self, request: web.Request) -> web.Response:
        for name in (await request.json())["request_ids"]:
            if name in self._held and not self.is_deaf:
                self._held[name].set()
        return web.json_response({})

    async def _generate(self, request: web.Request) -> web.Response:
        self._open += 1
        self.most_at_once = max(self.most_at_once, self._open)
        try:
            await asyncio.sleep(self._answer_s)
            return await self._answer(request)
        finally:
            self._open -= 1

    async def _answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        number = len(self.requests)
        self.requests.append(body)
        choices, is_held, usage = [], False, {}
        for sample in range(body["sampling_params"]["n"]):
            reply = self._script(
                Request(
                    token_ids=tuple(body["token_ids"]),
                    sampling_params=body["sampling_params"],
                    session_id=request.headers.get("X-Session-ID", ""),
                    number=number,
                    sample=sample,
                )
            )
            if isinstance(reply, Failure):
                return web.Response(status=reply.status, text=reply.text)
            if isinstance(reply, Hang):
                await self._hang()
                return web.Response(status=503)
            if isinstance(reply, Held):
                is_held, reply = True, replace(reply.reply, finish_reason="abort")
            choices.append(choice(sample, reply))
            if reply.cached_tokens is not None:
                usage = {"prompt_tokens_details": {"cached_tokens": reply.cached_tokens}}
        if is_held:
            await self._hold(f"generate-tokens-{body['request_id']}")
        return web.json_response({"choices": choices, "usage": usage})

    async def _hold(self, name: str) -> None:
        aborted = self._held[name] = asyncio.Event()
        self.num_held.release()
        try:
            await aborted.wait()
        finally:
            del self._held[name]

    async def _hang(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            with contextlib.suppress(RuntimeError):
                self.disconnects += 1
                self.disconnected.set()


def choice(index: int, reply: Reply) -> dict[str, Any]:
    """One entry of `choices`, as vLLM writes it."""
    length = len(reply.token_ids)
    spans = reply.spans if reply.spans is not None else [(reply.version, 0, length)] if length else []
    content = [{"token_id": token, "logprob": reply.log_prob, "top_logprobs": []} for token in reply.token_ids]
    return {
        "index": index,
        "token_ids": list(reply.token_ids),
        "finish_reason": reply.finish_reason,
        "stop_reason": None,
        "logprobs": {"content": content},
        "weight_versions": [{"version": version, "start": start, "end": end} for version, start, end in spans],
        **reply.changes,
    }
