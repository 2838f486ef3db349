"""Our routes in vLLM's server: the order of what one call does, and where it stops."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from vime.backends.vllm_utils.access import EngineKeys
from vime.backends.vllm_utils.routes import REQUESTS_ROUTE, UPDATE_ROUTE, WEIGHTS_ROUTE, EngineMiddleware

HEADERS = [(b"X-Vime-Key", b"control-key")]
KEYS = EngineKeys(control="control-key", generate="generate-key")


class NotedEngine:
    """vLLM's engine as far as the routes use it; writes down what it is asked, and fails at `fail_at`."""

    def __init__(self, fail_at: str = "") -> None:
        self.calls: list[str] = []
        self._fail_at, self._version = fail_at, "default"
        self.renderer = SimpleNamespace(clear_mm_cache_async=lambda: self._note("clear inputs"))
        self.engine_core = SimpleNamespace(
            pause_scheduler_async=lambda *, mode, clear_cache: self._note(f"pause {mode}, clear {clear_cache}")
        )

    async def _note(self, call: str) -> None:
        self.calls.append(call)
        if call == self._fail_at:
            raise RuntimeError(f"no {call}")

    async def collective_rpc(self, method: str, kwargs: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        await self._note(f"{method} {kwargs['update_info']['index']}" if kwargs else method)
        return [{"content_hash": "ab", "num_tensors": 3}]

    async def update_weight_version(self, version: str) -> None:
        await self._note(f"version {version}")
        self._version = version

    async def get_weight_version(self) -> str:
        return self._version


@pytest.fixture
def ask(monkeypatch):
    """ask(engine, method, path, body) -> (status, JSON)."""
    for name, value in KEYS.environment().items():
        monkeypatch.setenv(name, value)

    def ask(engine: NotedEngine, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        sent: list[dict[str, Any]] = []
        content = json.dumps(body).encode()
        parts = [
            {"body": content[:9], "more_body": True}, {"body": content[9:], "more_body": False}
        ]  # fmt: skip

        async def receive() -> dict[str, Any]:
            return parts.pop(0)

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        async def vllm(_scope: Any, _receive: Any, send: Any) -> None:
            await send({"status": "vLLM's own"})
            await send({"body": "null"})

        app = SimpleNamespace(state=SimpleNamespace(engine_client=engine))
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "app": app,
            "headers": [(b"X-Vime-Key", b"control-key")],
        }
        asyncio.run(EngineMiddleware(vllm)(scope, receive, send))
        start, answer = sent
        return start["status"], json.loads(answer["body"])

    return ask


def bucket(index: int, count: int) -> dict[str, Any]:
    return {"update_info": {"index": index, "count": count}, "version": 7, "pause_mode": "keep"}


def test_one_bucket_is_the_whole_update(ask):
    engine = NotedEngine()
    status, answer = ask(engine, "POST", UPDATE_ROUTE, bucket(0, 1))
    assert engine.calls == ["clear inputs", "pause keep, clear True", "vime_update_weights 0", "version 7"]
    assert (status, answer["weight_version"]) == (200, "7")
    assert answer["workers"] == [{"content_hash": "ab", "num_tensors": 3}]
    assert min(answer["pause_s"], answer["confirm_s"]) >= 0


def test_of_several_buckets_the_first_pauses_and_only_the_last_names_the_version(ask):
    engine = NotedEngine()
    answers = [ask(engine, "POST", UPDATE_ROUTE, bucket(index, 3))[1] for index in range(3)]
    assert engine.calls == [
        "clear inputs", "pause keep, clear True", "vime_update_weights 0", "vime_update_weights 1",
        "vime_update_weights 2", "version 7",
    ]  # fmt: skip
    assert ["workers" in answer for answer in answers] == [False, False, True]


@pytest.mark.parametrize("step", ["clear inputs", "pause keep, clear True", "vime_update_weights 0", "version 7"])
def test_a_step_that_fails_is_the_last_and_is_named(ask, step):
    engine = NotedEngine(fail_at=step)
    assert ask(engine, "POST", UPDATE_ROUTE, bucket(0, 1)) == (500, {"error": f"RuntimeError: no {step}"})
    assert engine.calls[-1] == step


def test_what_is_held_can_be_asked_at_any_time(ask):
    engine = NotedEngine()
    status, answer = ask(engine, "GET", WEIGHTS_ROUTE)
    assert (status, answer) == (
        200,
        {"weight_version": "default", "workers": [{"content_hash": "ab", "num_tensors": 3}]},
    )
    assert engine.calls == ["vime_weight_report"]


@pytest.mark.parametrize(("method", "path"), [("GET", UPDATE_ROUTE), ("POST", WEIGHTS_ROUTE), ("POST", "/pause")])
def test_every_other_request_is_vllm_s(ask, method, path):
    engine = NotedEngine()
    assert ask(engine, method, path) == ("vLLM's own", None)
    assert engine.calls == []


def test_requests_for_completions_are_counted_until_they_end_also_by_an_error(monkeypatch):
    for name, value in KEYS.environment().items():
        monkeypatch.setenv(name, value)
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def count(app: EngineMiddleware) -> int:
        sent.clear()
        await app({"type": "http", "method": "GET", "path": REQUESTS_ROUTE, "headers": HEADERS}, None, send)
        return json.loads(sent[1]["body"])["in_progress"]

    async def main() -> list[int]:
        go_on = asyncio.Event()

        async def vllm(scope: Any, _receive: Any, _send: Any) -> None:
            await go_on.wait()
            if scope["path"] == "/v1/completions":
                raise RuntimeError("no")

        app = EngineMiddleware(vllm)
        paths = ["/inference/v1/generate", "/v1/completions", "/pause"]
        scopes = [{"type": "http", "method": "POST", "path": path, "headers": HEADERS} for path in paths]
        tasks = [asyncio.create_task(app(scope, None, send)) for scope in scopes]
        await asyncio.sleep(0)
        counts = [await count(app)]
        go_on.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        return [*counts, await count(app)]

    assert asyncio.run(main()) == [2, 0]
