"""The math reward with its real worker process."""

import pytest

from tests.helpers.rollout_setup import make_args
from vime.rollout.rm_hub import async_rm, batched_async_rm, close_judges
from vime.rollout.rm_math import MathJudge
from vime.types import Sample, SampleStatus

CASES = [
    ("\\boxed{\\frac{1}{2}}", "0.5", 1.0),
    ("the sum is \\boxed{1+x^2}", "x^2+1", 1.0),
    ("<think>\\boxed{3}</think>\\boxed{4}", "4", 1.0),
    ("\\boxed{4}", "5", 0.0),
    ("no idea", "5", 0.0),
    ("\\boxed{9^{9^{9^{9^{9}}}}}", "5", 0.0),
]


@pytest.fixture
async def _ends_judges():
    yield
    await close_judges()


@pytest.mark.usefixtures("_ends_judges")
async def test_equal_expressions_are_found_and_hopeless_ones_survived():
    args = make_args("--rm-type", "math", "--rm-timeout-secs", 30)
    samples = [Sample(response=response, label=label, status=SampleStatus.COMPLETED) for response, label, _ in CASES]
    first = await async_rm(args, samples[0])  # alone, so that the others find one warm worker
    assert [first, *await batched_async_rm(args, samples[1:])] == [expected for *_, expected in CASES]


async def test_a_judge_that_is_late_is_replaced_and_the_answer_counts_as_wrong():
    judge = MathJudge(num_workers=1)
    try:
        assert await judge.score("4", "\\boxed{4}", timeout_s=30) == 1.0
        assert await judge.score("4", "\\boxed{4}", timeout_s=0) == 0.0
        assert await judge.score("5", "\\boxed{5}", timeout_s=30) == 1.0
    finally:
        await judge.close()
