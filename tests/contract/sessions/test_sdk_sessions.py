"""The SDKs of OpenAI and Anthropic, unmodified, against a server of sessions before a scripted engine."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import http.server
import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import anthropic
import httpx
import openai
import pytest

from tests.helpers.chat_tokenizers import make_chat_tokenizer
from tests.helpers.scripted_engine import Reply, Request, ScriptedEngine
from tests.helpers.session_server import ADMIN, session_server
from vime.sessions.service import member_samples
from vime.sessions.store import SessionStore
from vime.sessions.tokenizer import HfChatTokenizer
from vime.types import Sample, SampleStatus
from vime.utils.network import free_port

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
        self._stack = contextlib.ExitStack()

    def _answer(self, request: Request) -> Reply:
        prompt = TOKENIZER.decode(request.token_ids)
        asks_for_call = "Tools:" in prompt and "result 3" not in prompt
        text = CALL if asks_for_call else f"on the {request.number}"
        ids = [number for character in text for number in TOKENIZER.encode(character)]  # not the tokenizer's own way
        return Reply(token_ids=[*ids, *TOKENIZER.encode("<|im_end|>")], version=str(request.number))

    def start(self) -> None:
        engine = f"http://127.0.0.1:{self.engine.port}"
        self._stack.enter_context(session_server(self.port, self.directory, engine, "chatml", self.tools))

    def kill(self) -> None:
        """SIGKILL."""
        self._stack.close()

    @property
    def root(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def session(self, **budget: object) -> dict[str, str]:
        body = {"group_index": 0, "index": 0, "budget": budget}
        answer = httpx.post(f"{self.root}/v1/sessions", json=body, headers={"x-api-key": ADMIN}, timeout=30)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def call(self, session: dict[str, str], method: str, path: str = "", body: object = None) -> httpx.Response:
        url, key = f"{self.root}/v1/sessions/{session['id']}{path}", {"Authorization": f"Bearer {session['key']}"}
        return httpx.request(method, url, json=body, headers=key, timeout=30)

    def rows(self) -> list[Sample]:
        """Return the samples of group 0, from the file alone; the server is gone."""

        async def read() -> list[Sample]:
            store = SessionStore(self.directory / "sessions.sqlite")
            sessions = await store.load()
            await store.close()
            return [sample for session, entries in sessions for sample in member_samples(session, entries)]

        return asyncio.run(read())

    def prompts_extend(self) -> bool:
        """Whether each prompt at the engine begins with the one before it and the completion that it got."""
        asked = [list(request["token_ids"]) for request in self.engine.requests]
        said = [list(self._answer(_request(ids, number)).token_ids) for number, ids in enumerate(asked)]
        return all(
            later[: len(prompt) + len(ids)] == prompt + ids
            for prompt, ids, later in zip(asked[:-1], said[:-1], asked[1:], strict=True)
        )


class LossyProxy:
    """Passes requests on; the answers whose numbers are in `lost` (from 0) are read whole and then thrown away, after
    `before_loss` was called."""

    def __init__(self, port: int, lost: set[int], before_loss: Callable[[], None] = lambda: None) -> None:
        self.count = 0
        proxy = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                content = self.rfile.read(int(self.headers["Content-Length"]))
                upstream = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
                upstream.request("POST", self.path, content, dict(self.headers))
                answer = upstream.getresponse()
                body = answer.read()
                number, proxy.count = proxy.count, proxy.count + 1
                self.close_connection = True
                if number in lost:
                    before_loss()
                    return
                self.send_response(answer.status)
                self.send_header("Content-Type", answer.headers["Content-Type"])
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> LossyProxy:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(30)

    def before(self, session: dict[str, str]) -> dict[str, str]:
        """Return the session with its addresses at the proxy."""
        root = f"http://127.0.0.1:{self.port}"
        return {**session, "base_url": f"{root}/v1", "anthropic_base_url": root}


def _request(ids: list[int], number: int) -> Request:
    return Request(token_ids=tuple(ids), sampling_params={}, session_id="", number=number, sample=0)


@pytest.fixture
def world(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[World]:
    made = World(tmp_path, getattr(request, "param", ""))
    with made.engine:
        try:
            made.start()
            yield made
        finally:
            made.kill()


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


DIALECTS = pytest.mark.parametrize(
    ("connect", "say"),
    [(_openai, _chat), (_openai, _responses), (_anthropic, _messages)],
    ids=["chat", "responses", "messages"],
)
STREAM = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


@STREAM
@DIALECTS
def test_three_turns_are_one_row_token_for_token(
    world: World, connect: Callable[..., object], say: Callable[..., str], stream: bool
) -> None:
    session = world.session()
    client = connect(session)
    messages: list[dict[str, object]] = []
    for turn in range(3):
        messages.append({"role": "user", "content": f"question {turn}"})
        answer = say(client, messages, stream=stream)
        assert answer == f"on the {turn}"
        messages.append({"role": "assistant", "content": answer})
    assert len(world.engine.requests) == 3
    assert world.prompts_extend()
    assert world.call(session, "POST", "/complete", {"reward": 0.5}).status_code == 200
    world.kill()
    (row,) = world.rows()
    last = world.engine.requests[-1]["token_ids"]
    assert row.tokens[: len(last)] == last
    # "on the 0<end>" is 9 tokens, three times; versions are the engine's numbers 0, 1 and 2.
    assert sum(row.loss_mask) == 27
    assert row.weight_versions == [0, 1, 2]
    assert (row.reward, row.status) == (0.5, SampleStatus.COMPLETED)


@STREAM
@DIALECTS
def test_a_lost_answer_is_sampled_once_and_comes_back_also_after_a_kill(
    world: World, connect: Callable[..., object], say: Callable[..., str], stream: bool
) -> None:
    session = world.session()

    def kill_and_start() -> None:
        world.kill()
        world.start()

    with LossyProxy(world.port, {0, 2}, kill_and_start) as proxy:
        client = connect(proxy.before(session))
        messages: list[dict[str, object]] = [{"role": "user", "content": "q"}]
        answer = say(client, messages, stream=stream)
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "r"}]
        # Answers 0 and 2 are lost, 1 and 3 are the same turns again.
        assert (answer, say(client, messages, stream=stream), proxy.count) == ("on the 0", "on the 1", 4)
    assert len(world.engine.requests) == 2
    assert world.prompts_extend()


def test_two_equal_first_requests_are_two_completions_and_each_retry_gets_its_own(world: World) -> None:
    session = world.session()
    messages: list[dict[str, object]] = [{"role": "user", "content": "q"}]
    with LossyProxy(world.port, {1}) as proxy:
        client = _openai(proxy.before(session))
        answers = [_chat(client, messages, stream=False) for _ in range(2)]
    assert answers == ["on the 0", "on the 1"]
    assert len(world.engine.requests) == 2


LONG = 60_000
"""Tokens of an answer of 6 MB with its log-probabilities: more than a system takes (4 MB, tcp_wmem)."""


def _body(text: str) -> bytes:
    asked = {"model": "m", "messages": [{"role": "user", "content": text}], "logprobs": True}
    return json.dumps(asked).encode()


def plain(session: dict[str, str], text: str) -> str:
    """Ask as a client without any header about retries does."""
    key = {"Authorization": f"Bearer {session['key']}"}
    answer = httpx.post(f"{session['base_url']}/chat/completions", content=_body(text), headers=key, timeout=60)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def leave(port: int, session: dict[str, str], text: str, after: Callable[[socket.socket], object]) -> None:
    """Ask the same as `plain` and go away after `after`."""
    body = _body(text)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: m\r\nAuthorization: Bearer {session['key']}\r\n"
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(60)
        client.connect(("127.0.0.1", port))
        client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        after(client)


def test_an_answer_whose_client_went_away_is_that_of_the_next_equal_request_without_any_header(world: World) -> None:
    """Three clients go away: two while the engine samples, one in the middle of an answer that no buffer holds whole.
    Each repeats, and has the turn; what is asked once more after that is a new completion."""
    session = world.session()
    is_asked, may_answer = threading.Event(), threading.Event()
    script = world._answer

    def held(request: Request) -> Reply:
        if request.number in (0, 2):
            is_asked.set()
            assert may_answer.wait(60)
        is_long = request.number == 4
        return Reply(token_ids=TOKENIZER.encode("x") * LONG, version="0") if is_long else script(request)

    world.engine._script = held

    def gone_while_it_is_sampled(text: str) -> None:
        is_asked.clear()
        may_answer.clear()
        leave(world.port, session, text, lambda _: is_asked.wait(60))

    gone_while_it_is_sampled("a")
    with ThreadPoolExecutor(1) as threads:
        repeated = threads.submit(plain, session, "a")  # comes while the turn is under way
        may_answer.set()
        assert repeated.result(60) == "on the 0"
    assert plain(session, "a") == "on the 1"

    gone_while_it_is_sampled("b")
    may_answer.set()
    while world.call(session, "GET").json()["turns"] < 3:
        pass
    world.kill()
    world.start()  # it is in the record that the answer was lost
    assert [plain(session, "b") for _ in range(2)] == ["on the 2", "on the 3"]

    leave(world.port, session, "d", lambda client: client.recv(1))
    assert len(plain(session, "d")) == LONG
    assert len(world.engine.requests) == 5
    assert [plain(session, "c") for _ in range(2)] == ["on the 5", "on the 6"]


def test_an_idempotency_key_names_one_turn(world: World) -> None:
    client = _openai(world.session())
    ask = {"model": "m", "messages": [{"role": "user", "content": "q"}], "extra_headers": {"Idempotency-Key": "k"}}
    first, again = (client.chat.completions.create(**ask) for _ in range(2))
    assert first == again
    assert len(world.engine.requests) == 1
    with pytest.raises(openai.UnprocessableEntityError):
        client.chat.completions.create(**{**ask, "messages": [{"role": "user", "content": "other"}]})


def test_tokens_in_and_out_have_both_shapes(world: World) -> None:
    session = world.session()
    prompt = TOKENIZER.encode("<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n")
    key = {"x-api-key": session["key"]}
    body = {"token_ids": prompt, "sampling_params": {"max_tokens": 50, "logprobs": 1}}
    (choice,) = httpx.post(f"{world.root}/inference/v1/generate", json=body, headers=key).json()["choices"]
    ids = choice["token_ids"]
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == [f"token_id:{token}" for token in ids]
    assert [entry["token_id"] for entry in choice["logprobs"]["content"]] == ids
    assert choice["weight_versions"] == [{"version": "0", "start": 0, "end": len(ids)}]


def test_a_budget_of_turns_ends_the_session_with_its_reason(world: World) -> None:
    session = world.session(turns=1)
    client = _openai(session)
    _chat(client, [{"role": "user", "content": "q"}], stream=False)
    with pytest.raises(openai.PermissionDeniedError, match="budget of 1 turns"):
        _chat(client, [{"role": "user", "content": "r"}], stream=False)
    assert world.call(session, "POST", "/complete", {"reward": 1}).json()["stopped"] == "budget of 1 turns"
    world.kill()
    (row,) = world.rows()
    assert (row.status, row.reward) == (SampleStatus.TRUNCATED, 1.0)


@pytest.mark.parametrize("reward", [1e39, -1e39])
def test_a_reward_that_no_trainer_can_hold_is_refused_and_may_be_said_again(world: World, reward: float) -> None:
    session = world.session()
    _chat(_openai(session), [{"role": "user", "content": "q"}], stream=False)
    refused = world.call(session, "POST", "/complete", {"reward": reward})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "reward")
    assert "at most 3.4e+38" in refused.json()["error"]["message"]
    assert world.call(session, "POST", "/complete", {"reward": 1}).json()["reward"] == 1.0


def test_a_failed_session_is_failed_and_has_no_reward(world: World) -> None:
    session = world.session()
    _chat(_openai(session), [{"role": "user", "content": "q"}], stream=False)
    assert world.call(session, "POST", "/complete", {"failed": "the container died"}).status_code == 200
    assert world.call(session, "POST", "/complete", {"reward": 1}).status_code == 403
    world.kill()
    (row,) = world.rows()
    assert (row.status, row.reward, row.tokens) == (SampleStatus.FAILED, None, [])


def test_a_key_opens_its_own_session_only(world: World) -> None:
    session, other = world.session(), world.session()
    assert world.call({**other, "key": session["key"]}, "GET").status_code == 401
    assert world.call({**other, "key": session["key"]}, "DELETE").status_code == 401
    with pytest.raises(anthropic.AuthenticationError):
        _messages(_anthropic({**session, "key": "guess"}), [{"role": "user", "content": "q"}], stream=False)
    made = httpx.post(f"{world.root}/v1/sessions", json={"group_index": 0, "index": 0}, headers={"x-api-key": "guess"})
    assert made.status_code == 401
    assert world.call(session, "DELETE").status_code == 200
    assert world.call(session, "GET").status_code == 401


def test_counting_tokens_records_nothing(world: World) -> None:
    session = world.session()
    messages = [{"role": "user", "content": "q"}]
    counted = _anthropic(session).messages.count_tokens(model="m", messages=messages)
    text = TOKENIZER.render([{"role": "user", "content": "q"}], None, asks=True)
    assert counted.input_tokens == len(TOKENIZER.encode(text))
    assert world.call(session, "GET").json()["turns"] == 0


@STREAM
@pytest.mark.parametrize("world", ["hermes"], indirect=True)
def test_a_call_that_vllm_parsed_is_continued_token_for_token_in_three_dialects(world: World, stream: bool) -> None:
    """Each SDK gets the call, sends its result, and the second prompt extends the first turn."""
    asked = {"role": "user", "content": "q"}
    for connect in (_call_chat, _call_responses, _call_messages):
        world.engine.requests.clear()
        assert connect(world.session(), asked, stream) == "on the 1"
        assert world.prompts_extend()


def _call_chat(session: dict[str, str], asked: dict[str, object], stream: bool) -> str:
    client, tools = _openai(session), [{"type": "function", "function": TOOL}]
    ask = {"model": "m", "messages": [asked], "tools": tools}
    if stream:
        with client.chat.completions.stream(**ask) as events:
            choice = events.get_final_completion().choices[0]
    else:
        choice = client.chat.completions.create(**ask).choices[0]
    (call,) = choice.message.tool_calls
    assert (choice.finish_reason, call.function.name) == ("tool_calls", "add")
    assert json.loads(call.function.arguments) == {"a": 1}
    said = {"role": "assistant", "content": choice.message.content}
    said["tool_calls"] = [{"id": call.id, "type": "function", "function": call.function.model_dump(include=FUNCTION)}]
    result = {"role": "tool", "tool_call_id": call.id, "content": "result 3"}
    again = client.chat.completions.create(**{**ask, "messages": [asked, said, result]})
    return str(again.choices[0].message.content)


FUNCTION = {"name", "arguments"}


def _call_responses(session: dict[str, str], asked: dict[str, object], stream: bool) -> str:
    client, ask = _openai(session), {"model": "m", "tools": [{"type": "function", **TOOL}]}
    if stream:
        with client.responses.stream(input=[asked], **ask) as events:
            answer = events.get_final_response()
    else:
        answer = client.responses.create(input=[asked], **ask)
    (call,) = answer.output
    assert (call.name, json.loads(call.arguments)) == ("add", {"a": 1})
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "result 3"}
    return str(client.responses.create(input=[result], previous_response_id=answer.id, **ask).output_text)


def _call_messages(session: dict[str, str], asked: dict[str, object], stream: bool) -> str:
    tool = {"name": "add", "description": "adds", "input_schema": TOOL["parameters"]}
    client, ask = _anthropic(session), {"model": "m", "max_tokens": 200, "tools": [tool]}
    if stream:
        with client.messages.stream(messages=[asked], **ask) as events:
            answer = events.get_final_message()
    else:
        answer = client.messages.create(messages=[asked], **ask)
    (use,) = [block for block in answer.content if block.type == "tool_use"]
    assert (answer.stop_reason, use.name, use.input) == ("tool_use", "add", {"a": 1})
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "result 3"}
    said = {"role": "assistant", "content": [block.model_dump() for block in answer.content]}
    again = client.messages.create(messages=[asked, said, {"role": "user", "content": [result]}], **ask)
    return str(again.content[0].text)


@pytest.mark.parametrize("world", ["hermes"], indirect=True)
def test_a_thread_of_anthropic_goes_on_with_what_the_server_has(world: World) -> None:
    """Its runner of tools sends the result alone, without the conversation and without the tools: the first prompt and
    completion are the beginning of the second prompt all the same."""
    called = []

    @anthropic.beta_tool
    def add(a: int) -> str:
        """Adds."""
        called.append(a)
        return "result 3"

    ask = {"model": "m", "max_tokens": 200, "messages": [{"role": "user", "content": "q"}], "max_iterations": 3}
    said = _anthropic(world.session()).beta.messages.tool_runner(tools=[add], **ask).until_done()
    assert (called, said.content[0].text) == ([1], "on the 1")
    assert len(world.engine.requests) == 2
    assert world.prompts_extend()


def test_a_thread_that_is_not_there_is_refused_so_that_the_sdk_sends_all_of_it(world: World) -> None:
    client = _anthropic(world.session())
    messages = [{"role": "user", "content": "q"}]
    for unknown in ("msg_7", "msg_of_another_server"):
        thread = {"type": "continue", "previous_message_id": unknown}
        with pytest.raises(anthropic.NotFoundError) as refused:
            client.beta.messages.create(model="m", max_tokens=9, messages=messages, thread=thread)
        assert refused.value.body["error"]["details"] == {"error_code": "thread_not_found"}
    assert world.engine.requests == []


@pytest.mark.parametrize("field", ["conversation", "prompt"])
def test_a_conversation_that_is_kept_elsewhere_is_refused_and_not_left_out(world: World, field: str) -> None:
    with pytest.raises(openai.BadRequestError, match=field):
        _openai(world.session()).responses.create(model="m", input="q", extra_body={field: {"id": "x"}})
    with pytest.raises(openai.NotFoundError):
        _openai(world.session()).responses.create(model="m", input="q", previous_response_id="resp_elsewhere")
    assert world.engine.requests == []
