"""A logprob mismatch is measured alike in every layout, and leaves the trainer alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import reference_policy as reference
from tests.helpers.megatron_worker import Answers, answers_of
from tests.helpers.mismatch_cases import LAYOUTS, RULES, TEMPERATURE, mismatch_cases, mixed_rows
from vime.training.evidence import COMPARED, DIFFERENCE, LARGEST, NUM_SUSPECTS

RELATIVE, ABSOLUTE = 1e-5, 1e-5


@pytest.fixture(scope="module")
def answers(models: Path, work: Path) -> Answers:
    return answers_of(mismatch_cases(models), directory=work / "launch-mismatch")


@pytest.fixture(scope="module")
def expected(models: Path) -> dict[str, list[float]]:
    """|trainer - recorded| by transformers of the tokens to compare, by sample: trainable and of version 0."""
    rows = mixed_rows()
    logps = reference.log_probs(reference.load(models / "qwen2"), rows, temperature=TEMPERATURE)
    gaps = {}
    for row, logp_R in zip(rows, logps, strict=True):
        last = {0: 0, 1: 2}.get(row.sample_index, row.response_length)
        gaps[row.sample_index] = [
            abs(float(logp_R[position]) - row.rollout_log_probs[position])
            for position in range(last)
            if row.loss_mask[position]
        ]
    return gaps


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_stops_with_the_same_numbers(answers: Answers, expected: Any, layout: str) -> None:
    every = [gap for gaps in expected.values() for gap in gaps]
    ranks = answers(f"judged-{layout}")
    for rank in ranks:
        found = rank["found"]
        assert found.num_tokens == len(every) == rank["metrics"][COMPARED]
        assert found.mean == pytest.approx(sum(every) / len(every), rel=RELATIVE)
        assert found.largest == pytest.approx(max(every), rel=RELATIVE)
        assert rank["metrics"][DIFFERENCE] == found.mean
        assert rank["metrics"][LARGEST] == found.largest
        assert bool(found.suspects) is rank["speaks"]
    worst = sorted((s for rank in ranks for s in rank["found"].suspects), key=lambda s: -s.difference)[:NUM_SUSPECTS]
    means = {index: sum(gaps) / len(gaps) for index, gaps in expected.items() if gaps}
    assert [s.row.sample_index for s in worst] == sorted(means, key=lambda index: -means[index])[:NUM_SUSPECTS]
    for suspect in worst:
        assert suspect.difference == pytest.approx(means[suspect.row.sample_index], rel=RELATIVE)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_mismatch_moves_no_weight_and_leaves_no_trace(answers: Answers, layout: str) -> None:
    for rank in answers(f"judged-{layout}"):
        for name, tensor in rank["before"].items():
            assert torch.equal(rank["stopped"][name], tensor), name
        is_moved = not all(torch.equal(rank["trained"][name], tensor) for name, tensor in rank["before"].items())
        assert is_moved is (layout != "critic-alone")
        assert rank["metrics"] == rank["never_judged_metrics"]  # the critic's too: it has not learned twice
        for name, tensor in rank["never_judged"].items():
            assert torch.equal(rank["trained"][name], tensor), name


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", RULES)
def test_log_probs_under_another_rule_equal_plain_torch(answers: Answers, models: Path, layout: str, name: str) -> None:
    rule, model = RULES[name], reference.load(models / "qwen2")
    expected = [reference.log_probs_under(model, row, rule) for row in mixed_rows()]
    for rank in answers(f"judged-{layout}"):
        for got_R, expected_R in zip(rank["under"][name], expected, strict=True):
            torch.testing.assert_close(got_R, expected_R, rtol=0, atol=ABSOLUTE)
    if name == "cut":
        assert any(torch.isneginf(expected_R).any() for expected_R in expected)
