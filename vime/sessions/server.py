"""The HTTP face of sessions: `make_routes` for a server that mounts them, `make_app` for one of its own.

Who has the admin key makes sessions, or claims those that a run offers; a session's own key opens that session and
nothing else. SDKs send it in Authorization or x-api-key.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import TypeVar, cast

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from vime.sessions.bodies import BodyRefused, read_body
from vime.sessions.dialects import DIALECTS, Dialect, Json, encode_events, read_ask
from vime.sessions.offers import Offers
from vime.sessions.service import Live, Refused, Sessions
from vime.sessions.store import Budget
from vime.types import LARGEST_REWARD, EngineError, LostError

logger = logging.getLogger(__name__)

T = TypeVar("T")
PART_BYTES = 1 << 16
"""The last part of an answer: so much is handed over without another look whether its client is there."""
ROUNDS = 3
"""Of the event loop, from a write that fails to the news of it: by the transport, the server, and our own task."""
Handler = Callable[[Request], Awaitable[Response]]


class _Create(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    group_index: int
    index: int
    budget: Budget = msgspec.field(default_factory=Budget)


class _Claim(msgspec.Struct, forbid_unknown_fields=True):
    """The next session that the run offers: its group and its budget are the run's."""


class _Complete(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A reward, or the reason why there is none. Reward null: the run's reward function gives it."""

    reward: float | msgspec.UnsetType | None = msgspec.UNSET
    failed: str | None = None


def make_app(sessions: Callable[[], Awaitable[Sessions]], *, admin_key: str, model: str) -> Starlette:
    """Return a server of its own; `sessions` makes the service on the server's event loop."""

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        app.state.sessions = service = await sessions()
        await service.open()
        watch = asyncio.create_task(_end_idle_sessions(service))
        yield
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        await service.close()

    return Starlette(routes=make_routes(admin_key=admin_key, model=model), lifespan=lifespan)


async def _end_idle_sessions(service: Sessions) -> None:
    """End sessions that ask nothing any more, and name each in the log."""
    while True:
        await asyncio.sleep(service.idle_s / 4)
        try:
            for session_id in await service.expire():
                logger.warning("session %s has failed: it asked nothing for %g s", session_id, service.idle_s)
        except Exception:  # boundary: a disk that is full now may have room at the next look
            logger.exception("idle sessions could not be ended")


def make_routes(*, admin_key: str, model: str, offers: Offers | None = None, claims_last: bool = False) -> list[Route]:
    """Return the routes; the application's `state.sessions` is the open service. With `offers` of a run, sessions are
    claimed and not made. `claims_last`: a claim of a sample to train is noted, and outlives this process."""

    async def create(request: Request) -> Response:
        _admit(request, admin_key)
        given = _read(await _body(request), _Create)
        session, key = await _service(request).create(given.group_index, given.index, given.budget)
        return JSONResponse({"id": session.id, "key": key, **_urls(request)})

    async def claim(request: Request) -> Response:
        assert offers is not None
        _admit(request, admin_key)
        _read(await _body(request) or b"{}", _Claim)
        key, client = request.headers.get("idempotency-key", ""), _Client(request, offers.look_again)
        try:
            offer = await offers.claim(key, lambda: client.is_gone)
        finally:
            client.leave()
        if offer is None:
            return Response(status_code=204)
        if claims_last and not offer.told["evaluation"]:
            await _service(request).note_claim(offer.live, key)
        return Response(json.dumps({**offer.told, **_urls(request)}, default=str), media_type="application/json")

    async def complete(request: Request) -> Response:
        live = _own(request, admin_key)
        given = _read(await _body(request), _Complete)
        if given.failed is not None:
            await _service(request).fail(live, given.failed)
        elif given.reward is None and offers is not None:
            await _service(request).complete(live, None)
        elif isinstance(given.reward, float) and abs(given.reward) <= LARGEST_REWARD:
            await _service(request).complete(live, given.reward)
        else:
            what = f"expected a finite reward of at most {LARGEST_REWARD:.2g}, or failed with a reason"
            raise Refused(400, "reward", what)
        return _described(live)

    async def show(request: Request) -> Response:
        return _described(_own(request, admin_key))

    async def delete(request: Request) -> Response:
        await _service(request).delete(_own(request, admin_key))
        return JSONResponse({})

    async def count(request: Request) -> Response:
        live = _service(request).by_key(_key(request))
        ask = read_ask(DIALECTS["/v1/messages"], _json(await _body(request)))
        return JSONResponse({"input_tokens": _service(request).count(live, ask)})

    async def models(_: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": model, "object": "model", "owned_by": "vime"}]})

    turns = [Route(path, _guarded(_turn(path, dialect, model)), methods=["POST"]) for path, dialect in DIALECTS.items()]
    return [
        *turns,
        Route("/v1/messages/count_tokens", _guarded(count), methods=["POST"]),
        Route("/v1/models", models, methods=["GET"]),
        Route("/v1/sessions", _guarded(create if offers is None else claim), methods=["POST"]),
        Route("/v1/sessions/{id}", _guarded(show), methods=["GET"]),
        Route("/v1/sessions/{id}", _guarded(delete), methods=["DELETE"]),
        Route("/v1/sessions/{id}/complete", _guarded(complete), methods=["POST"]),
    ]


def _turn(path: str, dialect: Dialect, model: str) -> Handler:
    async def handle(request: Request) -> Response:
        service = _service(request)
        live = service.by_key(_key(request))
        content = await _body(request)
        body = _json(content)
        retry = request.headers.get("x-stainless-retry-count", "0")
        asked = await service.find(
            live,
            read_ask(dialect, body),
            digest=hashlib.sha256(path.encode() + b"\0" + content).hexdigest(),
            retry_count=int(retry) if retry.isdecimal() and len(retry) < 10 else 0,
            idempotency_key=request.headers.get("idempotency-key", ""),
        )
        client = _Client(request, lambda: service.lose(live, asked))
        try:
            entry = await service.answer(live, asked)
            name = str(body.get("model") or model)
            if body.get("stream") and dialect.stream is not None:
                events = list(encode_events(dialect.stream(entry, body, name)))
                return _Answer(StreamingResponse((), media_type="text/event-stream"), events, client)
            whole = JSONResponse(dialect.write(entry, body, name))
            content = bytes(whole.body)
            parts = [content[start : start + PART_BYTES] for start in range(0, len(content), PART_BYTES)]
            return _Answer(whole, parts, client)
        except BaseException:
            client.leave()
            raise

    return handle


class _Client:
    """Whoever asked for a turn, looked at until the last part of the answer is handed over: who goes away before has
    not had the whole of it, and `lose` is called. What the system has taken may be lost too, and nobody is told."""

    def __init__(self, request: Request, lose: Callable[[], Awaitable[None]]) -> None:
        self._lose, self._is_served, self.is_gone = lose, False, False
        self._watch = asyncio.create_task(self._look(request.receive))

    async def _look(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        if not self._is_served:  # a connection whose response is complete is called disconnected too
            self.is_gone = True
            try:
                await self._lose()
            except Exception:  # boundary: nobody waits for this; without the note a repeat is sampled anew
                logger.exception("a lost answer could not be noted")

    def leave(self) -> None:
        """Do not look any more."""
        self._is_served = True
        self._watch.cancel()


class _Answer(Response):
    """The answer to a turn in parts, with the status and headers of another response."""

    def __init__(self, like: Response, parts: Sequence[bytes], client: _Client) -> None:
        super().__init__(status_code=like.status_code)
        self.raw_headers, self._parts, self._client = like.raw_headers, parts, client

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope, receive
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        *parts, last = self._parts
        for part in parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        for _ in range(ROUNDS if parts else 0):
            await asyncio.sleep(0)
        if not self._client.is_gone:  # else the server closes what has no end
            self._client.leave()
            await send({"type": "http.response.body", "body": last, "more_body": False})


def _guarded(handle: Handler) -> Handler:
    async def guarded(request: Request) -> Response:
        try:
            return await handle(request)
        except Refused as error:
            return _error(error.status, error.code, str(error), error.details)
        except LostError as error:  # SDKs ask again after 503
            logger.warning("a turn failed: %s", error)
            return _error(503, "engine", "the engines did not answer; ask again")
        except EngineError as error:
            logger.warning("the engine refused a turn: %s", error)
            return _error(400, "engine_refused", "the engine refused the request")

    return guarded


def _error(status: int, code: str, message: str, details: Mapping[str, str] | None = None) -> JSONResponse:
    """The body has what both families of SDKs read."""
    error: dict[str, object] = {"type": code, "code": code, "message": message, "param": None}
    return JSONResponse({"type": "error", "error": error | ({"details": details} if details else {})}, status)


async def _body(request: Request) -> bytes:
    try:
        return await read_body(request)
    except BodyRefused as error:
        raise Refused(error.status, error.code, str(error)) from error


def _json(content: bytes) -> Json:
    return _read(content, dict[str, object])


def _read(content: bytes, kind: type[T]) -> T:
    """Return the body. What cannot be recorded or sent back is refused here, and is no fault later: NaN, halves of
    pairs of surrogates, integers of more than 64 bits, and what is nested too deeply."""
    try:
        body = msgspec.json.decode(content, type=kind)
        msgspec.msgpack.encode(body)
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
        raise Refused(400, "body", f"the body cannot be read: {error}") from error
    return body


def _service(request: Request) -> Sessions:
    return cast("Sessions", request.app.state.sessions)


def _urls(request: Request) -> dict[str, str]:
    """Return the addresses as the SDKs want them, at the host that the client has asked."""
    root = str(request.base_url).rstrip("/")
    return {"base_url": f"{root}/v1", "anthropic_base_url": root}


def _key(request: Request) -> str:
    return request.headers.get("x-api-key") or request.headers.get("authorization", "").removeprefix("Bearer ")


def _admit(request: Request, admin_key: str) -> None:
    if not admin_key or not hmac.compare_digest(_key(request).encode(), admin_key.encode()):
        raise Refused(401, "unknown_key", "this wants the admin key")


def _own(request: Request, admin_key: str) -> Live:
    """Return the session of the path, for its own key or the admin's."""
    service, session_id = _service(request), request.path_params["id"]
    with contextlib.suppress(Refused):
        _admit(request, admin_key)
        return service.by_id(session_id)
    live = service.by_key(_key(request))
    if live.session.id != session_id:
        raise Refused(401, "unknown_key", "this key belongs to another session")
    return live


def _described(live: Live) -> JSONResponse:
    session = live.session
    turns, tokens = live.counts()
    return JSONResponse(
        {
            "id": session.id,
            "group_index": session.group_index,
            "index": session.index,
            "state": session.state,
            "reason": session.reason,
            "stopped": session.stopped,
            "reward": session.reward,
            "turns": turns,
            "tokens": tokens,
        }
    )
