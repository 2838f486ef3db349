"""Trainers of two GPUs over NCCL: however model and rows are cut, the numbers are those of one process on the CPU."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.megatron_worker import Answers
from tests.helpers.two_ranks import BY_LAUNCH, NCCL, OTHER_DEVICE, assert_two_train_like_one, trained_by_two_and_by_one

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a GPU a process: two of them"),
]


@pytest.fixture(scope="module")
def answers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Answers, Answers]:
    return trained_by_two_and_by_one(NCCL, request.param, tmp_path_factory.mktemp("layouts"))


@pytest.mark.parametrize(("answers", "layout"), BY_LAUNCH, indirect=["answers"], scope="module")
def test_two_gpus_train_as_one_process_on_the_cpu(answers: tuple[Answers, Answers], layout: str) -> None:
    assert_two_train_like_one(*answers, layout, OTHER_DEVICE)
