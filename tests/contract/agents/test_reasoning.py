"""Reasoning that a parser of vLLM finds: the client has it apart from the content, and no token changes by that."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import anthropic
import openai
import pytest

from tests.helpers.agent_world import AgentWorld, agent_world
from tests.helpers.chat_tokenizers import make_chat_tokenizer
from tests.helpers.scripted_engine import Reply, Request
from vime.agents.task import AgentTask
from vime.sessions.tokenizer import HfChatTokenizer
from vime.types import Sample, SampleStatus

HERE = Path(__file__)
MADE = make_chat_tokenizer("thinking")
MADE.add_tokens(["<think>", "</think>"])
TOKENIZER = HfChatTokenizer(MADE)


def completion(number: int) -> list[int]:
    return TOKENIZER.encode(f"<think>thought {number}</think>said {number}<|im_end|>")


def answer(request: Request) -> Reply:
    return Reply(token_ids=completion(request.number))


@pytest.fixture
def world(tmp_path: Path) -> Iterator[AgentWorld]:
    with agent_world(tmp_path, answer) as made:
        MADE.save_pretrained(tmp_path)
        yield made


def chat(task: AgentTask) -> float:
    client = openai.OpenAI(base_url=task.base_url, api_key=task.api_key)
    messages: list[object] = [{"role": "user", "content": "a"}]
    for number in range(2):
        said = client.chat.completions.create(model="m", messages=messages).choices[0].message
        assert (said.content, said.reasoning_content) == (f"said {number}", f"thought {number}")
        messages += [{"role": "assistant", "content": said.content}, {"role": "user", "content": "b"}]
    return 1.0


def chat_stream(task: AgentTask) -> float:
    client = openai.OpenAI(base_url=task.base_url, api_key=task.api_key)
    messages: list[object] = [{"role": "user", "content": "a"}]
    for number in range(2):
        chunks = client.chat.completions.create(model="m", messages=messages, stream=True)
        deltas = [chunk.choices[0].delta for chunk in chunks]
        content = "".join(delta.content or "" for delta in deltas)
        thought = "".join(getattr(delta, "reasoning_content", "") for delta in deltas)
        assert (content, thought) == (f"said {number}", f"thought {number}")
        messages += [{"role": "assistant", "content": content}, {"role": "user", "content": "b"}]
    return 1.0


def responses(task: AgentTask) -> float:
    client = openai.OpenAI(base_url=task.base_url, api_key=task.api_key)
    given: list[object] = [{"role": "user", "content": "a"}]
    for number in range(2):
        made = client.responses.create(model="m", input=given)
        assert [item.type for item in made.output] == ["reasoning", "message"]
        assert (made.output_text, made.output[0].summary[0].text) == (f"said {number}", f"thought {number}")
        given += [*(item.model_dump() for item in made.output), {"role": "user", "content": "b"}]
    return 1.0


def messages(task: AgentTask) -> float:
    client = anthropic.Anthropic(base_url=task.anthropic_base_url, api_key=task.api_key)
    given: list[object] = [{"role": "user", "content": "a"}]
    for number in range(2):
        thought, text = client.messages.create(model="m", max_tokens=100, messages=given).content
        assert (thought.type, thought.thinking) == ("thinking", f"thought {number}")
        assert (text.type, text.text) == ("text", f"said {number}")
        blocks = [thought.model_dump(), text.model_dump()]
        given += [{"role": "assistant", "content": blocks}, {"role": "user", "content": "b"}]
    return 1.0


@pytest.mark.parametrize("agent", ["chat", "chat_stream", "responses", "messages"])
def test_reasoning_comes_apart_from_the_content_and_the_next_turn_goes_on_with_the_recorded_tokens(
    world: AgentWorld, agent: str
) -> None:
    args = world.args("--agent-function", f"{HERE}:{agent}", "--agent-reasoning-parser", "deepseek_r1")
    rows = world.generate(args, Sample(group_index=7, index=0, prompt="p", tokens=[1]))
    assert [(row.status, row.reward, row.metadata.get("session_reason")) for row in rows] == [
        (SampleStatus.COMPLETED, 1.0, None)
    ]
    first, second = (list(request["token_ids"]) for request in world.engine.requests)
    assert second[: len(first) + len(completion(0))] == [*first, *completion(0)]
    (row,) = rows
    trained = [token for token, mask in zip(row.tokens[row.prompt_length :], row.loss_mask, strict=True) if mask]
    assert trained == [*completion(0), *completion(1)]
