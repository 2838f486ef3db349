"""Who may ask an engine for what: the rule, the ASGI middleware around vLLM, and the scripted engine."""

import asyncio
import json

import httpx
import pytest

from vime.backends.vllm_utils.access import EngineKeys
from vime.backends.vllm_utils.control import FleetControl
from vime.backends.vllm_utils.fake import FakeEngine
from vime.backends.vllm_utils.launch import engine_command
from vime.backends.vllm_utils.routes import UPDATE_ROUTE, WEIGHTS_ROUTE, EngineMiddleware
from vime.config.parse import Config
from vime.rollout.engine_client import EngineClient
from vime.rollout.generation import engine_headers, use_engine_key
from vime.types import KEY_HEADER, EngineAddress, EngineError

KEYS = EngineKeys(control="control-key", generate="generate-key")
CONTROL_ROUTES = [
    ("POST", "/pause"), ("POST", "/resume"), ("POST", "/collective_rpc"), ("POST", "/start_weight_update"),
    ("POST", "/update_weights"), ("POST", "/init_weight_transfer_engine"), ("GET", "/is_paused"),
    ("GET", "/weight_info"), ("GET", "/metrics"), ("GET", "/docs"), ("POST", "/health"), ("GET", "/health/"),
    ("GET", "/"), ("GET", "/inference"), ("POST", UPDATE_ROUTE), ("GET", WEIGHTS_ROUTE),
]  # fmt: skip
DATA_ROUTES = [("POST", "/inference/v1/generate"), ("POST", "/abort_requests"), ("POST", "/v1/completions")]


@pytest.mark.parametrize(("method", "route"), CONTROL_ROUTES)
def test_a_control_route_opens_to_the_control_key_alone(method, route):
    assert [KEYS.admit(method, route, key) for key in ("control-key", "generate-key", "wrong", "")] == [
        True, False, False, False,
    ]  # fmt: skip


@pytest.mark.parametrize(("method", "route"), DATA_ROUTES)
def test_generation_opens_to_both_keys(method, route):
    assert [KEYS.admit(method, route, key) for key in ("control-key", "generate-key", "wrong", "")] == [
        True, True, False, False,
    ]  # fmt: skip


def test_only_the_router_s_health_check_needs_no_key():
    assert KEYS.admit("GET", "/health", "")


def test_an_engine_without_keys_in_its_environment_does_not_start(monkeypatch):
    monkeypatch.delenv("VIME_ENGINE_CONTROL_KEY", raising=False)
    with pytest.raises(RuntimeError, match="would let everyone in"):
        EngineMiddleware(None)


def ask(monkeypatch, scope: dict) -> list[dict]:
    """What an application behind the middleware, or the middleware itself, answers."""
    for name, value in KEYS.environment().items():
        monkeypatch.setenv(name, value)
    sent: list[dict] = []

    async def application(_scope, _receive, send):
        await send({"type": "reached"})

    async def send(message):
        sent.append(message)

    asyncio.run(EngineMiddleware(application)(scope, None, send))
    return sent


def test_the_middleware_lets_pass_what_shows_the_key_and_the_server_s_own_start(monkeypatch):
    headers = [(b"x-vime-key", b"control-key")]
    http = {"type": "http", "method": "POST", "path": "/pause"}
    assert ask(monkeypatch, http | {"headers": headers}) == [{"type": "reached"}]
    assert ask(monkeypatch, {"type": "lifespan"}) == [{"type": "reached"}]
    start, body = ask(monkeypatch, http | {"headers": []})
    assert (start["status"], KEY_HEADER in json.loads(body["body"])["error"]) == (401, True)


@pytest.mark.parametrize(("method", "path"), [("POST", UPDATE_ROUTE), ("GET", WEIGHTS_ROUTE)])
@pytest.mark.parametrize("key", [b"generate-key", b"wrong", b""])
def test_our_own_routes_answer_nobody_without_the_control_key(monkeypatch, method, path, key):
    scope = {"type": "http", "method": method, "path": path, "headers": [(b"x-vime-key", key)]}  # no app behind it
    start, _ = ask(monkeypatch, scope)
    assert start["status"] == 401


def test_the_middleware_closes_a_websocket_without_a_key(monkeypatch):
    scope = {"type": "websocket", "path": "/v1/realtime", "headers": []}
    assert ask(monkeypatch, scope) == [{"type": "websocket.close", "code": 1008}]


def test_vllm_is_started_with_the_middleware_and_no_key_on_its_command_line():
    command = engine_command(Config().replace(hf_checkpoint="m", device="cpu"), index=0, host="127.0.0.1", port=1)
    assert command[command.index("--middleware") + 1] == "vime.backends.vllm_utils.routes.EngineMiddleware"
    assert not any("key" in word.lower() for word in command)


def test_a_control_client_shows_the_key_of_each_engine_and_is_refused_with_another():
    with FakeEngine(keys=KEYS) as engine:
        fleet = FleetControl([engine.address], timeout_s=10)
        assert fleet.is_paused() == [False]
        fleet.close()
        stranger = FleetControl([EngineAddress(name="fake-0", url=engine.address.url, key="wrong")], timeout_s=10)
        with pytest.raises(EngineError, match=r"HTTP 401: .*expected status 200"):
            stranger.resume()
        stranger.close()
        assert httpx.post(engine.address.url + "/pause").status_code == 401
        assert httpx.get(engine.address.url + "/health").status_code == 200
        assert engine.calls == []  # nothing was paused


def test_a_generation_client_shows_its_key_and_opens_no_control_route():
    async def generate(url: str, key: str) -> list[int]:
        client = EngineClient(url, max_in_flight=1, timeout_s=10, key=key)
        try:
            [answer] = await client.generate([1, 2], {"max_tokens": 2})
            return list(answer.token_ids)
        finally:
            await client.aclose()

    with FakeEngine(keys=KEYS) as engine:
        assert asyncio.run(generate(engine.address.url, "generate-key")) == [2, 1]
        with pytest.raises(EngineError, match="401"):
            asyncio.run(generate(engine.address.url, "wrong"))
        use_engine_key("generate-key")
        assert httpx.post(engine.address.url + "/pause", headers=engine_headers()).status_code == 401
        use_engine_key("")


def test_keys_are_new_for_each_run_and_are_not_shown():
    assert EngineKeys.make() != EngineKeys.make()
    assert repr(KEYS) == "EngineKeys()"
    assert "secret" not in repr(EngineAddress(name="e", url="http://h", key="secret"))
