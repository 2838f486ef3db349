"""The math reward with its real worker process."""

import asyncio

import pytest

from tests.helpers.rollout_setup import make_args
from vime.rollout import rm_hub, rm_math
from vime.rollout.rm_hub import async_rm, batched_async_rm, close_rewards
from vime.rollout.rm_math import MathJudge
from vime.types import RewardError, Sample, SampleStatus

CASES = [
    ("\\boxed{\\frac{1}{2}}", "0.5", 1.0),
    ("the sum is \\boxed{1+x^2}", "x^2+1", 1.0),
    ("<think>\\boxed{3}</think>\\boxed{4}", "4", 1.0),
    ("\\boxed{4}", "5", 0.0),
    ("no idea", "5", 0.0),
    ("\\boxed{9^{9^{9^{9^{9}}}}}", "5", 0.0),
    ("$\\boxed{\\$18.90}$", "\\$18.90", 1.0),
    ("\\boxed{18.90}", "\\$18.90", 1.0),
    ("\\boxed{18}", "\\$18.90", 0.0),
    ("\\boxed{5}", "$5$", 1.0),
    ("put the answer in \\boxed{answer}. \\boxed{8}", "8", 1.0),
    ("\\boxed{7}, \\boxed{8}", "7", 0.0),  # the last box counts
    ("\\boxed{7} and \\boxed{8}", "7,8", 1.0),  # or both, where there are two answers
]


@pytest.fixture
async def _ends_judges():
    yield
    await close_rewards()


@pytest.mark.usefixtures("_ends_judges")
async def test_equal_expressions_are_found_and_hopeless_ones_survived():
    args = make_args("--rm-type", "math", "--rm-timeout-secs", 30)
    samples = [Sample(response=response, label=label, status=SampleStatus.COMPLETED) for response, label, _ in CASES]
    first = await async_rm(args, samples[0])  # alone, so that the others find one warm worker
    assert [first, *await batched_async_rm(args, samples[1:])] == [expected for *_, expected in CASES]


@pytest.mark.usefixtures("_ends_judges")
@pytest.mark.parametrize("label", ["$", "\\boxed{}"])
async def test_a_label_without_an_expression_is_named_and_the_worker_kept(label):
    """Every completion scored 0, and no message said why."""
    args = make_args("--rm-type", "math", "--rm-timeout-secs", 30)
    with pytest.raises(RewardError, match=r"math-verify finds no expression in the label .*--label-key"):
        await async_rm(args, Sample(response="\\boxed{4}", label=label, status=SampleStatus.COMPLETED))
    judge = rm_hub._JUDGES[asyncio.get_running_loop()]
    assert any(worker is not None and worker.returncode is None for worker in judge._idle._queue)


async def test_waiting_for_a_worker_has_a_deadline_of_its_own(monkeypatch):
    """Two turns: one for the question that holds the only worker, and one for the question before this one."""
    monkeypatch.setattr(rm_math, "START_SECONDS", 0.1)
    judge = MathJudge(num_workers=1)
    judge._idle.get_nowait()  # the only worker is taken and never comes back
    first = asyncio.create_task(judge.score("4", "4", timeout_s=0.1))
    second = asyncio.create_task(judge.score("4", "4", timeout_s=0.1))
    said = [str(error) for error in await asyncio.gather(first, second, return_exceptions=True)]
    assert said[0].startswith("waited 0.2 s for one of 1 math reward workers to be free")
    assert said[1].startswith("waited 0.4 s for one of 1 math reward workers to be free")


async def test_a_judge_that_is_late_is_replaced_and_the_answer_counts_as_wrong():
    judge = MathJudge(num_workers=1)
    try:
        assert await judge.score("4", "\\boxed{4}", timeout_s=30) == 1.0
        assert await judge.score("4", "\\boxed{4}", timeout_s=0) == 0.0
        assert await judge.score("5", "\\boxed{5}", timeout_s=30) == 1.0
    finally:
        await judge.close()
