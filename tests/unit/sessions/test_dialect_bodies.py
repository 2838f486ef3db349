"""A body of any JSON is read or refused with status 400."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vime.sessions.dialects import DIALECTS, read_ask
from vime.sessions.service import Refused, canonical

NAMES = [
    "messages",
    "input",
    "tools",
    "tool_choice",
    "content",
    "role",
    "type",
    "text",
    "function",
    "name",
    "arguments",
    "id",
    "tool_calls",
    "tool_use_id",
    "call_id",
    "output",
    "token_ids",
    "sampling_params",
    "max_tokens",
    "stop",
    "system",
    "instructions",
    "previous_response_id",
    "n",
]
WORDS = ("user", "assistant", "tool", "text", "function", "function_call", "function_call_output", "message")
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 9),
    st.floats(),
    st.text(max_size=3),
    st.sampled_from([*WORDS, "tool_use", "tool_result", "thinking", "reasoning"]),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=5),
    max_leaves=20,
)


@settings(max_examples=1000)
@given(st.sampled_from(sorted(DIALECTS)), st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=5))
def test_any_body_is_read_or_refused(path: str, body: dict[str, object]) -> None:
    refused_as, ask = (400, "body"), None
    try:
        ask = read_ask(DIALECTS[path], body)
    except Refused as refused:
        refused_as = (refused.status, refused.code)
    assert refused_as[0] == 400 or refused_as == (404, "unknown_response")  # of a name that no answer of ours has
    for message in (ask and ask.messages) or []:
        canonical(message)


FUNCTION = {"name": "add", "parameters": {}}
BODIES: dict[str, dict[str, object]] = {
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "q"}],
        "tools": [{"type": "function", "function": FUNCTION}],
    },
    "/v1/responses": {"input": "q", "tools": [{"type": "function", **FUNCTION}]},
    "/v1/messages": {"messages": [{"role": "user", "content": "q"}], "tools": [{"name": "add", "input_schema": {}}]},
}


@pytest.mark.parametrize(
    ("path", "choice"),
    [
        ("/v1/chat/completions", "required"),
        ("/v1/chat/completions", {"type": "function", "function": {"name": "add"}}),
        ("/v1/responses", "required"),
        ("/v1/responses", {"type": "function", "name": "add"}),
        ("/v1/messages", {"type": "any"}),
        ("/v1/messages", {"type": "tool", "name": "add"}),
    ],
)
def test_a_call_that_is_demanded_is_refused_and_not_left_to_the_model_in_silence(path: str, choice: object) -> None:
    with pytest.raises(Refused, match=r"tool_choice is .*; served are auto and none\. Leave it out") as refusal:
        read_ask(DIALECTS[path], {**BODIES[path], "tool_choice": choice})
    assert (refusal.value.status, refusal.value.code) == (400, "tool_choice")


@pytest.mark.parametrize("path", BODIES)
def test_auto_offers_the_tools_and_none_does_not(path: str) -> None:
    def tools(choice: object) -> int:
        return len(read_ask(DIALECTS[path], {**BODIES[path], "tool_choice": choice}).tools)

    def named(name: str) -> object:
        return {"type": name} if path == "/v1/messages" else name

    assert [tools(choice) for choice in (None, named("auto"), named("none"))] == [1, 1, 0]
