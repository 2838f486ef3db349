"""A scripted engine: the routes of vLLM that Vime uses, completions by a function, and failures on demand.

It is a real HTTP server and a real receiver of weights (any transport, its hash); only the model is missing. Tests of
other packages run against it in their own process, a whole run against it in a process of its own
(`scripted_server.py`), and the same contract tests run against vLLM itself.

    with FakeEngine(complete=lambda request: ([7, 8], [-0.5, -0.25])) as engine:
        httpx.post(engine.address.url + "/inference/v1/generate", json={"token_ids": [1], "sampling_params": {}})
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, TypedDict
from urllib.parse import parse_qs, urlsplit

import msgspec

from vime.backends.vllm_utils.about import ABOUT_ROUTE, CLAIM_ROUTE, About
from vime.backends.vllm_utils.access import REFUSED, EngineKeys
from vime.backends.vllm_utils.routes import (
    REQUESTS_ROUTE,
    UPDATE_ROUTE,
    WEIGHTS_ROUTE,
    BucketResult,
    HeldWeights,
    LastBucketResult,
)
from vime.types import KEY_HEADER, EngineAddress, VimeError
from vime.weights.update_info import UpdateInfo, is_last

if TYPE_CHECKING:  # torch takes seconds to import, and an engine responds before it has weights
    import torch

    from vime.weights.wire import BucketReceiver

SLEEPING = ("weights", "kv_cache")  # as vLLM calls the parts of its memory
WAIT_S = 60.0
"""Deadline of every wait inside the fake: a paused or stalled request gives up with status 504."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """What one completion may depend on."""

    prompt: Sequence[int]
    sample: int  # number of this completion among the n of its request
    seed: int | None  # that the request carries
    version: str  # of the weights when the request began
    content_hash: str  # of these weights; empty before the first update
    max_tokens: int


Completion = tuple[list[int], list[float]]
"""Tokens and their log-probabilities, before max_tokens cuts them."""
Complete = Callable[[CompletionRequest], Completion]
Score = Callable[[Sequence[int]], Sequence[float]]
"""The log-probabilities of the tokens of a prompt but the first."""


def echo_backwards(request: CompletionRequest) -> Completion:
    """Return the default completion: the prompt backwards, with log-probability -0.5."""
    return list(reversed(request.prompt)), [-0.5] * len(request.prompt)


def score_evenly(prompt: Sequence[int]) -> list[float]:
    """Return the default score."""
    return [-1.0] * (len(prompt) - 1)


class _SamplingParams(msgspec.Struct):
    n: int = 1
    max_tokens: int = 16
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None


class _Generate(msgspec.Struct):
    """The body of a generation request, as far as it is looked at."""

    token_ids: list[int]
    sampling_params: _SamplingParams = msgspec.field(default_factory=_SamplingParams)
    request_id: str = "x"


class _Update(msgspec.Struct):
    update_info: UpdateInfo
    version: int
    pause_mode: str


class _Connect(msgspec.Struct):
    init_info: dict[str, object]


class _Abort(msgspec.Struct):
    request_ids: list[str] | None = None


class _Span(TypedDict):
    """Tokens `start` to `end` of a completion were sampled by weights of this version."""

    version: str
    start: int
    end: int


@dataclass(slots=True)
class Faults:
    """What goes wrong; change it while the engine runs."""

    wrong_hash: bool = False  # report another hash than the received bytes have
    wrong_version: str | None = None  # report this version
    is_passed_over: bool = False  # take the calls of an update, and keep the weights of before
    status: dict[str, int] = field(default_factory=dict)  # route -> status to send instead of working
    stall: dict[str, threading.Event] = field(default_factory=dict)  # route -> respond only after this event
    stall_tokens_after: int | None = None  # running requests stop after so many tokens until this is cleared


class FakeEngine:
    """One engine. The state is owned by one lock; each request runs in a thread of its own.

    `token_s`: seconds that each token takes, whatever else runs; 0: none. `requests_at_once`: others wait; None: none
    does. `keys`: what it asks callers for; None: it lets everyone in. `argv`: the command line that it tells of.
    `num_workers`: that say what this one has received.
    """

    def __init__(
        self,
        *,
        name: str = "fake-0",
        complete: Complete = echo_backwards,
        score: Score = score_evenly,
        host: str = "127.0.0.1",
        port: int = 0,
        token_s: float = 0.0,
        requests_at_once: int | None = None,
        keys: EngineKeys | None = None,
        argv: Sequence[str] = (),
        num_workers: int = 1,
    ) -> None:
        self.keys, self.about = keys, About(argv=argv)
        self.is_stopped, self._num_workers = False, num_workers
        self.faults = Faults()
        self.calls: list[str] = []  # control routes in order of arrival, with the query
        self.num_connections = 0
        self._complete, self._token_s, self._at_once = complete, token_s, requests_at_once
        self._score = score
        self._receiver: BucketReceiver | None = None
        self._worker = threading.Lock()  # vLLM's workers take one call after another
        self.weights: dict[str, torch.Tensor] = {}  # what the newest update brought
        self._incoming: dict[str, torch.Tensor] = {}  # of the update under way
        lock = threading.Lock()
        self._changed = threading.Condition(lock)  # something that a running request looks at
        self._counted = threading.Condition(lock)  # how many requests run
        self._version, self._content_hash = "default", ""
        self._is_updating = False
        self._is_paused = self._is_frozen = False
        self._asleep: set[str] = set()  # what of SLEEPING has no memory
        self._is_discarded = False  # asleep without its weights, or awake again without an update
        self._num_aborts = 0
        self._num_running = 0
        self._num_open = 0  # those that run, and those that wait to begin
        self._running: set[str] = set()  # request ids as the engine says them
        self._aborted: set[str] = set()  # those of them that end before their time
        handler = type("Handler", (_Handler,), {"engine": self})
        self._server = _Server((host, port), handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), name=name, daemon=True)
        url = f"http://{host}:{self._server.server_port}"
        self.address = EngineAddress(name=name, url=url, key="" if keys is None else keys.control)

    def __enter__(self) -> FakeEngine:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Close the listening socket: later connections are refused, and kept ones end without a response. Also how a
        test lets the engine die."""
        self.is_stopped = True
        with self._changed:
            self.faults.stall_tokens_after = None
            self._is_paused = self._is_frozen = False
            self._num_aborts += 1
            self._changed.notify_all()
        for event in self.faults.stall.values():
            event.set()
        self._server.shutdown()
        self._server.server_close()
        if self._receiver is not None:
            self._receiver.close()

    def clear_stall(self) -> None:
        """Let stalled requests go on."""
        with self._changed:
            self.faults.stall_tokens_after = None
            self._changed.notify_all()

    def wait_until_running(self, num_requests: int) -> None:
        """Return when so many requests generate, so that a test needs no sleep."""
        with self._counted:
            if not self._counted.wait_for(lambda: self._num_running >= num_requests, WAIT_S):
                raise TimeoutError(f"{self._num_running} requests run, expected {num_requests}")

    def handle(self, route: str, query: dict[str, list[str]], body: bytes) -> tuple[int, object]:
        """Return (status, what becomes JSON) for one request. Called by the handler threads."""
        if route in self.faults.stall and not self.faults.stall[route].wait(WAIT_S):
            return 504, {"error": f"{route} stalled for {WAIT_S} s"}
        if route in self.faults.status:
            return self.faults.status[route], {"error": f"{route} fails because the test says so"}
        if route == "/inference/v1/generate":
            return self._counted_generate(msgspec.json.decode(body, type=_Generate))
        if route == ABOUT_ROUTE:
            return 200, self.about.facts(query.get("reads", [None])[0])
        if route == CLAIM_ROUTE:
            return self.about.claimed(body)
        simple: dict[str, dict[str, object]] = {
            "/health": {},
            "/readiness": {},
            "/get_world_size": {"world_size": 1},
            REQUESTS_ROUTE: {"in_progress": self._num_open},
            "/is_paused": {"is_paused": self._is_paused},
            "/reset_prefix_cache": {"success": True},
        }
        if route in simple:
            return 200, simple[route]
        try:
            return self._control(route, query, body)
        except (VimeError, OSError, RuntimeError, KeyError, ValueError) as error:
            return 500, {"error": f"{type(error).__name__}: {error}"}

    def _control(self, route: str, query: dict[str, list[str]], body: bytes) -> tuple[int, object]:
        if route == "/pause":
            self._pause(query.get("mode", ["abort"])[0])
        elif route == "/sleep":
            self._sleep(int(query["level"][0]), query.get("mode", ["abort"])[0])
        elif route == "/wake_up":
            return 200, {"status": self._wake_up(query.get("tags", list(SLEEPING)))}
        elif route == "/resume":
            with self._changed:
                self._is_paused = self._is_frozen = False
                self._changed.notify_all()
        elif route in ("/abort_requests", "/inference/v1/abort_requests"):
            self._abort(msgspec.json.decode(body or b"{}", type=_Abort).request_ids)
        elif route == "/init_weight_transfer_engine":
            init_info = msgspec.json.decode(body, type=_Connect).init_info
            with self._worker:  # before the first import, which takes seconds: a later call would overtake this one
                import torch

                from vime.weights.transports import make_receiver

                receiver = make_receiver(str(init_info["transport"]), torch.device("cpu"))
                receiver.connect(init_info, 0)
                self._receiver = receiver
        elif route == UPDATE_ROUTE:
            return 200, self._update(msgspec.json.decode(body, type=_Update))
        elif route == WEIGHTS_ROUTE:
            return 200, self._held()
        else:
            return 404, {"error": f"the scripted engine has no {route}"}
        return 200, {}

    def _update(self, asked: _Update) -> BucketResult | LastBucketResult:
        """Take one bucket; as in vLLM, an error ends the update."""
        update_info = asked.update_info
        is_first = update_info["index"] == 0
        if self._receiver is None:
            raise RuntimeError(f"{UPDATE_ROUTE} before init_weight_transfer_engine")
        if SLEEPING[0] in self._asleep:
            raise RuntimeError(f"{UPDATE_ROUTE}: the memory of the weights is asleep")
        if self._is_updating == is_first:
            raise RuntimeError(f"{UPDATE_ROUTE}: an update is {'open' if is_first else 'not open'}")
        if is_first:
            self._pause(asked.pause_mode)
        with self._worker:
            return self._load(self._receiver, asked)

    def _load(self, receiver: BucketReceiver, asked: _Update) -> BucketResult | LastBucketResult:
        """The worker's part of an update."""
        update_info = asked.update_info
        receiver.check_call(update_info)
        if update_info["index"] == 0:
            receiver.start()
            self._incoming = {}
        self._is_updating = False
        for pairs in receiver.receive(update_info):
            self._incoming.update(pairs)
        self._is_updating = not is_last(update_info)
        if self._is_updating:
            return {"pause_s": 0.0, "confirm_s": 0.0}
        receiver.finish()
        if self.faults.is_passed_over:
            return {"pause_s": 0.0, "confirm_s": 0.0, **self._held()}
        self.weights = self._incoming
        with self._changed:
            self._version, self._content_hash = str(asked.version), receiver.content_hash
            self._is_discarded = False
            self._changed.notify_all()
        return {"pause_s": 0.0, "confirm_s": 0.0, **self._held()}

    def _held(self) -> HeldWeights:
        received = self._receiver
        content_hash = "0" * 32 if self.faults.wrong_hash or received is None else received.content_hash
        if self.faults.is_passed_over:
            content_hash = self._content_hash
        return {
            "weight_version": self.faults.wrong_version or self._version,
            "workers": [{"content_hash": content_hash, "num_tensors": len(self.weights)}] * self._num_workers,
        }

    def _pause(self, mode: str) -> None:
        if mode not in ("abort", "wait", "keep"):
            raise ValueError(f"pause mode {mode!r}")
        with self._changed:
            self._is_paused = True
            self._is_frozen = mode == "keep"
            self._changed.notify_all()
        if mode == "abort":
            self._abort()
        elif mode == "wait":
            with self._counted:
                if not self._counted.wait_for(lambda: self._num_running == 0, WAIT_S):
                    raise RuntimeError("running requests did not end")

    def _sleep(self, level: int, mode: str) -> None:
        self._pause(mode)
        with self._changed:
            self._asleep, self._is_discarded = set(SLEEPING), level == 2

    def _wake_up(self, tags: Sequence[str]) -> str:
        """As vLLM, which takes requests when nothing is asleep, and only logs what was not."""
        with self._changed:
            if set(tags) <= self._asleep:
                self._asleep -= set(tags)
            if not self._asleep:
                self._is_paused = self._is_frozen = False
                self._changed.notify_all()
            return "sleeping" if self._asleep else "awake"

    def _abort(self, request_ids: Sequence[str] | None = None) -> None:
        """End these requests early; without ids all of them, and wait until they have ended."""
        with self._changed:
            if request_ids:
                self._aborted.update(self._running & set(request_ids))
                self._changed.notify_all()
                return
            self._num_aborts += 1
            self._changed.notify_all()
            self._counted.wait_for(lambda: self._num_running == 0, WAIT_S)

    def _counted_generate(self, asked: _Generate) -> tuple[int, object]:
        with self._counted:
            self._num_open += 1
        try:
            return self._generate(asked)
        finally:
            with self._counted:
                self._num_open -= 1

    def _generate(self, asked: _Generate) -> tuple[int, object]:
        params, prompt = asked.sampling_params, asked.token_ids
        request_id = f"generate-tokens-{asked.request_id}"
        with self._changed:
            if not self._changed.wait_for(self._may_begin, WAIT_S):
                return 504, {"error": "paused"}
            if self._is_discarded:
                return 500, {"error": "the weights were discarded by a sleep of level 2, and no update came since"}
            self._num_running += 1
            self._running.add(request_id)
            self._counted.notify_all()
            try:
                completions = [self._complete(request) for request in self._requests(prompt, params)]
                longest = min(params.max_tokens, max(len(tokens) for tokens, _ in completions))
                versions = self._advance(longest, request_id)
            finally:
                self._num_running -= 1
                self._running.discard(request_id)
                self._aborted.discard(request_id)
                self._counted.notify_all()
                if self._at_once is not None:
                    self._changed.notify_all()
        produced = len(versions)
        choices = [
            _choice(index, completion, versions, params, is_aborted=produced < longest)
            for index, completion in enumerate(completions)
        ]
        total = sum(min(len(tokens), produced) for tokens, _ in completions)
        usage = {"prompt_tokens": len(prompt), "completion_tokens": total, "total_tokens": len(prompt) + total}
        scores = None
        if params.prompt_logprobs is not None:
            scored = zip(prompt[1:], self._score(prompt), strict=True)
            scores = [None, *({str(token): {"logprob": log_prob}} for token, log_prob in scored)]
        return 200, {
            "request_id": request_id,
            "choices": choices,
            "prompt_logprobs": scores,
            "usage": usage,
        }

    def _may_begin(self) -> bool:
        return not (self._is_paused or self._asleep) and (self._at_once is None or self._num_running < self._at_once)

    def _requests(self, prompt: Sequence[int], params: _SamplingParams) -> list[CompletionRequest]:
        return [
            CompletionRequest(
                prompt=prompt,
                sample=sample,
                seed=params.seed,
                version=self._version,
                content_hash=self._content_hash,
                max_tokens=params.max_tokens,
            )
            for sample in range(params.n)
        ]

    def _advance(self, longest: int, request_id: str) -> list[str]:
        """Sample token after token under the lock: the version of each that came before an abort."""
        aborts = self._num_aborts
        versions: list[str] = []

        def is_aborted() -> bool:
            return self._num_aborts > aborts or request_id in self._aborted

        def is_held() -> bool:
            after = self.faults.stall_tokens_after
            return self._is_frozen or (after is not None and len(versions) >= after)

        while len(versions) < longest:
            if not self._changed.wait_for(lambda: is_aborted() or not is_held(), WAIT_S) or is_aborted():
                break
            if self._token_s == 0:
                versions.append(self._version)
                continue
            version, wanted, began = self._version, longest - len(versions), time.monotonic()
            is_disturbed = self._changed.wait_for(lambda: is_aborted() or is_held(), wanted * self._token_s)
            passed = int((time.monotonic() - began) / self._token_s) if is_disturbed else wanted
            versions += [version] * min(passed, wanted)
        return versions


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 1024  # a round's requests connect at once; the default of 5 makes them knock again after 1 s


class _Handler(BaseHTTPRequestHandler):
    engine: FakeEngine
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def setup(self) -> None:
        super().setup()
        self.engine.num_connections += 1

    def do_GET(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def log_message(self, *_: object) -> None:
        """Silence: the base class writes every request to stderr."""

    def _serve(self) -> None:
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.engine.is_stopped:
            self.close_connection = True
            return
        parts, keys = urlsplit(self.path), self.engine.keys
        result: object
        if keys is not None and not keys.admit(self.command, parts.path, self.headers.get(KEY_HEADER, "")):
            status, result = 401, REFUSED
        else:
            if self.command == "POST" and parts.path != "/inference/v1/generate":
                self.engine.calls.append(self.path)
            status, result = self.engine.handle(parts.path, parse_qs(parts.query), raw)
        content = json.dumps(result).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        with contextlib.suppress(ConnectionError):  # the client may have given up
            self.end_headers()
            self.wfile.write(content)


def _choice(
    index: int, completion: Completion, versions: list[str], params: _SamplingParams, *, is_aborted: bool
) -> dict[str, object]:
    tokens, log_probs = completion
    kept, limit = min(len(tokens), len(versions)), params.max_tokens
    reason = "length" if len(tokens) > limit else "stop"
    spans: list[_Span] = []
    for position, version in enumerate(versions[:kept]):
        if spans and spans[-1]["version"] == version:
            spans[-1]["end"] = position + 1
        else:
            spans.append({"version": version, "start": position, "end": position + 1})
    content = [
        {"token_id": token, "logprob": log_prob, "rank": 1, "top_logprobs": []}
        for token, log_prob in zip(tokens[:kept], log_probs[:kept], strict=True)
    ]
    return {
        "index": index,
        "token_ids": tokens[:kept],
        "finish_reason": "abort" if is_aborted and kept < min(len(tokens), limit) else reason,
        "stop_reason": None,
        "logprobs": {"content": content} if params.logprobs is not None else None,
        "weight_versions": spans,
    }
