"""The SDKs of OpenAI and Anthropic, unmodified, against a server of sessions before a scripted engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import anthropic
import httpx
import openai
import pytest

from tests.helpers.chat_tokenizers import make_chat_tokenizer
from tests.helpers.ports import free_port
from tests.helpers.scripted_engine import Reply, Request, ScriptedEngine
from tests.helpers.session_server import ADMIN, session_server
from vime.sessions.tokenizer import HfChatTokenizer

TOKENIZER = HfChatTokenizer(make_chat_tokenizer("chatml"))
TOOL = {
    "name": "add",
    "description": "adds",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


class World:
    """A server, its engine, and sessions. The engine answers each request with another number, spelled out, or with
    a call when the prompt has tools and no result yet."""

    def __init__(self, directory: Path, tools: str) -> None:
        self.directory, self.tools, self.port = directory, tools, free_port()
        self.engine = ScriptedEngine(self._answer)
        self.gate: threading.Event | None = None

    def _answer(self, request: Request) -> Reply:
        if self.gate is not None:
            assert self.gate.wait(30)
        prompt = TOKENIZER.decode(request.token_ids)
        asks_for_call = "Tools:" in prompt and "result 3" not in prompt
        text = CALL if asks_for_call else f"number {request.number}"
        ids = [number for character in text for number in TOKENIZER.encode(character)]  # not the tokenizer's own way
        return Reply(token_ids=[*ids, *TOKENIZER.encode("<|im_end|>")], version=str(request.number))

    def serve(self) -> Iterator[None]:
        with session_server(self.port, self.directory, f"http://127.0.0.1:{self.engine.port}", "chatml", self.tools):
            yield

    @property
    def root(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def session(self, **budget: object) -> dict[str, str]:
        body = {"group_index": 0, "index": 0, "budget": budget}
        answer = httpx.post(f"{self.root}/v1/sessions", json=body, headers={"x-api-key": ADMIN}, timeout=30)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def shown(self, session: dict[str, str]) -> dict[str, object]:
        answer = httpx.get(
            f"{self.root}/v1/sessions/{session['id']}", headers={"x-api-key": session["key"]}, timeout=30
        )
        return dict(answer.json())

    def prompts_extend(self) -> bool:
        """Whether each prompt at the engine begins with the one before it and the completion that it got."""
        asked = [list(request["token_ids"]) for request in self.engine.requests]
        said = [list(self._answer(_request(ids, number)).token_ids) for number, ids in enumerate(asked)]
        return all(
            later[: len(prompt) + len(ids)] == prompt + ids
            for prompt, ids, later in zip(asked[:-1], said[:-1], asked[1:], strict=True)
        )


def _request(ids: list[int], number: int) -> Request:
    return Request(token_ids=tuple(ids), sampling_params={}, session_id="", number=number, sample=0)


@pytest.fixture
def world(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[World]:
    made = World(tmp_path, getattr(request, "param", ""))
    with made.engine:
        yield from ((made) for _ in made.serve())


def _chat(client: openai.OpenAI, messages: list[dict[str, object]], *, stream: bool) -> str:
    if not stream:
        return str(client.chat.completions.create(model="m", messages=messages).choices[0].message.content)
    chunks = client.chat.completions.create(model="m", messages=messages, stream=True)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def _responses(client: openai.OpenAI, messages: list[dict[str, object]], *, stream: bool) -> str:
    if not stream:
        return str(client.responses.create(model="m", input=messages).output_text)
    with client.responses.stream(model="m", input=messages) as events:
        return str(events.get_final_response().output_text)


def _messages(client: anthropic.Anthropic, messages: list[dict[str, object]], *, stream: bool) -> str:
    if not stream:
        return str(client.messages.create(model="m", max_tokens=100, messages=messages).content[0].text)
    with client.messages.stream(model="m", max_tokens=100, messages=messages) as events:
        return str(events.get_final_text())


def _openai(session: dict[str, str]) -> openai.OpenAI:
    return openai.OpenAI(base_url=session["base_url"], api_key=session["key"])


def _anthropic(session: dict[str, str]) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=session["anthropic_base_url"], api_key=session["key"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("connect", "say"),
    [(_openai, _chat), (_openai, _responses), (_anthropic, _messages)],
    ids=["chat", "responses", "messages"],
)
def test_three_turns_are_one_growing_record(
    world: World, connect: Callable[..., object], say: Callable[..., str], stream: bool
) -> None:
    client = connect(world.session())
    messages: list[dict[str, object]] = []
    for turn in range(3):
        messages.append({"role": "user", "content": f"question {turn}"})
        answer = say(client, messages, stream=stream)
        assert answer == f"number {turn}"
        messages.append({"role": "assistant", "content": answer})
    assert len(world.engine.requests) == 3
    assert world.prompts_extend()
