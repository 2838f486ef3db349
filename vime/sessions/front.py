"""A front of a server of sessions: it holds its clients' connections while the server is away, and sends again.

A server that is killed answers again after 7 s (its tokenizer) to 15 s (vLLM's parsers), and the SDKs give up after 1.4
to 2 s. The front has no state: a process of its own that imports nothing heavy, which is why it does not die with the
server. What it sends again is answered once: a turn has an Idempotency-Key, the client's or one of the front, so that
a turn whose answer was lost comes from the record. A client that goes away is away for the server too.
`vime sessions-front` is its process.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Mapping

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from vime.sessions.bodies import BodyRefused, HeldBodies
from vime.utils.http import HttpFailure, HttpSession, HttpUnreachable
from vime.utils.waits import waiting

POLL_S = 0.05
MOST_BROKEN = 8
"""How many connections of one request may break: it may be what ends the server."""
PASSED_ON = ("authorization", "x-api-key", "host", "x-stainless-retry-count", "idempotency-key")
METHODS = ["GET", "POST", "DELETE"]


def make_front(server: str, *, patience_s: float, deadline_s: float) -> Starlette:
    """Return the front of the server at this address. A request that has had no response for `patience_s` because the
    server is away gets 503, and one that has had none for `deadline_s` for whatever reason (a server that is there, and
    hangs) gets 504; SDKs repeat both."""
    bodies = HeldBodies()

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        app.state.http = HttpSession()
        yield
        await app.state.http.close()

    async def pass_on(request: Request) -> Response:
        try:
            async with bodies.read(request) as body:
                return await answer(request, body)
        except BodyRefused as error:
            return _error(error.status, error.code, str(error))

    async def answer(request: Request, body: bytes) -> Response:
        http: HttpSession = request.app.state.http
        url = f"{server}{request.url.path}" + (f"?{request.url.query}" if request.url.query else "")
        asking = ask_until_answered(http, request.method, url, body, _headers(request))
        asked = asyncio.create_task(asyncio.wait_for(asking, deadline_s))
        gone = asyncio.create_task(_disconnected(request))
        try:
            await asyncio.wait({asked, gone}, return_when=asyncio.FIRST_COMPLETED)
            return asked.result() if asked.done() else Response(status_code=499)  # which nobody reads
        except TimeoutError:
            return _error(
                504, "server_hangs", f"the server of sessions has not answered for {deadline_s:g} s; ask again"
            )
        finally:
            asked.cancel()  # the server sees it, and gives the turn to whoever asks the same again
            gone.cancel()

    async def ask_until_answered(
        http: HttpSession, method: str, url: str, body: bytes, headers: Mapping[str, str]
    ) -> Response:
        with waiting("the server of sessions to respond", "session server", deadline_s=deadline_s):
            last_seen, num_broken = time.monotonic(), 0
            while num_broken < MOST_BROKEN and time.monotonic() - last_seen < patience_s:
                try:
                    response = await http.call(method, url, body or None, headers=headers)
                except HttpUnreachable:
                    await asyncio.sleep(POLL_S)
                except HttpFailure:  # the server was there
                    last_seen, num_broken = time.monotonic(), num_broken + 1
                    await asyncio.sleep(POLL_S)
                else:
                    return Response(response.content, response.status, media_type=response.content_type)
        return _error(503, "server_away", f"the server of sessions has been away for {patience_s:g} s; ask again")

    return Starlette(routes=[Route("/{path:path}", pass_on, methods=METHODS)], lifespan=lifespan)


async def _disconnected(request: Request) -> None:
    """Return when the client has gone away."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _headers(request: Request) -> Mapping[str, str]:
    """Return what is passed on. A first request gets a key; a retry has its count, which finds the recorded turn."""
    headers = {name: request.headers[name] for name in PASSED_ON if name in request.headers}
    if request.method == "POST" and request.headers.get("x-stainless-retry-count", "0") == "0":
        headers.setdefault("idempotency-key", f"front-{secrets.token_hex(16)}")
    return headers


def _error(status: int, code: str, message: str) -> Response:
    error = {"type": code, "code": code, "message": message, "param": None}
    return JSONResponse({"type": "error", "error": error}, status)
