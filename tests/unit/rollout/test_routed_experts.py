"""Where generation sent each token: from the engine's answers to the column that training replays."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vime.rollout.engine_client import read_completions
from vime.rollout.exchanges import Completion
from vime.rollout.routed_experts import join_routed_experts, routed_experts_column
from vime.types import HandoffError, Sample, VersionSpan

LAYERS, TOP_K, EXPERTS = 2, 2, 4


def experts(num_tokens: int, first: int = 0) -> np.ndarray:
    """Token t, layer l goes to experts t + l and t + l + 1, counted from `first`."""
    token, layer, place = np.ogrid[:num_tokens, :LAYERS, :TOP_K]
    return ((first + token + layer + place) % EXPERTS).astype(np.uint8)


@pytest.fixture
def args(tmp_path: Path) -> Any:
    shape = {"model_type": "qwen3_moe", "num_hidden_layers": LAYERS, "num_attention_heads": 1, "intermediate_size": 8}
    moe = {
        "max_position_embeddings": 64,
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "hidden_size": 8,
        "vocab_size": 9,
    }
    (tmp_path / "config.json").write_text(json.dumps(shape | moe))
    return SimpleNamespace(hf_checkpoint=str(tmp_path))


def sample(routed: Any, num_tokens: int = 5) -> Sample:
    made = Sample(tokens=[7], rollout_routed_experts=routed)
    count = num_tokens - 1
    made.append_response_tokens([8] * count, [-1.0] * count, versions=[VersionSpan(0, 0, count)])
    return made


def answer(num_tokens: int, routed: np.ndarray | None) -> Completion:
    return Completion(
        token_ids=[9] * num_tokens,
        log_probs=[-1.0] * num_tokens,
        versions=[VersionSpan(0, 0, num_tokens)],
        finish_reason="stop",
        routed_experts=routed,
    )


def test_the_engines_base64_array_is_read() -> None:
    buffer = io.BytesIO()
    np.save(buffer, experts(4))
    choice = {
        "index": 0,
        "token_ids": [5, 6],
        "logprobs": {"content": [{"logprob": -1.0}, {"logprob": -2.0}]},
        "weight_versions": [{"version": "3", "start": 0, "end": 2}],
        "finish_reason": "stop",
        "routed_experts": base64.b64encode(buffer.getvalue()).decode(),
    }

    def read_experts(**changes: object) -> Any:
        [read] = read_completions(json.dumps({"choices": [choice | changes]}).encode(), 1, "engine")
        return read.routed_experts

    read = read_experts()
    assert read is not None
    np.testing.assert_array_equal(read, experts(4))
    assert read_experts(routed_experts=None) is None


def test_of_a_continued_answer_each_token_keeps_the_experts_it_was_sampled_behind() -> None:
    # a prompt of 2 and parts of 3 and 2 tokens: the first part computed tokens 0..3, the second computed 0..5 again
    first, second = experts(4), experts(6, first=1)
    joined = join_routed_experts([answer(3, first), answer(2, second)])
    assert joined is not None
    np.testing.assert_array_equal(joined, np.concatenate([first, second[4:]]))
    aborted_at_once = answer(0, None)
    again = join_routed_experts([aborted_at_once, answer(3, first)])
    assert again is not None
    np.testing.assert_array_equal(again, first)
    assert join_routed_experts([answer(3, None)]) is None


def test_the_token_that_was_only_sampled_is_not_recorded(args: Any) -> None:
    column = routed_experts_column(args, sample(experts(4)), "sample 0")
    assert column.dtype == np.int16
    np.testing.assert_array_equal(column[:4], experts(4).reshape(4, LAYERS * TOP_K))
    np.testing.assert_array_equal(column[4:], [[-1] * 4])


def test_nested_lists_and_tokens_without_a_record_are_taken(args: Any) -> None:
    given = experts(5).astype(int)
    given[0] = -1
    column = routed_experts_column(args, sample(given.tolist()), "sample 0")
    np.testing.assert_array_equal(column[0], [-1] * 4)
    np.testing.assert_array_equal(column[1:], given[1:].reshape(4, -1))


@pytest.mark.parametrize(
    ("routed", "message"),
    [
        (None, "is None"),
        (experts(6), r"shape \(6, 2, 2\).*at most 5 tokens"),
        (experts(4)[:, :1], r"shape \(4, 1, 2\)"),
        (experts(4).astype(float), "float64"),
        (experts(4) + 4, "different experts"),
        (np.zeros((4, LAYERS, TOP_K), int), "different experts"),
        (np.full((4, LAYERS, TOP_K), [-1, 2]), "different experts"),
        (np.full((4, LAYERS, TOP_K), [1, 65538]), "different experts"),  # 2 when cut to 16 bits
        ([[[0, 1]], [[0, 1], [0, 1]]], "cannot be read"),
    ],
)
def test_what_cannot_be_replayed_is_refused(args: Any, routed: Any, message: str) -> None:
    with pytest.raises(HandoffError, match=f"sample 0: rollout_routed_experts.*{message}"):
        routed_experts_column(args, sample(routed), "sample 0")


def test_a_recorded_sample_keeps_its_experts_through_json() -> None:
    record = json.loads(json.dumps(sample(experts(4)).to_dict()))
    np.testing.assert_array_equal(Sample.from_dict(record).rollout_routed_experts, experts(4))
