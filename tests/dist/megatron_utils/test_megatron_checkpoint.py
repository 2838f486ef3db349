"""A resumed trainer goes on as if it had never stopped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

Answers = Callable[[str], list[Any]]
BIT_EQUAL = [
    *("resume-single", "resume-tp2", "resume-dp2-distributed", "resume-bf16"),
    *("resume-cp2-overlap", "resume-moe-ep2", "resume-moe-ep2-distributed"),
]


@pytest.mark.parametrize("case", BIT_EQUAL)
def test_the_next_round_after_loading_is_bit_equal(answers: Answers, case: str) -> None:
    for rank in answers(case):
        assert rank["loaded"] == rank["saved"]
        assert rank["resumed"]["metrics"] == rank["never_stopped"]["metrics"]
        assert rank["resumed"]["hash"] == rank["never_stopped"]["hash"] != rank["saved"]


@pytest.mark.parametrize("case", ["resume-single", "resume-tp2", "resume-dp2-distributed"])
def test_random_states_and_schedule_are_restored(answers: Answers, case: str) -> None:
    for rank in answers(case):
        assert rank["resumed"]["draws"] == rank["never_stopped"]["draws"]
        # peak 1e-3, 8 steps, one of them warm-up: the fourth step has 5 of the 7 decaying steps before it
        assert rank["resumed"]["metrics"]["train/lr"] == pytest.approx(1e-3 * 5 / 7, rel=1e-9)


@pytest.mark.parametrize("case", ["resume-tp2-as-pp2", "resume-dp2-distributed-as-tp2", "resume-vpp2-as-cp2"])
def test_a_checkpoint_loads_in_another_layout(answers: Answers, case: str) -> None:
    for rank in answers(case):
        assert rank["loaded"] == rank["saved"]
        resumed, expected = rank["resumed"], rank["never_stopped"]
        assert resumed["metrics"] == pytest.approx(expected["metrics"], rel=1e-5, abs=1e-6)
        for name, tensor in expected["weights"].items():
            torch.testing.assert_close(resumed["weights"][name], tensor, rtol=0, atol=2e-6, msg=name)


def test_without_optimizer_state_the_weights_come_back_and_the_moments_do_not(answers: Answers) -> None:
    [rank] = answers("resume-without-optimizer")
    assert rank["loaded"] == rank["saved"]
    assert rank["resumed"]["hash"] != rank["never_stopped"]["hash"]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("missing-checkpoint", "--load"),
        ("checkpoint-of-another-model", "--load"),
        ("fewer-experts", "--expert-model-parallel-size 2, this run has 1"),
        ("truncated-tensors", "--load"),
        ("truncated-common", "--load"),
        ("save-below-a-file", "could not be written"),
    ],
)
def test_a_checkpoint_that_cannot_be_used_is_refused_on_every_rank(answers: Answers, case: str, words: str) -> None:
    ranks = answers(case)
    assert len(ranks) == 2
    for rank in ranks:
        kind, message = rank["error"]
        assert kind == "CheckpointError"
        assert words in message
