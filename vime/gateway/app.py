"""The gateway as an ASGI application: who calls, how much, in which encoding; then `Gateway` does the call.

The order is: token, rate, size, bytes held, encoding, content. Nothing is read of a body before its sender is known and
there is room for it, and nothing is parsed before it is small enough.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

import msgspec
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from vime.gateway import messages as m
from vime.gateway.bodies import Bodies
from vime.gateway.refusal import Refusal
from vime.gateway.service import Gateway
from vime.gateway.tokens import Scope, TokenFile
from vime.types import HandoffError, LostError, VimeError
from vime.utils.waits import waiting

logger = logging.getLogger(__name__)
JSON, MSGPACK, BYTES = "application/json", "application/msgpack", "application/octet-stream"
_RANGE = re.compile(r"bytes=([0-9]{0,18})-([0-9]{0,18})", re.IGNORECASE)
BODY_S = 60.0
"""A body that has not arrived by then is refused."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the protocol that takes a message."""

    path: str
    scopes: tuple[Scope, ...]  # one of them is needed
    takes: type[m.Message]
    returns: type[m.Message]
    name: str  # of the method of Gateway; one of scope admin is in make_app


TRAIN, EVAL, ADMIN = (Scope.TRAIN,), (Scope.EVAL,), (Scope.ADMIN,)
JOBS, READ = TRAIN + EVAL, (Scope.READ, Scope.ADMIN)
CALLS = (
    Call("/v1/producers/register", JOBS, m.Register, m.Registered, "register"),
    Call("/v1/producers/heartbeat", JOBS, m.Heartbeat, m.Alive, "heartbeat"),
    Call("/v1/producers/leave", JOBS, m.Leave, m.Left, "leave"),
    Call("/v1/producers/end", ADMIN, m.EndProducer, m.ProducerEnded, "end_producer"),
    Call("/v1/leases", TRAIN, m.LeasePrompts, m.Prompts, "lease"),
    Call("/v1/leases/drop", TRAIN, m.EndLease, m.Ended, "drop"),
    Call("/v1/leases/give-back", TRAIN, m.EndLease, m.Ended, "give_back"),
    Call("/v1/groups", TRAIN, m.PutGroup, m.Put, "put_group"),
    Call("/v1/groups/own", TRAIN, m.PutOwnGroup, m.Put, "put_own_group"),
    Call("/v1/samples", TRAIN, m.PutSample, m.Put, "put_sample"),
    Call("/v1/weights/loaded", JOBS, m.Loaded, m.Confirmed, "loaded"),
    Call("/v1/evaluation/leases", EVAL, m.LeaseEvaluation, m.EvalPrompts, "lease_evaluation"),
    Call("/v1/evaluation/groups", EVAL, m.PutEvaluated, m.Evaluated, "put_evaluated"),
)
"""All are POST, and each may be repeated."""
VIEWS = (
    ("/v1/weights/{version}", JOBS, m.WeightManifest),
    ("/v1/queue", READ, m.QueueState),
    ("/v1/producers", READ, m.Producers),
)
FILE = "/v1/weights/{version}/files/{name}"
"""GET, for a job: the bytes of a file, or a part of them (Range)."""


class Rate:
    """A bucket of calls for each name: `per_s` flow in, twice as many fit."""

    def __init__(self, per_s: float) -> None:
        self._per_s = per_s
        self._left: dict[str, tuple[float, float]] = {}

    def take(self, name: str) -> None:
        now = time.monotonic()
        left, since = self._left.get(name, (2 * self._per_s, now))
        left = min(2 * self._per_s, left + (now - since) * self._per_s)
        if left < 1:
            self._left[name] = (left, now)
            raise Refusal(
                429,
                "too_many_calls",
                "calls come too often.",
                got=f"more than {self._per_s:g} calls a second",
                expected=f"at most {self._per_s:g} on average",
                next_action="Repeat the call after Retry-After.",
                retry_after_s=1,
            )
        self._left[name] = (left - 1, now)


def make_app(gateway: Gateway, tokens: TokenFile) -> Starlette:
    door, document = _Door(gateway, tokens), msgspec.json.encode(openapi())
    limits = gateway.limits
    bodies = Bodies(most=limits.max_held_bytes, most_of_one=limits.max_held_bytes_of_job)

    async def end_producer(admin: str, call: m.EndProducer) -> m.ProducerEnded:
        """Its tokens first: it can lease nothing afterwards. Only jobs outside have such names in the ledger."""
        revoked = await asyncio.to_thread(tokens.revoke_all, call.producer) if call.revoke else []
        left = await gateway.leave(call.producer, m.Leave())
        logger.warning("%s ended producer %s: %d leases, tokens %s", admin, call.producer, left.given_back, revoked)
        return m.ProducerEnded(given_back=left.given_back, revoked=revoked)

    async def take(call: Call, request: Request) -> m.Message:
        producer = door.admit(request, call.scopes)
        with bodies.held(producer, _announced(request, limits.max_body_bytes)) as came:
            body = await _body(request, limits.max_body_bytes)
            came(len(body))
            message = _decoded(body, _encoding(request), call.takes)
            if isinstance(message, m.EndProducer):
                return await end_producer(producer, message)
            run: Callable[[str, m.Message], Awaitable[m.Message]] = getattr(gateway, call.name)
            return await run(producer, message)

    async def weights(request: Request) -> m.Message:
        door.admit(request, JOBS)
        return gateway.weights.manifest(_version(gateway, request))

    async def weight_file(request: Request) -> Response:
        door.admit(request, JOBS)
        path, status = gateway.weights.file(_version(gateway, request), request.path_params["name"])
        response = FileResponse(path, stat_result=status, media_type=BYTES)
        condition = request.headers.get("if-range")  # of another file than this: the whole is wanted
        if condition is None or condition in (response.headers["etag"], response.headers["last-modified"]):
            _check_range(request.headers.get("range"), status.st_size)
        return response

    async def queue(request: Request) -> m.Message:
        door.admit(request, READ)
        return await gateway.queue()

    async def producers(request: Request) -> m.Message:
        door.admit(request, READ)
        return await gateway.producers()

    async def schema(request: Request) -> Response:  # noqa: ARG001
        return Response(document, media_type=JSON)

    routes = [Route(call.path, partial(_answer, gateway, partial(take, call)), methods=["POST"]) for call in CALLS]
    routes += [
        Route(path, partial(_answer, gateway, view), methods=["GET"])
        for (path, *_), view in zip(VIEWS, (weights, queue, producers), strict=True)
    ]
    routes.append(Route(FILE, partial(_answer, gateway, weight_file), methods=["GET"]))
    routes.append(Route("/v1/openapi.json", schema, methods=["GET"]))
    app = Starlette(routes=routes, exception_handlers={404: _no_route, 405: _no_route})
    app.router.redirect_slashes = False  # a redirect has no error body, and repeats what the caller wrote as its host
    return app


async def _answer(
    gateway: Gateway, run: Callable[[Request], Awaitable[m.Message | Response]], request: Request
) -> Response:
    """Run a call; every failure becomes an error body."""
    try:
        done = await run(request)
        return done if isinstance(done, Response) else _response(request, 200, done)
    except Refusal as error:
        refusal = error
    except (VimeError, OSError) as error:
        refusal = _unavailable(error)
    except Exception as error:  # boundary: a caller gets no trace; the log has it
        logger.exception("%s failed", request.url.path)
        refusal = Refusal(
            500,
            "internal",
            "the gateway has a fault.",
            got=type(error).__name__,
            expected="a result",
            next_action="Repeat the call; tell whoever started the run: the gateway's log has the trace.",
            retry_after_s=5,
        )
    producer = getattr(request.state, "producer", None)
    if producer is not None:
        gateway.job(producer).refused[refusal.code] += 1
    return _refused(request, refusal)


class _Door:
    """Who may call. Calls without a valid token have one bucket for all of them: nobody else is slowed down by them."""

    def __init__(self, gateway: Gateway, tokens: TokenFile) -> None:
        self._gateway, self._tokens = gateway, tokens
        self._calls, self._failures = Rate(gateway.limits.calls_per_s), Rate(gateway.limits.failures_per_s)

    def admit(self, request: Request, scopes: tuple[Scope, ...]) -> str:
        """Return the producer that calls, and note that it did."""
        try:
            producer = self._tokens.check(request.headers.get("authorization"), scopes)
        except Refusal:
            self._failures.take("")
            raise
        if scopes not in (READ, ADMIN):  # who only looks, or ends others, is no producer
            self._gateway.job(producer).called = time.monotonic()
            request.state.producer = producer
        self._calls.take(producer)
        return producer


def _check_range(header: str | None, size: int) -> None:
    """Refuse a part of a file that cannot be sent, in words of ours: `FileResponse` has others."""
    if header is None:
        return
    expected = f"bytes=FIRST-LAST, bytes=FIRST- or bytes=-COUNT of a file of {size} bytes"
    match = _RANGE.fullmatch(header.strip())
    first, last = match.groups() if match else ("", "")
    if not (first or last) or (first and last and int(first) > int(last)):
        raise Refusal(
            400,
            "not_this_message",
            "the header Range cannot be read.",
            got=repr(header[:80]),
            expected=expected,
            next_action="Correct the header, or leave it out for the whole file.",
        )
    if int(first) >= size if first else not int(last) or not size:
        raise Refusal(
            416,
            "no_such_range",
            "the file has no such part.",
            got=repr(header[:80]),
            expected=expected,
            next_action="Take the size from the manifest (num_bytes).",
        )


def _version(gateway: Gateway, request: Request) -> int:
    wanted = request.path_params["version"]
    if wanted == "serving":
        return gateway.weights.serving
    return int(wanted) if wanted.isdecimal() and len(wanted) < 10 else -1


def _too_large(request: Request, most: int) -> Refusal:
    return Refusal(
        413,
        "too_large",
        "the body is too large.",
        got=f"content-length {request.headers.get('content-length', 'unknown')[:20]}",
        expected=f"at most {most} bytes",
        next_action="Put the group sample by sample (POST /v1/samples).",
    )


def _announced(request: Request, most: int) -> int:
    """Return how many bytes the body has, `most` when its sender does not say so. Refusal for more than that."""
    said = request.headers.get("content-length", "")
    if not said.isdecimal():
        return most
    if len(said) > 15 or int(said) > most:
        raise _too_large(request, most)
    return int(said)


async def _body(request: Request, most: int) -> bytearray:
    """Waits for: the sender, BODY_S at most."""
    body = bytearray()
    try:
        with waiting("the body of a call", "external job", deadline_s=BODY_S):
            async with asyncio.timeout(BODY_S):
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > most:
                        raise _too_large(request, most)
    except (TimeoutError, ClientDisconnect) as error:
        raise Refusal(
            408,
            "body_missing",
            "the body has not arrived.",
            got=f"{len(body)} bytes within {BODY_S:g} s",
            expected="the whole body",
            next_action="Send the call again.",
            retry_after_s=0,
        ) from error
    return body


def _encoding(request: Request) -> str:
    said = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if said not in (JSON, MSGPACK):
        raise Refusal(
            415,
            "unknown_encoding",
            "the body's encoding is unknown.",
            got=f"content-type {said[:80]!r}",
            expected=f"{JSON} or {MSGPACK}",
            next_action="Set the header content-type.",
        )
    return said


def _decoded(body: bytearray, encoding: str, kind: type[m.Message]) -> m.Message:
    try:
        decode = msgspec.json.decode if encoding == JSON else msgspec.msgpack.decode
        return decode(body or (b"{}" if encoding == JSON else b"\x80"), type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Refusal(
            400,
            "not_this_message",
            f"the body is no {kind.__name__}.",
            got=str(error)[:300],
            expected=f"the schema {kind.__name__} of /v1/openapi.json",
            next_action="Correct the body; nothing of it was used.",
        ) from error


def _unavailable(error: Exception) -> Refusal:
    """A failure of ledger, spool or queue: nothing was acknowledged, so the same call may be repeated."""
    is_known = isinstance(error, (HandoffError, LostError, OSError))
    logger.warning("a call was not carried out: %s", error)
    return Refusal(
        503,
        "unavailable" if is_known else "failed",
        "the run cannot store this now; nothing of it counts.",
        got=type(error).__name__,
        expected="a ledger, spool and queue that respond, and space on the disk",
        next_action="Repeat the same call after Retry-After; the gateway's log has the cause.",
        retry_after_s=2,
    )


async def _no_route(request: Request, error: Exception) -> Response:
    status = int(getattr(error, "status_code", 404))
    return _refused(
        request,
        Refusal(
            status,
            "no_such_call",
            "the protocol has no such call.",
            got=f"{request.method[:16]} {request.url.path[:120]}",
            expected="a method and path of /v1/openapi.json",
            next_action="Correct the address.",
        ),
    )


def _refused(request: Request, refusal: Refusal) -> Response:
    response = _response(request, refusal.status, refusal.body)
    if refusal.retry_after_s is not None:
        response.headers["retry-after"] = str(refusal.retry_after_s)
    if refusal.status == 401:
        response.headers["www-authenticate"] = "Bearer"
    return response


def _response(request: Request, status: int, message: m.Message) -> Response:
    """In the encoding that the caller accepts, else in that of its body, else JSON."""
    wanted = request.headers.get("accept", "") + request.headers.get("content-type", "")
    is_msgpack = MSGPACK in wanted and JSON not in request.headers.get("accept", "")
    encode, media = (msgspec.msgpack.encode, MSGPACK) if is_msgpack else (msgspec.json.encode, JSON)
    return Response(encode(message), status_code=status, media_type=media)


def _needs(scopes: tuple[Scope, ...]) -> str:
    return f"Scope {' or '.join(scopes)}."


def _parameters(path: str) -> dict[str, object]:
    names = re.findall(r"\{(\w+)\}", path)
    of_path = {"in": "path", "required": True, "schema": {"type": "string"}}
    return {"parameters": [{"name": name, **of_path} for name in names]} if names else {}


def openapi() -> dict[str, object]:
    """The protocol as an OpenAPI document, made from the messages themselves."""
    kinds = {kind for call in CALLS for kind in (call.takes, call.returns)} | {kind for *_, kind in VIEWS}
    kinds |= {m.ErrorBody}
    _, schemas = msgspec.json.schema_components(
        sorted(kinds, key=lambda kind: kind.__name__),
        ref_template="#/components/schemas/{name}",
        schema_hook=lambda _: {"description": "any value"},  # of `object`
    )

    def content(kind: type[m.Message]) -> dict[str, object]:
        schema = {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}}
        return {"content": {JSON: schema, MSGPACK: schema}}

    def responses(kind: type[m.Message]) -> dict[str, object]:
        return {
            "200": {"description": "done", **content(kind)},
            "default": {"description": "refused", **content(m.ErrorBody)},
        }

    paths: dict[str, object] = {
        call.path: {
            "post": {
                "operationId": call.name,
                "summary": _needs(call.scopes),
                "requestBody": {"required": True, **content(call.takes)},
                "responses": responses(call.returns),
            }
        }
        for call in CALLS
    }
    for path, scopes, kind in VIEWS:
        views: dict[str, object] = {"summary": _needs(scopes), "responses": responses(kind)}
        paths[path] = {"get": views | _parameters(path)}
    raw = {"content": {BYTES: {"schema": {"type": "string", "format": "binary"}}}}
    of_file = {
        "200": {"description": "the file", **raw},
        "206": {"description": "the part that Range names", **raw},
        "default": {"description": "refused", **content(m.ErrorBody)},
    }
    paths[FILE] = {"get": {"summary": _needs(JOBS), "responses": of_file, **_parameters(FILE)}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Vime's gateway for external rollout jobs", "version": str(m.PROTOCOL)},
        "security": [{"bearer": []}],
        "components": {"schemas": schemas, "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}}},
        "paths": paths,
    }
