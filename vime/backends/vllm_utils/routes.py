"""Our own routes in vLLM's server: a bucket of weights in one call, with all that surrounds it, and what is held.

    POST /vime/update_weights {"update_info": ..., "version": 7, "pause_mode": "keep"}
    GET  /vime/weights
    GET  /vime/requests
    /vime/about and /vime/claim: about.py

By vLLM's own routes an update of one bucket is six calls (pause, start, update, finish, version, report), which cost
more than the weights of a small model. The order is the same here, and each step waits for the one before it.

Runs in vLLM's API server, which is given `EngineMiddleware` with --middleware. Standard library only.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from collections.abc import Mapping
from typing import Protocol, TypedDict
from urllib.parse import parse_qs

from vime.backends.vllm_utils.about import ABOUT_ROUTE, CLAIM_ROUTE, About
from vime.backends.vllm_utils.access import (
    GENERATE_PREFIXES,
    Application,
    Message,
    Receive,
    RequireKey,
    Send,
    send_json,
)
from vime.config.lora import AdapterInfo
from vime.weights.update_info import UpdateInfo, is_last

logger = logging.getLogger(__name__)

ROOM_POLL_S = 0.02
MAX_ADAPTERS = 4  # versions that requests in progress use, and the newest
UPDATE_ROUTE, WEIGHTS_ROUTE, REQUESTS_ROUTE = "/vime/update_weights", "/vime/weights", "/vime/requests"


class WorkerWeights(TypedDict):
    """Content hash and number of tensors of the newest update, as one worker of an engine received it."""

    content_hash: str
    num_tensors: int


class HeldWeights(TypedDict):
    """The version that an engine puts on its tokens, and what each of its workers has received."""

    weight_version: str
    workers: list[WorkerWeights]


class BucketResult(TypedDict):
    """Seconds until nothing was generated any more (first bucket), and from loaded to reported (last)."""

    pause_s: float
    confirm_s: float


class LastBucketResult(BucketResult, HeldWeights):
    """With the last bucket comes what the engine holds now."""


class OpenRequests(TypedDict):
    """How many requests for completions an engine works on, those that wait for an update included."""

    in_progress: int


class _Adapter(Protocol):
    """vLLM's LoRARequest."""

    lora_int_id: int


class _Request(Protocol):
    lora_request: _Adapter | None


class _Requests(Protocol):
    request_states: Mapping[str, _Request]  # of the requests in progress


class _Model(Protocol):
    name: str


class _Models(Protocol):
    """vLLM's table of what requests may name."""

    base_model_paths: list[_Model]
    lora_requests: dict[str | None, object]


class _Renderer(Protocol):
    async def clear_mm_cache_async(self) -> None: ...


class _EngineCore(Protocol):
    async def pause_scheduler_async(self, *, mode: str, clear_cache: bool) -> None: ...


class _Engine(Protocol):
    """vLLM's AsyncLLM, as far as it is used here."""

    renderer: _Renderer
    engine_core: _EngineCore
    output_processor: _Requests

    async def list_loras(self) -> set[int]: ...
    async def remove_lora(self, lora_id: int) -> bool: ...
    async def collective_rpc(self, method: str, *, kwargs: dict[str, object] | None = None) -> list[WorkerWeights]: ...
    async def update_weight_version(self, version: str) -> None: ...
    async def get_weight_version(self) -> str: ...


class EngineMiddleware(RequireKey):
    """The routes, and in front of them and of vLLM's own the question for a key."""

    def __init__(self, app: Application) -> None:
        super().__init__(_Routes(app))


class _Routes:
    def __init__(self, app: Application) -> None:
        self._app = app
        self._num_open = 0
        self._about = About()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            keep_settings()
        asked = (scope["type"], scope.get("method"), scope.get("path"))
        if asked == ("http", "GET", REQUESTS_ROUTE):
            await send_json(send, 200, {"in_progress": self._num_open})
            return
        if asked == ("http", "GET", ABOUT_ROUTE):
            reads = parse_qs(scope.get("query_string", b"").decode()).get("reads", [None])[0]
            await send_json(send, 200, self._about.facts(reads))
            return
        if asked == ("http", "POST", CLAIM_ROUTE):
            await send_json(send, *self._about.claimed(await _body(receive)))
            return
        if asked[:2] == ("http", "POST") and scope["path"].startswith(GENERATE_PREFIXES):
            self._num_open += 1
            try:
                await self._app(scope, receive, send)
            finally:
                self._num_open -= 1
            return
        if asked not in (("http", "POST", UPDATE_ROUTE), ("http", "GET", WEIGHTS_ROUTE)):
            await self._app(scope, receive, send)
            return
        engine: _Engine = scope["app"].state.engine_client
        result: BucketResult | LastBucketResult | HeldWeights
        try:
            if scope["method"] == "POST":
                told = json.loads(await _body(receive))
                if told.get("adapter") is None:
                    told.pop("adapter", None)
                    result = await _update(engine, **told)
                else:
                    result = await _update_adapter(engine, scope["app"].state.openai_serving_models, **told)
            else:
                result = await _held(engine, await engine.collective_rpc("vime_weight_report"))
        except Exception as error:  # boundary: the trainer stops the update, whatever it was
            logger.exception("%s failed", scope["path"])
            await send_json(send, 500, {"error": f"{type(error).__name__}: {error}"})
        else:
            await send_json(send, 200, result)


def keep_settings() -> None:
    """Let vLLM, once it has started, read its settings no more. It looks one up for each token, in all variables of the
    environment, and keeps them in EngineCore but not in its server."""
    settings = sys.modules.get("vllm.envs")
    if settings is not None:  # not in a server that only acts like vLLM's
        settings.enable_envs_cache()


def label_tokens_by_adapter() -> None:
    """Let each request put the version of its adapter on its tokens. vLLM puts the engine's newest on all of them, also
    on those of requests that began with an adapter before. It has no hook for it."""
    from vllm.v1.engine.output_processor import RequestState

    if not hasattr(RequestState, "vime_labels"):
        track = RequestState.track_weight_version

        def by_adapter(state: RequestState, weight_version: str) -> None:
            track(state, state.lora_name or weight_version)

        RequestState.track_weight_version = by_adapter  # type: ignore[method-assign, assignment]
        RequestState.vime_labels = True  # type: ignore[attr-defined]


async def _update(
    engine: _Engine, update_info: UpdateInfo, version: int, pause_mode: str
) -> BucketResult | LastBucketResult:
    """Load one bucket."""
    began = paused = time.monotonic()
    if update_info["index"] == 0:
        # As `AsyncLLM.pause_generation` does it. That sleeps 20 ms more, so that the last completions are on their way
        # before it returns; theirs are the tokens and versions of before, whenever they leave.
        await engine.renderer.clear_mm_cache_async()
        await engine.engine_core.pause_scheduler_async(mode=pause_mode, clear_cache=True)
        paused = time.monotonic()
    workers = await engine.collective_rpc("vime_update_weights", kwargs={"update_info": update_info})
    loaded, pause_s = time.monotonic(), paused - began
    if not is_last(update_info):
        return {"pause_s": pause_s, "confirm_s": 0.0}
    await engine.update_weight_version(str(version))
    held = await _held(engine, workers)
    return {"pause_s": pause_s, "confirm_s": time.monotonic() - loaded, **held}


async def _update_adapter(
    engine: _Engine,
    models: _Models,
    update_info: UpdateInfo,
    version: int,
    pause_mode: str,
    adapter: AdapterInfo,
) -> BucketResult | LastBucketResult:
    """Load one bucket of an adapter.

    Requests in progress keep the adapter that they began with, so that none has to be waited for and what is cached of
    them stays right; but nothing is generated from the first bucket until the trainer has compared the hashes.
    """
    if update_info["index"] == 0:
        await _make_room(engine)
    began = paused = time.monotonic()
    if update_info["index"] == 0:
        mode = "abort" if pause_mode == "abort" else "keep"
        await engine.engine_core.pause_scheduler_async(mode=mode, clear_cache=False)
        paused = time.monotonic()
    told = {"update_info": update_info, "adapter": adapter, "version": version}
    workers = await engine.collective_rpc("vime_update_adapter", kwargs=told)
    loaded, pause_s = time.monotonic(), paused - began
    if not is_last(update_info):
        return {"pause_s": pause_s, "confirm_s": 0.0}
    await engine.update_weight_version(str(version))
    from vllm.lora.request import LoRARequest  # loaded in this process already

    newest = LoRARequest(str(version), adapter_id(version), f"version {version} was not to be unloaded")
    label_tokens_by_adapter()
    for name in (None, *(base.name for base in models.base_model_paths)):  # what requests name, or do not
        models.lora_requests[name] = newest
    held = await _held(engine, workers)
    return {"pause_s": pause_s, "confirm_s": time.monotonic() - loaded, **held}


async def _make_room(engine: _Engine) -> None:
    """Unload the adapters that no request uses, but not the one that new requests get; wait until there is room for one
    more. The caller's deadline bounds it."""
    while True:
        loaded = set(await engine.list_loras())  # it arrives as a list
        requests = list(engine.output_processor.request_states.values())
        used = {request.lora_request.lora_int_id for request in requests if request.lora_request is not None}
        for unused in sorted(loaded - used - {max(loaded, default=0)}):
            await engine.remove_lora(unused)
            loaded = loaded - {unused}
        if len(loaded) < MAX_ADAPTERS:
            return
        await asyncio.sleep(ROOM_POLL_S)


def adapter_id(version: int) -> int:
    """Return vLLM's number of an adapter, which begins at 1."""
    return version + 1


async def _held(engine: _Engine, workers: list[WorkerWeights]) -> HeldWeights:
    return {"weight_version": await engine.get_weight_version(), "workers": workers}


async def _body(receive: Receive) -> bytes:
    body = b""
    while True:
        message = await receive()
        body += bytes(message.get("body", b""))
        if not message.get("more_body"):
            return body
