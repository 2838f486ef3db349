"""What is read of an engine's JSON: the numbers that Python's own reader gives, or a refusal that shows what came."""

from __future__ import annotations

import gc
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vime.rollout.engine_client import read_completions, read_response
from vime.types import EngineError, VersionSpan


def body(*choices: dict) -> bytes:
    """With every field that vLLM 0.32 writes, also those that nobody reads."""
    usage = {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}
    return json.dumps(
        {"request_id": "r", "choices": list(choices), "prompt_logprobs": None, "usage": usage, "kv": [{"a": [1.5]}]}
    ).encode()


def choice(index: int, token_ids: list[int], log_probs: list[float]) -> dict:
    content = [
        {
            "token_id": token,
            "token": f"token_id:{token}",
            "logprob": value,
            "rank": 1,
            "bytes": None,
            "top_logprobs": [],
        }
        for token, value in zip(token_ids, log_probs, strict=True)
    ]
    return {
        "index": index,
        "token_ids": token_ids,
        "finish_reason": "stop",
        "stop_reason": None,
        "logprobs": {"content": content},
        "weight_versions": [{"version": "7", "start": 0, "end": len(token_ids)}] if token_ids else [],
        "routed_experts": None,
        "sampling_mask": None,
    }


@pytest.mark.parametrize("computed", [[1, 3, 3], [1, 3, 3, 4, 4], None])
def test_an_engine_that_computed_another_prompt_than_the_trainer_will_is_refused(computed):
    """Of images the engine makes the tokens itself; these are of four."""
    data = json.dumps({**json.loads(body(choice(0, [5], [-1.0]))), "prompt_token_ids": computed}).encode()
    with pytest.raises(
        EngineError, match=rf"computed a prompt of {len(computed or [])} tokens, expected 4 with the pl"
    ):
        read_response(data, 1, "engine", prompt=[1, 3, 3, 4])
    same = json.dumps({**json.loads(data), "prompt_token_ids": [1, 3, 3, 4]}).encode()
    assert read_response(same, 1, "engine", prompt=[1, 3, 3, 4])[0][0].token_ids == [5]


LOG_PROBS = st.floats(max_value=0.0, allow_nan=False, allow_infinity=False)


@given(st.lists(st.lists(st.tuples(st.integers(0, 2**31 - 1), LOG_PROBS), max_size=20), min_size=1, max_size=4))
@settings(max_examples=200, deadline=None)
def test_numbers_are_those_of_python_s_own_reader_bit_for_bit(samples):
    choices = [choice(at, [token for token, _ in one], [value for _, value in one]) for at, one in enumerate(samples)]
    data = body(*reversed(choices))
    expected = sorted(json.loads(data)["choices"], key=lambda each: each["index"])
    for read, known in zip(read_completions(data, len(choices), "engine"), expected, strict=True):
        assert read.token_ids == known["token_ids"]
        assert [value.hex() for value in read.log_probs] == [
            float(entry["logprob"]).hex() for entry in known["logprobs"]["content"]
        ]
        assert read.versions == ([VersionSpan(7, 0, len(read.token_ids))] if read.token_ids else [])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "Input data was truncated"),
        (b"<html>busy</html>", "JSON is malformed"),
        (b"[]", "Expected `object`, got `array`"),
        (b"{}", "missing required field `choices`"),
        (body(choice(0, [1, 2], [-1.0, -2.0]))[:-20], "Input data was truncated"),
        (body(choice(0, [1], [-1.0])).replace(b"-1.0", b"NaN"), "JSON is malformed"),
        (body(choice(0, [1], [-1.0])).replace(b"-1.0", b"null"), "Expected `float`, got `null`"),
        (b"\xff\xfe" + body(), "JSON is malformed"),
        (body(), "returned 0 samples, expected 1"),
        (body(choice(0, [1], [-1.0]), choice(1, [1], [-1.0])), "returned 2 samples, expected 1"),
    ],
)
def test_what_is_no_answer_is_refused_with_what_came(data, message):
    with pytest.raises(EngineError, match=message) as caught:
        read_completions(data, 1, "http://router/inference/v1/generate")
    assert str(caught.value).startswith("http://router/inference/v1/generate: ")


def test_reading_leaves_no_object_for_each_token_to_the_garbage_collector():
    """Full collections walk what is held: with an object a token, each answer made the next ones dearer."""
    data = body(*(choice(at, list(range(2000)), [-math.pi] * 2000) for at in range(4)))
    gc.collect()
    gc.disable()
    try:
        before = len(gc.get_objects())
        answers = read_completions(data, 4, "engine")
        made = len(gc.get_objects()) - before
    finally:
        gc.enable()
    assert len(answers) == 4
    assert made < 100
