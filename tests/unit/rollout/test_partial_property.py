"""Whatever is cut, stored and continued, and whenever weights move: each token is there once, with its version."""

import asyncio
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.rollout_setup import make_args, write_model_directory
from vime.data.payload import bytes_to_samples, samples_to_bytes
from vime.rollout import generation
from vime.rollout.abort_scope import AbortScope, is_aborting
from vime.rollout.engine_client import NOTHING
from vime.rollout.exchanges import Completion
from vime.rollout.partial import PartialStats, is_unfinished, oldest_allowed, resume, settle_versions
from vime.types import Sample, SampleStatus, VersionSpan

PROMPT, LENGTH, MOST, EOS = [1, 9], 12, 20, 2
"""An answer is the tokens 10, 11, 12, ... by position, and EOS as its twelfth."""


def token_at(position: int) -> int:
    return EOS if position == LENGTH - 1 else 10 + position


def log_prob_at(position: int, version: int) -> float:
    return -(position + 1) / 128 - version


@dataclass
class Engine:
    """Samples the next `num_tokens` of each step of the script, then aborts; the version moves as the script says."""

    steps: list[tuple[int, int, bool]]  # tokens, versions that weights move by afterwards, whether generation halts
    halt: AbortScope = field(default_factory=AbortScope)
    version: int = 0
    sent: list[list[int]] = field(default_factory=list)

    async def generate(self, token_ids, sampling_params, *, n=1, session_id="", images=None):
        if is_aborting():
            return [NOTHING] * n
        num_tokens, moves, halts = self.steps.pop(0) if self.steps else (LENGTH, 0, False)
        start, version = len(token_ids) - len(PROMPT), self.version
        assert start + sampling_params["max_tokens"] == MOST  # what is there counts
        self.sent.append(list(token_ids))
        end = min(start + num_tokens, LENGTH, start + sampling_params["max_tokens"])
        self.version += moves
        self.halt.is_set = halts
        tokens = tuple(token_at(position) for position in range(start, end))
        return [
            Completion(
                token_ids=tokens,
                log_probs=tuple(log_prob_at(position, version) for position in range(start, end)),
                versions=[VersionSpan(version, 0, len(tokens))] if tokens else [],
                finish_reason="stop" if end == LENGTH else "abort",
            )
        ]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_model_directory(tmp_path_factory.mktemp("model"), positions=64)


async def attempt(args, engine, samples):
    engine.halt = AbortScope()
    engine.halt.activate()
    todo = [sample for sample in samples if sample.status in (SampleStatus.PENDING, SampleStatus.ABORTED)]
    if todo:
        await generation.generate_group(args, todo, {"max_tokens": MOST, "temperature": 1.0})


STEPS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2), st.booleans()), max_size=12)


@settings(max_examples=100, deadline=None)
@given(steps=STEPS, policy=st.sampled_from(["correct", "mask"]), staleness=st.integers(0, 3))
def test_each_token_is_there_once_with_the_version_and_log_probability_of_who_sampled_it(
    model_dir, steps, policy, staleness
):
    args = make_args(
        "--hf-checkpoint",
        model_dir,
        "--partial-rollout",
        "--max-staleness",
        staleness,
        "--mixed-version-policy",
        policy,
    )
    engine, stats, original = Engine(list(steps)), PartialStats(), generation.engine_client
    generation.engine_client = lambda _: engine
    fresh = [Sample(group_index=3, index=6, prompt="p", tokens=list(PROMPT))]
    try:
        samples = [Sample.from_dict(sample.to_dict()) for sample in fresh]
        asyncio.run(attempt(args, engine, samples))
        while any(sample.status is SampleStatus.ABORTED for sample in samples):
            assert is_unfinished(samples)
            kept = bytes_to_samples(samples_to_bytes(samples))
            copies = [Sample.from_dict(sample.to_dict()) for sample in fresh]
            samples = resume(args, kept, copies, stats, oldest=oldest_allowed(args, engine.version))
            asyncio.run(attempt(args, engine, samples))
    finally:
        generation.engine_client = original
    [sample] = samples
    oldest = oldest_allowed(args, engine.version)
    versions = [span.version for span in sample.token_policy_versions for _ in range(span.start, span.end)]
    assert sample.tokens == PROMPT + [token_at(position) for position in range(LENGTH)]
    assert sample.rollout_log_probs == [log_prob_at(position, version) for position, version in enumerate(versions)]
    assert versions == sorted(versions)
    assert sample.status is SampleStatus.COMPLETED
    before = [1] * LENGTH
    assert sample.loss_mask == before
    settle_versions(args, samples, stats, oldest=oldest)
    newest = max(max(versions), oldest)
    assert sample.loss_mask == ([int(version == newest) for version in versions] if policy == "mask" else before)
    assert stats.masked_tokens == LENGTH - sum(sample.loss_mask)
    # every request went on exactly where the answer stood: no token was asked for that was kept
    assert all(sent[: len(PROMPT)] == PROMPT for sent in engine.sent)
    assert all(sent[len(PROMPT) :] == [token_at(at) for at in range(len(sent) - len(PROMPT))] for sent in engine.sent)
