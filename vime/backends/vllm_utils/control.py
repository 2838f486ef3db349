"""Control of all engines over HTTP: every call goes to each engine, in parallel, with a timeout.

Not through the router, which would pick one engine and drop the query string.
"""

from __future__ import annotations

import concurrent.futures
import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from vime.backends.vllm_utils.routes import UPDATE_ROUTE, WEIGHTS_ROUTE, is_last
from vime.observability.events import note_span, span
from vime.protocols import UpdateResponse
from vime.types import (
    EngineAddress,
    EngineError,
    EngineLostError,
    EngineReport,
    Version,
    WaitTimeoutError,
    may_pass,
)
from vime.utils.http import CONNECT_S, FAILURES, HttpClient
from vime.utils.waits import waiting

FAILURE_GRACE_S = 1.0
SHOWN_BODY = 600
CALLS_AT_ONCE = 8  # to one engine
NUM_LIKELIEST = 5  # of the next token; vLLM answers up to 20


class Fanout:
    """One HTTP call to every engine at once, each bounded by the client's own timeouts."""

    def __init__(self, addresses: Sequence[EngineAddress], timeout_s: float) -> None:
        self.addresses = tuple(addresses)
        self._deadline_s = CONNECT_S + timeout_s + FAILURE_GRACE_S
        self._clients = [HttpClient(each.url, timeout_s=timeout_s, headers=each.headers) for each in addresses]
        # For several calls to each engine, and for those that a failed one left waiting.
        self._pool = ThreadPoolExecutor(max_workers=CALLS_AT_ONCE * len(addresses), thread_name_prefix="fleet-control")

    def get(self, route: str) -> list[dict[str, Any]]:
        return self._on_each("GET", route, [None] * len(self.addresses))

    def post(self, route: str, body: Any = None) -> list[dict[str, Any]]:
        """The same body to every engine."""
        return self._on_each("POST", route, [None if body is None else json.dumps(body).encode()] * len(self.addresses))

    def post_each(self, route: str, bodies: Sequence[Any]) -> list[dict[str, Any]]:
        """Its own body to each engine."""
        return self._on_each("POST", route, [json.dumps(body).encode() for body in bodies])

    def post_all(self, route: str, bodies: Sequence[Any]) -> list[list[dict[str, Any]]]:
        """Every body to every engine, all at once: [engine][body]."""
        with ThreadPoolExecutor(max(1, len(bodies)), thread_name_prefix="fleet-control") as bodies_at_once:
            by_body = list(bodies_at_once.map(partial(self.post, route), bodies))
        return [[answers[index] for answers in by_body] for index in range(len(self.addresses))]

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        for client in self._clients:
            client.close()

    def _on_each(self, method: str, route: str, bodies: Sequence[bytes | None]) -> list[dict[str, Any]]:
        """Answers in the order of the engines. One failure ends the wait: the others may be waiting for that engine."""
        if len(bodies) != len(self.addresses):
            raise ValueError(f"{route}: {len(bodies)} bodies for {len(self.addresses)} engines")
        sent = [self._pool.submit(self._checked, method, route, index, body) for index, body in enumerate(bodies)]
        finished, pending = concurrent.futures.wait(
            sent, timeout=self._deadline_s, return_when=concurrent.futures.FIRST_EXCEPTION
        )
        if pending and any(future.exception() for future in finished):
            more, pending = concurrent.futures.wait(pending, timeout=FAILURE_GRACE_S)
            finished |= more
        failures = [error for future in sent if future in finished and (error := future.exception())]
        if failures:
            kind = EngineLostError if any(may_pass(error) for error in failures) else EngineError
            waiting = f"; {len(pending)} other engines have not answered yet" if pending else ""
            raise kind("; ".join(map(str, failures)) + f"{waiting}. See the engine's log in RUN_DIR/logs.")
        if pending:  # the client bounds each read, but not an answer that comes byte by byte
            names = ", ".join(self.addresses[index].name for index in range(len(sent)) if sent[index] in pending)
            raise WaitTimeoutError(f"{names} to answer {route}", self._deadline_s, "vLLM", "See RUN_DIR/logs.")
        return [future.result() for future in sent]

    def _checked(self, method: str, route: str, index: int, body: bytes | None) -> dict[str, Any]:
        """The JSON of one engine's answer; EngineError names engine, route, status and body."""
        address = self.addresses[index]
        try:
            with waiting(f"an answer to {route}", address.name, deadline_s=self._deadline_s):
                status, content = self._clients[index].call(method, route, body)
        except FAILURES as error:
            raise EngineLostError(f"{address.name} ({address.url}) {route}: {type(error).__name__}: {error}") from error
        if status != 200:
            kind = EngineLostError if status >= 500 else EngineError
            told = content[:SHOWN_BODY].decode(errors="replace")
            raise kind(f"{address.name} ({address.url}) {route}: status {status}, expected 200: {told}")
        return dict(json.loads(content)) if content else {}


class FleetControl:
    """Implements `vime.protocols.EngineControl`. `timeout_s` bounds each call, except that connecting has 10 s.

    A call either succeeds on every engine or raises one EngineError that names each engine that failed, its route,
    status and answer. Thread-safe.
    """

    def __init__(self, addresses: Sequence[EngineAddress], *, timeout_s: float) -> None:
        if not addresses:
            raise ValueError("a fleet needs at least one engine")
        self._http = Fanout(addresses, timeout_s)

    @property
    def addresses(self) -> Sequence[EngineAddress]:
        return self._http.addresses

    def world_sizes(self) -> list[int]:
        """Workers of each engine, data-parallel replicas included."""
        return [int(answer["world_size"]) for answer in self._http.get("/get_world_size")]

    def init_transfer(self, init_info_by_engine: Sequence[dict[str, Any]]) -> None:
        """Each engine gets its own information; all are asked at once, since they may wait for each other."""
        bodies = [{"init_info": info} for info in init_info_by_engine]
        self._http.post_each("/init_weight_transfer_engine", bodies)

    def update(self, update_info: dict[str, Any], *, version: Version, pause_mode: str) -> UpdateResponse:
        """One bucket. Before the first the engines stop generating (`wait` for running requests, `keep` them for later,
        or `abort` them with what they have) and clear their prefix caches: the weights change under them. With the last
        they hold `version`, and say what it is that they hold."""
        body = {"update_info": update_info, "version": version, "pause_mode": pause_mode}
        began = time.monotonic()
        with span("load_weights", version=version):
            answers = self._http.post(UPDATE_ROUTE, body)
            whole_s = time.monotonic() - began
            pause_s, confirm_s = (max(float(each[name]) for each in answers) for name in ("pause_s", "confirm_s"))
            if update_info["index"] == 0:
                note_span("pause_engines", pause_s, ago_s=whole_s - pause_s)
            if is_last(update_info):
                note_span("confirm_weights", confirm_s)
        reports = self._reports(answers) if is_last(update_info) else ()
        return UpdateResponse(pause_s=pause_s, confirm_s=confirm_s, reports=reports)

    def reports(self) -> Sequence[EngineReport]:
        """Version and content hash of each engine. EngineError when an engine's own workers disagree."""
        with span("confirm_weights"):
            return self._reports(self._http.get(WEIGHTS_ROUTE))

    def _reports(self, answers: Sequence[dict[str, Any]]) -> tuple[EngineReport, ...]:
        return tuple(_report(address, answer) for address, answer in zip(self.addresses, answers, strict=True))

    def resume(self) -> None:
        with span("resume_engines"):
            self._http.post("/resume")

    def is_paused(self) -> list[bool]:
        return [bool(answer["is_paused"]) for answer in self._http.get("/is_paused")]

    def prompt_log_probs(self, rows: Sequence[Sequence[int]]) -> list[list[list[float]]]:
        """[engine][row]: the log-probability of each of the row's tokens but the first, given those before it (before
        any temperature). All rows are asked for at once: a busy engine scores them in the same few steps."""
        params = {"max_tokens": 1, "prompt_logprobs": 0, "temperature": 1.0, "detokenize": False}
        bodies = [{"token_ids": list(tokens), "sampling_params": params} for tokens in rows]
        return [
            [_prompt_log_probs(answer, tokens) for answer, tokens in zip(answers, rows, strict=True)]
            for answers in self._http.post_all("/inference/v1/generate", bodies)
        ]

    def next_log_probs(self, tokens: Sequence[int], *, with_cache: bool) -> list[dict[int, float]]:
        """Per engine, the likeliest tokens after `tokens` with their log-probabilities (before any temperature).
        `with_cache`: the engine may take the beginning from its prefix cache."""
        body = {
            "token_ids": list(tokens),
            "sampling_params": {
                "max_tokens": 1,
                "logprobs": NUM_LIKELIEST,
                "temperature": 0.0,
                "detokenize": False,
                "skip_reading_prefix_cache": not with_cache,
            },
        }
        return [_likeliest(answer) for answer in self._http.post("/inference/v1/generate", body)]

    def close(self) -> None:
        self._http.close()


def _likeliest(answer: dict[str, Any]) -> dict[int, float]:
    [entry] = answer["choices"][0]["logprobs"]["content"]
    return {int(top["token_id"]): float(top["logprob"]) for top in entry["top_logprobs"]}


def _report(address: EngineAddress, answer: dict[str, Any]) -> EngineReport:
    version, workers = str(answer["weight_version"]), answer["workers"]
    if not version.isdigit():
        raise EngineError(
            f"{address.name} serves version {version!r}, which no trainer has published. Publish weights to it first."
        )
    distinct = {(worker["content_hash"], int(worker["num_tensors"])) for worker in workers}
    if len(distinct) != 1:
        raise EngineError(f"{address.name}: its {len(workers)} workers hold different weights: {sorted(distinct)}.")
    ((content_hash, num_tensors),) = distinct
    return EngineReport(engine=address.name, version=int(version), content_hash=content_hash, num_tensors=num_tensors)


def _prompt_log_probs(answer: dict[str, Any], tokens: Sequence[int]) -> list[float]:
    """Position 0 has no entry; each other one maps token id (a JSON key) to its log-probability."""
    entries = answer["prompt_logprobs"][1:]
    return [float(entry[str(token)]["logprob"]) for entry, token in zip(entries, tokens[1:], strict=True)]
