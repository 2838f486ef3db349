"""A resumed trainer goes on as if it had never stopped."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.helpers.dist_launch import launch
from tests.helpers.megatron_cases import checkpoint_cases
from tests.helpers.megatron_worker import Answers, answers_of

BIT_EQUAL = [
    *("resume-single", "resume-tp2", "resume-dp2-distributed", "resume-bf16"),
    *("resume-cp2-overlap", "resume-moe-ep2", "resume-moe-ep2-distributed", "resume-sinks-ep2-tp2"),
    *("resume-tied-pp2-distributed", "resume-many-buckets", "resume-grouped-many-buckets", "resume-gemma-tp2"),
    # written after the round that follows had changed every weight and moment
    *("background-single", "background-bf16-tp2", "background-dp2-overlap", "background-pp2"),
]


@pytest.fixture(scope="module")
def answers(models: Path, work: Path) -> Answers:
    return answers_of(checkpoint_cases(models, work), directory=work / "launch-checkpoint")


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


@pytest.mark.parametrize(
    "case",
    [
        *("resume-tp2-as-pp2", "resume-dp2-distributed-as-tp2", "resume-vpp2-as-cp2"),
        "resume-tp2-dp2-as-pp2-dp2",  # TP2 x PP1 x DP2 on four ranks, loaded as TP1 x PP2 x DP2
    ],
)
def test_a_checkpoint_loads_in_another_layout(answers: Answers, case: str) -> None:
    for rank in answers(case):
        assert rank["loaded"] == rank["saved"]
        resumed, expected = rank["resumed"], rank["never_stopped"]
        assert resumed["metrics"] == pytest.approx(expected["metrics"], rel=1e-5, abs=1e-6)
        for name, tensor in expected["weights"].items():
            torch.testing.assert_close(resumed["weights"][name], tensor, rtol=0, atol=2e-6, msg=name)


def test_random_states_of_another_kind_of_device_are_left_as_seeded(answers: Answers) -> None:
    [rank] = answers("resume-from-cuda")
    assert rank["loaded"] == rank["saved"]
    assert rank["is_seeded"]


def test_a_rank_that_cannot_write_is_heard_on_all_ranks_and_training_goes_on(answers: Answers) -> None:
    ranks = answers("background-failure")
    for rank in ranks:
        kind, message = rank["error"]
        assert kind == "CheckpointError"
        assert "rank 1: FileNotFoundError" in message or "rank 0: FileNotFoundError" in message
        assert "the previous checkpoint is untouched" in message
    assert ranks[0]["metrics"] == ranks[1]["metrics"]


def test_a_rank_killed_while_the_bytes_are_written_costs_that_checkpoint_only(models: Path, tmp_path: Path) -> None:
    [rank, gone] = launch(
        "tests.helpers.megatron_worker:killed_while_writing",
        world_size=2,
        directory=tmp_path / "launch",
        arguments={"model": models / "qwen2", "directory": tmp_path},
        deadline_s=240,
        killed=frozenset({1}),
        preload="tests.helpers.megatron_worker:import_backends",
    )
    assert gone is None
    assert rank["may_restart"] is True, "a peer that is lost says nothing about the disk"
    assert rank["loaded"] == rank["saved"]
    assert rank["second"][0] == "CheckpointError"  # what the killed save left is not taken for a checkpoint


def test_a_disk_without_room_is_said_as_that_and_not_in_torchs_words_alone(answers: Answers) -> None:
    # torch.save raises a RuntimeError about a position in a file, which once ended as "trainer failed with"
    [rank] = answers("save-on-a-full-disk")
    kind, message = rank["error"]
    assert kind == "CheckpointError"
    assert "MiB free there" in message
    assert "Check free space and permissions; the previous checkpoint is untouched" in message


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
