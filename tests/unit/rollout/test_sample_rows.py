"""A sample of several rows counts once: in the group's baseline, in rewards and in metrics; numbers by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.converted import trained_rows
from tests.helpers.rollout_setup import make_args
from vime.rollout.convert import encoded_group
from vime.rollout.generation import train_sampling_params
from vime.rollout.group_worker import generate_and_rm_group
from vime.rollout.metrics import pass_metrics, row_facts, sample_metrics
from vime.rollout.sample_rows import by_sample
from vime.types import HandoffError, Sample, SampleStatus, VersionSpan


def row(index: int, reward: float | None, length: int = 2, *, group: int = 0) -> Sample:
    made = Sample(group_index=group, index=index, tokens=[1, 5], reward=reward, status=SampleStatus.COMPLETED)
    made.append_response_tokens([6] * length, [-0.5] * length, versions=[VersionSpan(0, 0, length)])
    return made


def test_rows_that_follow_each_other_with_one_index_are_one_sample() -> None:
    rows = [row(4, 1.0), row(5, 0.0), row(5, 0.0), row(5, 0.0, group=1), row(-1, 0.0), row(-1, 0.0)]
    assert [[rows.index(one) for one in of_one] for of_one in by_sample([*rows[:4]])] == [[0], [1, 1], [3]]
    assert [len(of_one) for of_one in by_sample(rows)] == [1, 2, 1, 1, 1]
    assert by_sample([]) == []


# Samples with rewards 1 and 0; the second has three rows. By rows the mean would be 1/4, by samples it is 1/2.
GROUP = (row(0, 1.0), row(1, 0.0), row(1, 0.0, 3), row(1, 0.0, 4))


@pytest.mark.parametrize(
    ("flags", "first", "second"),
    [
        (["--advantage-estimator", "grpo"], 0.7071058, -0.7071058),  # deviation sqrt(0.5), as of two samples
        (["--advantage-estimator", "gspo"], 0.7071058, -0.7071058),
        (["--advantage-estimator", "cispo"], 0.7071058, -0.7071058),
        (["--disable-grpo-std-normalization"], 0.5, -0.5),
        (["--advantage-estimator", "rloo"], 1.0, -1.0),  # 1 - 0 and 0 - 1: the mean of the OTHER samples
        (["--advantage-estimator", "reinforce_plus_plus_baseline"], 0.5, -0.5),
        (["--advantage-estimator", "reinforce_plus_plus"], 1.0, 0.0),  # no baseline
        (["--advantage-estimator", "ppo"], 1.0, 0.0),
    ],
)
def test_the_baseline_of_a_group_counts_samples_and_each_row_gets_the_number_of_its_sample(
    flags: list[str], first: float, second: float
) -> None:
    [rows] = trained_rows(make_args(*flags), [list(GROUP)], 0)
    assert [one.reward for one in rows] == pytest.approx([first, second, second, second], abs=1e-6)
    assert [one.raw_reward for one in rows] == [1.0, 0.0, 0.0, 0.0]


def test_a_sample_whose_rows_have_several_rewards_is_refused_by_name() -> None:
    with pytest.raises(
        HandoffError, match=r"sample 1 of group 0: 2 rows with the rewards \[0.0, 0.5\]; a sample has one"
    ):
        encoded_group(make_args(), [row(0, 1.0), row(1, 0.0), row(1, 0.5)])


def test_rewards_and_counts_are_of_samples_and_lengths_are_of_rows() -> None:
    args = make_args()
    found = sample_metrics(args, GROUP, "rollout")
    # rewards 1 and 0; lengths 2, 2, 3, 4
    expected = {"reward_mean": 0.5, "reward_std": 0.5, "num_samples": 2, "response_len_mean": 2.75, "num_tokens": 11}
    assert {name: found[f"rollout/{name}"] for name in expected} == expected
    assert list(encoded_group(args, GROUP).facts.completions()) == row_facts(args, GROUP)


def test_a_sample_of_several_rows_is_one_try_of_its_prompt() -> None:
    # one right of two tries: pass@1 is 1/2; by rows it would be 1/4
    assert pass_metrics(make_args(), GROUP, "eval/x") == {"eval/x/pass@1": 0.5, "eval/x/pass@2": 1.0}


PLUGIN = '''
import copy
from vime.types import Sample, SampleStatus, VersionSpan
ASKED = []

async def two_branches(args, sample, sampling_params):
    """Sample 1 has two branches, sample 0 is linear."""
    found = []
    for number in range(1 + sample.index):
        branch = copy.deepcopy(sample)
        branch.tokens = [1, 5]
        branch.append_response_tokens([6 + number], [-0.5], versions=[VersionSpan(0, 0, 1)])
        branch.status = SampleStatus.COMPLETED
        found.append(branch)
    return found

async def last_token(args, sample, **kwargs):
    ASKED.append((sample.index, sample.tokens[-1]))
    return float(sample.tokens[-1])

async def of_group(args, samples, **kwargs):
    return [await last_token(args, sample) for sample in samples]
'''


@pytest.mark.parametrize("flags", [["last_token"], ["of_group", "--group-rm"]])
async def test_the_reward_function_is_asked_once_for_a_sample_about_the_branch_that_ended_last(
    tmp_path: Path, flags: list[Any]
) -> None:
    (tmp_path / "branches.py").write_text(PLUGIN)
    path = tmp_path / "branches.py"
    args = make_args(
        "--custom-generate-function-path", f"{path}:two_branches", "--custom-rm-path", f"{path}:{flags[0]}", *flags[1:]
    )
    group = [Sample(group_index=3, index=at, tokens=[1, 5]) for at in range(2)]
    found = await generate_and_rm_group(args, group, train_sampling_params(args))
    assert [(one.index, one.tokens[-1], one.reward) for one in found] == [(0, 6, 6.0), (1, 6, 7.0), (1, 7, 7.0)]
