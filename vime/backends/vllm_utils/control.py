"""Control of all engines over HTTP: every call goes to each engine at once, with one deadline for all of them.

Not through the router, which would pick one engine and drop the query string.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec

from vime.backends.vllm_utils.routes import UPDATE_ROUTE, WEIGHTS_ROUTE, BucketResult, HeldWeights, LastBucketResult
from vime.config.lora import AdapterInfo
from vime.data.images import prompt_fields
from vime.observability.events import note_span, span
from vime.protocols import UpdateResponse
from vime.types import EngineAddress, EngineError, EngineLostError, EngineReport, Version, may_pass
from vime.utils.http import HttpFailure, HttpSession, HttpThread, Response
from vime.utils.waits import waiting
from vime.weights.update_info import UpdateInfo, is_last

logger = logging.getLogger(__name__)

FAILURE_GRACE_S = 1.0
CALLS_AT_ONCE = 8  # to one engine
NUM_LIKELIEST = 5  # of the next token; vLLM returns up to 20
GENERATE_ROUTE = "/inference/v1/generate"
WEIGHTS, KV_CACHE = "weights", "kv_cache"
"""What vLLM calls the two parts of its memory that sleep."""

Kind = TypeVar("Kind")


class Fanout:
    """Calls to every engine at once, by one thread and over connections that are kept, whatever the number of engines.

    A call has `timeout_s` in all, from its first byte to the last engine's last one. `lose_after_s`: an engine that is
    lost in a call, or has not responded after so many seconds when another has, is left out of it and of all later
    calls, as long as one is left. None: each has to respond.
    """

    def __init__(
        self, addresses: Sequence[EngineAddress], timeout_s: float, *, lose_after_s: float | None = None
    ) -> None:
        self.addresses = tuple(addresses)
        self._timeout_s, self._lose_after_s = timeout_s, lose_after_s
        self._http = HttpThread("vime-fleet-control", calls_at_once=CALLS_AT_ONCE)

    def get(self, route: str, kind: type[Kind]) -> list[Kind]:
        """The response of each engine, read as `kind`."""
        return self._read(route, self._on_each("GET", route, [None] * len(self.addresses)), kind)

    def post(self, route: str, body: object = None) -> list[Response]:
        """Send the same body to every engine."""
        content = None if body is None else json.dumps(body).encode()
        return self._on_each("POST", route, [content] * len(self.addresses))

    def ask(self, route: str, body: object, kind: type[Kind]) -> list[Kind]:
        """As `post`, with each response read as `kind`."""
        return self._read(route, self.post(route, body), kind)

    def post_each(self, route: str, bodies: Sequence[object]) -> list[Response]:
        """Send to each engine its own body."""
        if len(bodies) != len(self.addresses):
            raise ValueError(f"{route}: {len(bodies)} bodies for {len(self.addresses)} engines")
        return self._on_each("POST", route, [json.dumps(body).encode() for body in bodies])

    def ask_all(self, route: str, bodies: Sequence[object], kind: type[Kind]) -> list[list[Kind]]:
        """Send every body to every engine, all at once: [engine][body]."""
        contents, count = [json.dumps(body).encode() for body in bodies], len(bodies)
        found = self._read(route, self._on_each("POST", route, contents * len(self.addresses)), kind)
        return [found[start * count : (start + 1) * count] for start in range(len(self.addresses))]

    def close(self) -> None:
        self._http.close()

    def _on_each(self, method: str, route: str, bodies: Sequence[bytes | None]) -> list[Response]:
        """The responses to `bodies`, of which each engine gets as many, in the order of the engines."""
        if not bodies:
            return []
        each = len(bodies) // len(self.addresses)
        calls = [(self.addresses[number // each], body) for number, body in enumerate(bodies)]
        return self._http.run(lambda session: self._all(session, method, route, calls), deadline_s=self._timeout_s)

    async def _all(
        self, session: HttpSession, method: str, route: str, calls: Sequence[tuple[EngineAddress, bytes | None]]
    ) -> list[Response]:
        """One failure ends the wait, and so does the deadline: the other engines may be waiting for that one."""
        sent = [
            asyncio.create_task(self._checked(session, method, route, address, body), name=address.name)
            for address, body in calls
        ]
        try:
            finished, pending = await self._waited(sent)
            is_late = not any(task.exception() for task in finished)
            if pending and not is_late:
                more, pending = await asyncio.wait(pending, timeout=FAILURE_GRACE_S)
                finished |= more
        finally:
            for task in sent:
                task.cancel()  # closes the connection of a call that has no response yet
            await asyncio.gather(*sent, return_exceptions=True)
        if self._lose_after_s is not None and (left := self._without_lost(sent, finished)):
            return left
        errors = [error for task in sent if task in finished and (error := task.exception())]
        others = ", ".join(dict.fromkeys(task.get_name() for task in sent if task in pending))
        if pending and is_late:
            errors = [EngineLostError(f"{others} {route}: no response within {self._timeout_s:g} s")]
        elif pending:
            errors = [*errors, EngineError(f"no response yet from {others}")]
        if errors:
            kind = EngineLostError if any(may_pass(error) for error in errors) else EngineError
            raise kind("; ".join(map(str, errors)) + ". See the engine's log in RUN_DIR/logs.")
        return [task.result() for task in sent]

    async def _waited(
        self, sent: Sequence[asyncio.Task[Response]]
    ) -> tuple[set[asyncio.Task[Response]], set[asyncio.Task[Response]]]:
        """Return the calls that have ended, and those that have not, when no more is waited for."""
        if self._lose_after_s is None:
            return await asyncio.wait(sent, timeout=self._timeout_s, return_when=asyncio.FIRST_EXCEPTION)
        finished, pending = await asyncio.wait(sent, timeout=self._lose_after_s)
        left_s = self._timeout_s - self._lose_after_s
        if pending and left_s > 0 and all(task.exception() for task in finished):  # all that are left are slow
            return await asyncio.wait(sent, timeout=left_s)
        return finished, pending

    def _without_lost(
        self, sent: Sequence[asyncio.Task[Response]], finished: set[asyncio.Task[Response]]
    ) -> list[Response]:
        """Leave out the engines that are lost, and return what the others sent; nothing when none is left, or when one
        failed in another way, which ends the call."""
        lost = {task.get_name(): "no response in time" for task in sent if task not in finished}
        for task in sent:
            if task in finished and (error := task.exception()):
                if not may_pass(error):
                    return []
                lost[task.get_name()] = str(error)
        for name, why in lost.items():
            logger.warning("%s is left out from here on: %s", name, why)
        if len(lost) < len(self.addresses):
            self.addresses = tuple(address for address in self.addresses if address.name not in lost)
        return [task.result() for task in sent if task.get_name() not in lost]

    async def _checked(
        self, session: HttpSession, method: str, route: str, address: EngineAddress, body: bytes | None
    ) -> Response:
        """One engine's response with status 200; EngineError names engine, route and what came instead."""
        where = f"{address.name} ({address.url}) {route}"
        try:
            with waiting(f"a response to {route}", address.name, deadline_s=self._timeout_s):
                response = await session.call(method, address.url + route, body, headers=address.headers)
        except HttpFailure as error:
            raise EngineLostError(f"{where}: {error}") from error
        if response.status != 200:
            kind = EngineLostError if response.status >= 500 else EngineError
            raise kind(f"{where}: {response.described()}, expected status 200")
        return response

    def _read(self, route: str, responses: Sequence[Response], kind: type[Kind]) -> list[Kind]:
        each = max(1, len(responses) // len(self.addresses))
        return [
            _decoded(self.addresses[number // each], route, response, kind) for number, response in enumerate(responses)
        ]


def _decoded(address: EngineAddress, route: str, response: Response, kind: type[Kind]) -> Kind:
    try:
        return msgspec.json.decode(response.content, type=kind)
    except msgspec.DecodeError as error:
        raise EngineError(
            f"{address.name} ({address.url}) {route}: the response cannot be read: {error}; got "
            f"{response.content[:300]!r}. Is it the vLLM that Vime was made for?"
        ) from error


class _WorldSize(msgspec.Struct):
    world_size: int


class _IsPaused(msgspec.Struct):
    is_paused: bool


class _Woken(msgspec.Struct):
    status: str  # awake, or sleeping while a tag is still asleep


class _Scored(msgspec.Struct):
    logprob: float


class _PromptScores(msgspec.Struct):
    """Position 0 has no entry; each other one maps token id (a JSON key) to its log-probability."""

    prompt_logprobs: list[dict[str, _Scored] | None]

    def of(self, tokens: Sequence[int]) -> list[float]:
        entries = self.prompt_logprobs[1:]
        if len(entries) != len(tokens) - 1:
            raise EngineError(
                f"the engine scored a prompt of {len(self.prompt_logprobs)} tokens, expected {len(tokens)}, with the "
                "places of its images. Take processor and model from one directory."
            )
        return [(entry or {})[str(token)].logprob for entry, token in zip(entries, tokens[1:], strict=True)]


class _TopToken(msgspec.Struct):
    token_id: int
    logprob: float


class _NextToken(msgspec.Struct):
    top_logprobs: list[_TopToken]


class _NextTokens(msgspec.Struct):
    content: list[_NextToken]


class _Choice(msgspec.Struct):
    logprobs: _NextTokens


class _Next(msgspec.Struct):
    choices: list[_Choice]

    def likeliest(self) -> dict[int, float]:
        [token] = self.choices[0].logprobs.content
        return {top.token_id: top.logprob for top in token.top_logprobs}


class FleetControl:
    """Implements `vime.protocols.EngineControl`. `timeout_s` bounds each call of all engines.

    A call either succeeds on every engine or raises one EngineError that names each engine that failed, its route, and
    the response or what came instead. No call is sent twice. Thread-safe. `lose_after_s`: as in `Fanout`.
    """

    def __init__(
        self, addresses: Sequence[EngineAddress], *, timeout_s: float, lose_after_s: float | None = None
    ) -> None:
        if not addresses:
            raise ValueError("a fleet needs at least one engine")
        self._http = Fanout(addresses, timeout_s, lose_after_s=lose_after_s)

    @property
    def addresses(self) -> Sequence[EngineAddress]:
        """Return the engines that calls go to: those of the beginning, without those that were lost."""
        return self._http.addresses

    def world_sizes(self) -> list[int]:
        """Workers of each engine, data-parallel replicas included."""
        return [each.world_size for each in self._http.get("/get_world_size", _WorldSize)]

    def init_transfer(self, init_info_by_engine: Sequence[Mapping[str, object]]) -> None:
        """Each engine gets its own information; all are asked at once, since they may wait for each other."""
        bodies = [{"init_info": info} for info in init_info_by_engine]
        self._http.post_each("/init_weight_transfer_engine", bodies)

    def update(
        self, update_info: UpdateInfo, *, version: Version, pause_mode: str, adapter: AdapterInfo | None = None
    ) -> UpdateResponse:
        """One bucket. Before the first the engines stop generating (`wait` for running requests, `keep` them for later,
        or `abort` them with what they have) and clear their prefix caches: the weights change under them. With the last
        they hold `version`, and say what it is that they hold. `adapter`: the tensors are those of one, which stands
        beside those before it; requests in progress are paused too, but none is waited for."""
        body = {"update_info": update_info, "version": version, "pause_mode": pause_mode, "adapter": adapter}
        began = time.monotonic()
        reports: Sequence[EngineReport] = ()
        with span("load_weights", version=version):
            results: Sequence[BucketResult]
            if is_last(update_info):
                last = self._http.ask(UPDATE_ROUTE, body, LastBucketResult)
                results, reports = last, self._reports(last)
            else:
                results = self._http.ask(UPDATE_ROUTE, body, BucketResult)
            whole_s = time.monotonic() - began
            pause_s, confirm_s = max(each["pause_s"] for each in results), max(each["confirm_s"] for each in results)
            if update_info["index"] == 0:
                note_span("pause_engines", pause_s, ago_s=whole_s - pause_s)
            if is_last(update_info):
                note_span("confirm_weights", confirm_s)
        return UpdateResponse(pause_s=pause_s, confirm_s=confirm_s, reports=reports)

    def reports(self) -> Sequence[EngineReport]:
        """Version and content hash of each engine. EngineError when an engine's own workers disagree."""
        with span("confirm_weights"):
            return self._reports(self._http.get(WEIGHTS_ROUTE, HeldWeights))

    def _reports(self, held: Sequence[HeldWeights]) -> Sequence[EngineReport]:
        return tuple(_report(address, each) for address, each in zip(self.addresses, held, strict=True))

    def resume(self) -> None:
        with span("resume_engines"):
            self._http.post("/resume")

    def sleep(self, level: int) -> None:
        """Free the engines' device memory once their running requests have ended; requests that come later wait. Level
        1 keeps the weights in host memory, 2 keeps none."""
        self._http.post(f"/sleep?level={level}&mode=wait")

    def wake_up(self, tag: str, *, is_last: bool) -> None:
        """Take memory for WEIGHTS or KV_CACHE again; after the last of both engines take requests. EngineError when an
        engine is not in the state that this leads to: vLLM says in its log alone that a tag was not asleep."""
        woken = self._http.ask(f"/wake_up?tags={tag}", None, _Woken)
        expected = "awake" if is_last else "sleeping"
        for address, each in zip(self.addresses, woken, strict=True):
            if each.status != expected:
                raise EngineError(
                    f"{address.name} /wake_up?tags={tag}: the engine says that it is {each.status}, expected "
                    f"{expected}. See its log in RUN_DIR/logs."
                )

    def is_paused(self) -> list[bool]:
        return [each.is_paused for each in self._http.get("/is_paused", _IsPaused)]

    def prompt_log_probs(
        self, rows: Sequence[Sequence[int]], images: Sequence[Mapping[str, object] | None] | None = None
    ) -> list[list[list[float]]]:
        """[engine][row]: the log-probability of each of the row's tokens but the first, given those before it (before
        any temperature). All rows are asked for at once: a busy engine scores them in the same few steps. `images`: of
        each row the sample's `multimodal_inputs`."""
        params = {"max_tokens": 1, "prompt_logprobs": 0, "temperature": 1.0, "detokenize": False}
        bodies = [
            {**prompt_fields(tokens, inputs), "sampling_params": params}
            for tokens, inputs in zip(rows, images or [None] * len(rows), strict=True)
        ]
        return [
            [scores.of(tokens) for scores, tokens in zip(by_row, rows, strict=True)]
            for by_row in self._http.ask_all(GENERATE_ROUTE, bodies, _PromptScores)
        ]

    def next_log_probs(
        self, tokens: Sequence[int], images: Mapping[str, object] | None = None, *, with_cache: bool
    ) -> list[dict[int, float]]:
        """Per engine, the likeliest tokens after `tokens` with their log-probabilities (before any temperature).
        `images`: the sample's `multimodal_inputs`. `with_cache`: the engine may take the beginning from its prefix
        cache."""
        body = {
            **prompt_fields(tokens, images),
            "sampling_params": {
                "max_tokens": 1,
                "logprobs": NUM_LIKELIEST,
                "temperature": 0.0,
                "detokenize": False,
                "skip_reading_prefix_cache": not with_cache,
            },
        }
        return [each.likeliest() for each in self._http.ask(GENERATE_ROUTE, body, _Next)]

    def close(self) -> None:
        self._http.close()


def _report(address: EngineAddress, held: HeldWeights) -> EngineReport:
    version, workers = held["weight_version"], held["workers"]
    if not version.isdigit():
        raise EngineError(
            f"{address.name} serves version {version!r}, which no trainer has published. Publish weights to it first."
        )
    if address.num_workers not in (None, len(workers)):
        raise EngineError(
            f"{address.name}: {len(workers)} workers say what they hold, expected {address.num_workers}, those of "
            "all its nodes. Look for a lost node in RUN_DIR/logs."
        )
    distinct = {(worker["content_hash"], worker["num_tensors"]) for worker in workers}
    if len(distinct) != 1:
        raise EngineError(f"{address.name}: its {len(workers)} workers hold different weights: {sorted(distinct)}.")
    ((content_hash, num_tensors),) = distinct
    return EngineReport(engine=address.name, version=int(version), content_hash=content_hash, num_tensors=num_tensors)
