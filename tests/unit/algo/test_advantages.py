import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vime.algo.advantages import group_advantages
from vime.types import RewardError


def test_two_of_four_right_gives_plus_and_minus_half_over_the_unbiased_deviation():
    # mean 1/2, deviations +-1/2, variance 4 * (1/4) / 3 = 1/3
    advantage_N = group_advantages(torch.tensor([1.0, 0.0, 0.0, 1.0]), divide_by_std=True)
    expected = 0.5 / (math.sqrt(1 / 3) + 1e-6)
    torch.testing.assert_close(advantage_N, torch.tensor([expected, -expected, -expected, expected]))


def test_without_the_deviation_only_the_mean_is_taken_off():
    # mean of 3, 1, 2 is 2
    advantage_N = group_advantages(torch.tensor([3.0, 1.0, 2.0]), divide_by_std=False)
    assert advantage_N.tolist() == [1.0, -1.0, 0.0]


def test_groups_of_four_three_and_four_do_not_see_each_other():
    # normalised over the whole batch of 11 the all-equal group would get -1.090909 instead of 0
    sizes = {"mixed": [1.0, 0.0, 0.0, 1.0], "equal": [0.0, 0.0, 0.0], "one right": [1.0, 0.0, 0.0, 0.0]}
    answers = {name: group_advantages(torch.tensor(rewards), divide_by_std=True) for name, rewards in sizes.items()}
    assert answers["equal"].tolist() == [0.0, 0.0, 0.0]
    # mean 1/4, deviations 3/4 and -1/4, variance (9 + 3) / 16 / 3 = 1/4, deviation 1/2: 1.5 and -0.5
    torch.testing.assert_close(answers["one right"], torch.tensor([1.5, -0.5, -0.5, -0.5]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("value", [0.1, 1 / 3, -7.3, 1e20])
def test_an_all_equal_group_gives_exactly_zero(value):
    # the float mean of three 0.1 is not 0.1; divided by 1e-6 the residue would be visible
    assert group_advantages(torch.full((3,), value), divide_by_std=True).tolist() == [0.0, 0.0, 0.0]


def test_a_group_of_one_gives_zero():
    assert group_advantages(torch.tensor([5.0]), divide_by_std=True).tolist() == [0.0]


def test_a_reward_that_is_not_finite_is_refused():
    with pytest.raises(RewardError, match="finite"):
        group_advantages(torch.tensor([1.0, float("nan")]), divide_by_std=True)


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=9), st.booleans())
def test_advantages_sum_to_zero_and_keep_the_order_of_the_rewards(rewards, divide_by_std):
    advantage_N = group_advantages(torch.tensor(rewards, dtype=torch.float64), divide_by_std=divide_by_std)
    assert abs(advantage_N.sum().item()) < 1e-6
    for reward, advantage in zip(rewards, advantage_N.tolist(), strict=True):
        for other, other_advantage in zip(rewards, advantage_N.tolist(), strict=True):
            assert reward <= other or advantage >= other_advantage
