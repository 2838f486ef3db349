"""Token-in token-out requests to the routers; returns completions that were checked.

Uses vLLM's `POST /inference/v1/generate`. One request asks for all n samples of a prompt: n times fewer requests. A
per-request seed is sent in --reference-mode only: on vLLM's CPU build it kills the engine when a prompt is prefilled in
chunks ("CPU Generator does not use offset"), which engines of reference mode never do.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import io
import json
import logging
import uuid
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from vime.data.images import prompt_fields
from vime.rollout.abort_scope import current_abort_scope, is_aborting
from vime.rollout.exchanges import Completion, PromptTokens, note_completions
from vime.rollout.request_priority import Slots
from vime.types import EngineAddress, EngineError, EngineLostError, Version, VersionSpan, WaitTimeoutError
from vime.utils.http import HttpFailure, HttpSession
from vime.utils.waits import waiting

logger = logging.getLogger(__name__)

ROUTE = "/inference/v1/generate"
WORKERS_ROUTE, ABORT_ROUTE = "/list_workers", "/abort_requests"  # of the router; of an engine
ABORT_S = 2.0
MAX_ATTEMPTS = 8
LONGEST_BACKOFF_S = 8.0
SERVERS = ("router", "engine")
"""The blockers that a wait for a response names: a request does not know which engine the router chose."""
REPEATABLE_STATUS = frozenset({429, 500, 502, 503, 504})
"""Status codes after which the request is sent again: generation has no effect, so repeating it costs only time."""


NOTHING = Completion(token_ids=(), log_probs=(), versions=(), finish_reason="abort")


class EngineClient:
    """HTTP client of the routers, made on the event loop that it belongs to.

    `others`: further routers in front of the same engines as `url`. A session has one of them (`routers_of`), and the
    next ones while that one does not respond (decision 0048).

    At most `max_in_flight` requests are open; the lowest group goes first (request_priority.py). Each has `timeout_s`
    from the moment it may start. Cancelling the caller closes the connection, which aborts the request in the engine;
    `abort` ends it with the tokens so far. `key` authorises generation on the engines (docs/security.md).
    """

    def __init__(
        self,
        url: str,
        *,
        others: Sequence[str] = (),
        max_in_flight: int,
        timeout_s: float,
        first_backoff_s: float = 0.25,
        key: str = "",
    ) -> None:
        self.urls = (url, *others)
        self._timeout_s, self._first_backoff_s = timeout_s, first_backoff_s
        self._slots = Slots(max_in_flight)
        self._warned: set[str] = set()
        self.prompts = PromptTokens()  # since somebody took them
        self._http = HttpSession(headers=EngineAddress(name="router", url=url, key=key).headers)  # the slots limit it

    async def generate(
        self,
        token_ids: Sequence[int],
        sampling_params: Mapping[str, object],
        *,
        n: int = 1,
        session_id: str = "",
        images: Mapping[str, object] | None = None,
    ) -> list[Completion]:
        """Return n completions of one prompt. `images`: the sample's `multimodal_inputs`.
        Raises EngineError, or WaitTimeoutError after `timeout_s`.

        Nothing is sent once the task's `AbortScope` is set: the completions are empty and aborted.
        """
        request_id, scope = uuid.uuid4().hex, current_abort_scope()
        body = {
            "request_id": request_id,
            **prompt_fields(token_ids, images),
            "stream": False,
            "sampling_params": {**sampling_params, "n": n, "logprobs": 0, "detokenize": "stop" in sampling_params},
        }
        headers = {"X-Request-Id": request_id} | ({"X-Session-ID": session_id} if session_id else {})
        with waiting("one of the requests before to end", deadline_s=None):
            await self._slots.acquire()
        try:
            if scope is not None and scope.is_set:
                return [NOTHING] * n
            with contextlib.ExitStack() as stack:
                if scope is not None:
                    stack.enter_context(scope.holding(request_id, self.abort))
                stack.enter_context(waiting("a completion", *SERVERS, deadline_s=self._timeout_s))
                async with asyncio.timeout(self._timeout_s):
                    data = await self._post(body, headers, routers_of(self.urls, session_id, token_ids))
        except TimeoutError as error:
            raise WaitTimeoutError(
                f"{n} completions of a prompt of {len(token_ids)} tokens",
                self._timeout_s,
                f"vLLM behind {' and '.join(self.urls)}",
                "Raise --generate-timeout-secs, or look for a stuck engine in the engine logs.",
            ) from error
        finally:
            self._slots.release()
        if data is None:
            return [NOTHING] * n
        completions, cached = read_response(data, n, f"{self.urls[0]}{ROUTE}", prompt=token_ids if images else None)
        if cached is not None:
            self.prompts.add(PromptTokens(len(token_ids), cached))
        note_completions(token_ids, completions)
        return completions

    async def abort(self, request_ids: list[str]) -> None:
        """Tell every engine of any router to end these requests: their responses carry the tokens so far. A request
        that an engine does not know, and an engine that does not respond, are skipped."""
        lists = await asyncio.gather(*(self._workers_of(url) for url in self.urls))
        workers = dict.fromkeys(worker for found in lists for worker in found)
        body = json.dumps({"request_ids": [f"generate-tokens-{request_id}" for request_id in request_ids]}).encode()
        await asyncio.gather(*(self._abort_at(worker, body) for worker in workers))

    async def _workers_of(self, url: str) -> list[str]:
        try:
            return msgspec.json.decode(await self._ok("GET", f"{url}{WORKERS_ROUTE}", None), type=_Workers).urls
        except (HttpFailure, msgspec.DecodeError) as error:
            self._warn(url, f"it does not list its engines: {error}")
            return []

    async def _abort_at(self, worker: str, body: bytes) -> None:
        try:
            await self._ok("POST", f"{worker}{ABORT_ROUTE}", body)
        except HttpFailure as error:
            self._warn(worker, f"{ABORT_ROUTE}: {error}")

    async def _ok(self, method: str, url: str, body: bytes | None) -> bytes:
        response = await self._http.call(method, url, body, deadline_s=ABORT_S)
        if response.status != 200:
            raise HttpFailure(response.described())
        return response.content

    def _warn(self, server: str, trouble: str) -> None:
        """Warn once for each server: an abort is repeated until it takes effect."""
        if server not in self._warned:
            self._warned.add(server)
            logger.warning("requests in progress are not aborted by %s: %s", server, trouble)

    async def aclose(self) -> None:
        await self._http.close()

    async def _post(self, body: dict[str, object], headers: dict[str, str], urls: Sequence[str]) -> bytes | None:
        """Send until there is a response. Transport errors and REPEATABLE_STATUS are tried MAX_ATTEMPTS times, each
        time at one router after the other, without a pause in between; once generation is being aborted nothing is
        repeated, and the result is None."""
        trouble, content = "", json.dumps(body).encode()
        for attempt, url in ((attempt, url) for attempt in range(MAX_ATTEMPTS) for url in urls):
            is_repeated = attempt > 0 or url != urls[0]
            if attempt and url == urls[0] and not is_aborting():
                await asyncio.sleep(min(self._first_backoff_s * 2 ** (attempt - 1), LONGEST_BACKOFF_S))
            if is_repeated and is_aborting():
                return None
            try:
                response = await self._http.call("POST", f"{url}{ROUTE}", content, headers=headers)
            except HttpFailure as error:
                trouble = str(error)
            else:
                if response.status == 200:
                    return response.content
                trouble = response.described()
                if response.status not in REPEATABLE_STATUS:
                    raise EngineError(f"{url}{ROUTE} refused the request: {trouble}. Check the sampling flags.")
            logger.warning("generation request failed (attempt %d of %d): %s", attempt + 1, MAX_ATTEMPTS, trouble)
        raise EngineLostError(
            f"{urls[-1]}{ROUTE}: no response after {MAX_ATTEMPTS} attempts, the last: {trouble}. See the engine and "
            "router logs in the run directory."
        )


def routers_of(urls: Sequence[str], session_id: str, prompt: Sequence[int] = ()) -> list[str]:
    """Return all routers in the order in which a request tries them: the first is that of its session, or of its prompt
    where it has none, the same in every process.

    A number made of the session, modulo the routers there are, chooses the first, modulo those that are left the next.
    So sessions of a router that is away spread over all others, and no other session moves.
    """
    if len(urls) == 1:
        return list(urls)
    said = session_id or ",".join(map(str, prompt))
    number = int.from_bytes(hashlib.blake2b(said.encode(), digest_size=8).digest())
    left, order = list(urls), list[str]()
    while left:
        number, place = divmod(number, len(left))
        order.append(left.pop(place))
    return order


class _LogProb(msgspec.Struct, gc=False):
    logprob: float


class _LogProbs(msgspec.Struct, gc=False):
    content: list[_LogProb] | None = None


class _Span(msgspec.Struct, gc=False):
    version: str | int
    start: int
    end: int


class _Choice(msgspec.Struct, gc=False):
    index: int
    token_ids: list[int] | None
    finish_reason: str | None
    logprobs: _LogProbs | None
    weight_versions: list[_Span] | None
    routed_experts: str | None = None


class _Details(msgspec.Struct, gc=False):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens_details: _Details | None = None


class _Body(msgspec.Struct, gc=False):
    """The fields that are read from the engine's JSON. The rest is skipped without building objects, and no part of it
    is an object that the garbage collector would examine (docs/decisions/0029)."""

    choices: list[_Choice]
    prompt_token_ids: list[int] | None = None
    usage: _Usage | None = None


class _Workers(msgspec.Struct):
    """The engines behind the router."""

    urls: list[str]


_DECODER = msgspec.json.Decoder(_Body)


def read_completions(data: bytes, n: int, source: str) -> list[Completion]:
    """Return the completions of `read_response`."""
    return read_response(data, n, source)[0]


def read_response(
    data: bytes, n: int, source: str, *, prompt: Sequence[int] | None = None
) -> tuple[list[Completion], int | None]:
    """Return the engine's JSON as n completions, in the order of their index, and how many tokens of the prompt were in
    its prefix cache; None when it does not say. Raises EngineError, naming `source`, when the JSON is not of that
    form. `prompt`: what the engine must have computed, where it expands the prompt itself."""
    try:
        body = _DECODER.decode(data)
        details = body.usage and body.usage.prompt_tokens_details
        cached = details.cached_tokens if details else None
        choices = sorted(body.choices, key=lambda choice: choice.index)
        completions = [_read_choice(choice, cached or 0) for choice in choices]
    except (msgspec.DecodeError, ValueError) as error:
        raise EngineError(
            f"{source}: the engine's response cannot be read: {error}; got {data[:300]!r}. Expected the format of vLLM "
            "0.32's /inference/v1/generate."
        ) from error
    if prompt is not None and body.prompt_token_ids != list(prompt):
        raise EngineError(
            f"{source}: the engine computed a prompt of {len(body.prompt_token_ids or ())} tokens, expected "
            f"{len(prompt)} with the places of its images. Take processor and model from one directory, and "
            "the vLLM and transformers that Vime was installed with."
        )
    if len(completions) != n:
        raise EngineError(f"{source}: the engine returned {len(completions)} samples, expected {n}.")
    return completions, cached


def _read_choice(choice: _Choice, cached_tokens: int) -> Completion:
    token_ids = choice.token_ids or []
    log_probs = [entry.logprob for entry in (choice.logprobs and choice.logprobs.content) or ()]
    if len(log_probs) != len(token_ids):
        raise ValueError(f"{len(token_ids)} tokens with {len(log_probs)} log-probabilities")
    versions = [VersionSpan(read_version(span.version), span.start, span.end) for span in choice.weight_versions or ()]
    covered = versions[-1].end if versions else 0
    if covered != len(token_ids):
        raise ValueError(f"weight_versions cover {covered} of {len(token_ids)} tokens")
    encoded = choice.routed_experts
    return Completion(
        token_ids=token_ids,
        log_probs=log_probs,
        versions=versions,
        finish_reason=str(choice.finish_reason),
        routed_experts=np.load(io.BytesIO(base64.b64decode(encoded)), allow_pickle=False) if encoded else None,
        cached_tokens=cached_tokens,
    )


def read_version(text: str | int) -> Version:
    """Return the version. vLLM reports "default" until the first weight update: those are the initial weights, version
    0."""
    return 0 if text == "default" else int(text)
