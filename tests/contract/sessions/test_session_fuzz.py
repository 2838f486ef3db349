"""Any body, and valid bodies with a few changes, to every endpoint of agents: no fault, and nothing of the session of
somebody else, whose prompts and replies have a word that nobody else may see, at a client or at the engine."""

from __future__ import annotations

import json
import os
import urllib.parse
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.contract.sessions.test_sdk_sessions import TOKENIZER, TOOL, World
from tests.helpers.fuzz import changed, say
from tests.helpers.scripted_engine import Reply, Request
from tests.helpers.session_server import ADMIN
from tests.unit.sessions.test_dialect_bodies import NAMES, VALUES
from vime.sessions.dialects import DIALECTS

EXAMPLES = int(os.environ.get("VIME_FUZZ_EXAMPLES", "25"))
"""For each endpoint and kind of input."""
FUZZ = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
SECRET = "zebra"
COUNT = "/v1/messages/count_tokens"
ASKED = {"role": "user", "content": "q"}
FUNCTION = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
PART = [{"type": "text", "text": "r"}]
MESSAGES = {
    "model": "m",
    "max_tokens": 9,
    "system": "s",
    "messages": [
        ASKED,
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "add", "input": {"a": 1}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": PART}]},
    ],
    "tools": [{"name": "add", "description": "adds", "input_schema": TOOL["parameters"]}],
    "stop_sequences": ["x"],
    "thread": {"type": "continue", "previous_message_id": "msg_0"},
    "stream": True,
}
VALID: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "model": "m",
        "messages": [
            ASKED,
            {"role": "assistant", "content": "on the 0", "tool_calls": [{"id": "c", **FUNCTION}]},
            {"role": "tool", "tool_call_id": "c", "name": "add", "content": PART},
        ],
        "tools": [{"type": "function", "function": TOOL}],
        "max_completion_tokens": 9,
        "stop": ["x"],
        "stream": True,
        "stream_options": {"include_usage": True},
        "logprobs": True,
        "return_token_ids": True,
        "n": 1,
    },
    "/v1/responses": {
        "model": "m",
        "instructions": "s",
        "input": [
            {"type": "message", **ASKED},
            {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": PART},
        ],
        "tools": [{"type": "function", **TOOL}],
        "previous_response_id": "resp_0",
        "max_output_tokens": 9,
        "stream": True,
    },
    "/v1/messages": MESSAGES,
    COUNT: MESSAGES,
    "/inference/v1/generate": {
        "token_ids": [5, 6],
        "sampling_params": {"max_tokens": 9, "stop": ["x"], "n": 1},
        "request_id": "r",
    },
    "/v1/sessions": {"group_index": 0, "index": 0, "budget": {"turns": 3, "tokens": 99, "seconds": 60.0}},
    "/v1/sessions/{id}/complete": {"reward": 0.5},
}
"""What each endpoint takes when it is right."""
LEAVES = VALUES | st.just("\ud800") | st.just(float("nan")) | st.just(10**400) | st.just(-(2**63) - 1)
HEADERS = st.fixed_dictionaries(
    {},
    optional={
        "idempotency-key": st.sampled_from(["a", "b", "é"]),
        "x-stainless-retry-count": st.sampled_from(["0", "1", "2", "-1", "x", "9" * 5000]),
        "content-type": st.sampled_from(["text/plain", "application/json; charset=utf-16"]),
    },
)


class Fuzzed(World):
    """A server with two sessions. That of somebody else has a turn; the fuzzed one is a new one now and then."""

    def begin(self) -> None:
        self.inputs = 0
        self.client = httpx.Client(base_url=self.root, timeout=30)
        self.other = self.session()
        self.said = self.post("/v1/chat/completions", {"messages": [{**ASKED, "content": SECRET}]}, self.other)
        assert SECRET in self.said.text
        self.ids = TOKENIZER.encode(SECRET)
        self.mine: dict[str, str] = {}

    def _answer(self, request: Request) -> Reply:
        prompt = TOKENIZER.decode(request.token_ids)
        text = SECRET if SECRET in prompt else f"on the {request.number}"
        return Reply(token_ids=[*TOKENIZER.encode(text), *TOKENIZER.encode("<|im_end|>")], version="0")

    def own(self) -> dict[str, str]:
        """A session with a turn, and few enough for a quick search."""
        if not self.mine or self.inputs % 16 == 0:
            self.mine = self.session()
            self.post("/v1/messages", {"messages": [ASKED], "max_tokens": 9}, self.mine)
        return self.mine

    def post(self, path: str, body: object, session: dict[str, str], **headers: str) -> httpx.Response:
        key = {"x-api-key": ADMIN if path == "/v1/sessions" else session["key"]}
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {name: value.encode() for name, value in headers.items()}
        return self.client.post(path.format(id=session["id"]), content=content, headers={**key, **headers})

    def holds(self, response: httpx.Response) -> httpx.Response:
        self.inputs += 1
        assert response.status_code < 500, response.text
        assert "Traceback" not in response.text
        assert SECRET not in response.text
        assert self.other["id"] not in response.text
        assert ",".join(map(str, self.ids)) not in response.text.replace(" ", "")
        if response.status_code >= 400:
            assert response.json()["error"]["message"]
        return response

    def is_untouched(self) -> None:
        """The other session is as it was, and the engine got its tokens once."""
        asked = [TOKENIZER.decode(request["token_ids"]) for request in self.engine.requests]
        assert sum(SECRET in text for text in asked) == 1
        found = self.call(self.other, "GET").json()
        assert (found["state"], found["turns"], found["reward"]) == ("open", 1, None)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[Fuzzed]:
    made = Fuzzed(tmp_path_factory.mktemp("sessions"), "")
    with made.engine:
        try:
            made.start()
            made.begin()
            yield made
            made.is_untouched()
            made.client.close()
            say(pytestconfig, f"{made.inputs} inputs")
        finally:
            made.kill()


@pytest.mark.parametrize("path", VALID)
@FUZZ
@given(
    body=st.binary(max_size=100) | st.dictionaries(st.sampled_from([*NAMES, "model", "stream"]), LEAVES, max_size=5),
    headers=HEADERS,
)
def test_any_body(world: Fuzzed, path: str, body: object, headers: dict[str, str]) -> None:
    world.holds(world.post(path, body, world.own(), **headers))


@pytest.mark.parametrize("path", VALID)
def test_a_valid_body_with_any_changes(world: Fuzzed, path: str) -> None:
    assert {*DIALECTS, COUNT} <= set(VALID)
    assert world.holds(world.post(path, VALID[path], world.own())).status_code == 200
    world.mine = {}

    @FUZZ
    @given(seed=st.integers(0, 2**32), values=st.lists(LEAVES, min_size=1, max_size=3), headers=HEADERS)
    def sent(seed: int, values: list[object], headers: dict[str, str]) -> None:
        session = world.own()
        done = world.holds(world.post(path, changed(VALID[path], seed=seed, values=values), session, **headers))
        if path.endswith("complete") and done.status_code == 200:
            world.mine = {}

    sent()


KEYS = st.text(alphabet=st.characters(min_codepoint=33, max_codepoint=126), max_size=60)


@FUZZ
@given(method=st.sampled_from(["GET", "DELETE", "POST"]), key=KEYS, name=KEYS)
def test_no_key_but_its_own_opens_a_session(world: Fuzzed, method: str, key: str, name: str) -> None:
    path = "/complete" if method == "POST" else ""
    for tried in (world.own()["key"], key, ""):
        headers = {"authorization": f"Bearer {tried}".strip()}
        url = f"/v1/sessions/{world.other['id']}{path}"
        response = world.client.request(method, url, headers=headers, content=b'{"reward": 1.0}')
        assert world.holds(response).status_code == 401
    url = f"/v1/sessions/{urllib.parse.quote(name, safe='')}"
    response = world.client.get(url, headers={"x-api-key": world.own()["key"]})
    assert response.status_code in (307, 401, 404, 405)  # 307: a name that is a slash
    assert world.other["id"] not in response.text
