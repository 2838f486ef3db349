"""What tests/gpu/test_layouts_gpu.py does on two GPUs, on two processes: its code works before there is a GPU.

By night: `test_megatron_layouts.py` and `test_fsdp_engine.py` make the same claims of more layouts by day.
"""

from __future__ import annotations

import pytest

from tests.helpers.megatron_worker import Answers
from tests.helpers.two_ranks import BY_LAUNCH, GLOO, SAME_DEVICE, assert_two_train_like_one, trained_by_two_and_by_one

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def answers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Answers, Answers]:
    return trained_by_two_and_by_one(GLOO, request.param, tmp_path_factory.mktemp("layouts"))


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("answers", "layout"), BY_LAUNCH, indirect=["answers"], scope="module")
def test_two_processes_train_as_one(answers: tuple[Answers, Answers], layout: str) -> None:
    assert_two_train_like_one(*answers, layout, SAME_DEVICE)
