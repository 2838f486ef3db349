import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vime.algo.advantages import (
    discounted_returns,
    distillation_advantages,
    group_advantages,
    group_signal,
    leave_one_out_advantages,
    penalised_advantages,
    whiten,
)
from vime.types import RewardError

GROUP_ESTIMATORS = ("grpo", "gspo", "cispo", "rloo", "reinforce_plus_plus_baseline")
"""Their advantage compares the samples of one group: a group of one teaches nothing."""


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


def test_leave_one_out_compares_with_the_mean_of_the_others():
    # 1 - (0+0+1)/3 = 2/3; 0 - (1+0+1)/3 = -2/3
    advantage_N = leave_one_out_advantages(torch.tensor([1.0, 0.0, 0.0, 1.0]))
    torch.testing.assert_close(advantage_N, torch.tensor([2 / 3, -2 / 3, -2 / 3, 2 / 3]))


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=9))
def test_leave_one_out_is_each_reward_minus_the_others_mean(rewards):
    advantages = leave_one_out_advantages(torch.tensor(rewards, dtype=torch.float64)).tolist()
    for index, advantage in enumerate(advantages):
        others = rewards[:index] + rewards[index + 1 :]
        assert advantage == pytest.approx(rewards[index] - sum(others) / len(others), abs=1e-9)


@pytest.mark.parametrize("estimator", GROUP_ESTIMATORS)
def test_groups_of_four_three_and_four_get_exactly_zero_where_all_are_equal(estimator):
    for group in ([1.0, 0.0, 0.0, 1.0], [0.1, 0.1, 0.1], [1.0, 0.0, 0.0, 0.0]):
        signal = group_signal(torch.tensor(group), estimator=estimator, divide_by_std=True).tolist()
        assert sum(signal) == pytest.approx(0, abs=1e-6)
        assert (signal == [0.0, 0.0, 0.0]) == (len(group) == 3)


def test_each_estimator_makes_its_own_signal_of_one_right_among_four():
    # mean 1/4, deviation 3/4, std 1/2; RLOO 1 - 0; REINFORCE++ leaves rewards, its baseline takes the mean off
    found = {
        name: group_signal(torch.tensor([1.0, 0, 0, 0]), estimator=name, divide_by_std=True)[0].item()
        for name in (*GROUP_ESTIMATORS, "reinforce_plus_plus")
    }
    expected = {"grpo": 1.5, "gspo": 1.5, "cispo": 1.5, "rloo": 1.0, "reinforce_plus_plus": 1.0}
    assert found == pytest.approx({**expected, "reinforce_plus_plus_baseline": 0.75}, abs=1e-5)


def test_the_return_of_a_token_is_its_discounted_future():
    # gamma .5, reward 1 at the last token, penalties .1 .2 .3: 1 - .3 = .7; -.2 + .35 = .15; -.1 + .075 = -.025
    returns = discounted_returns(1.0, torch.tensor([0.1, 0.2, 0.3]).double(), torch.ones(3), gamma=0.5)
    assert returns.tolist() == pytest.approx([-0.025, 0.15, 0.7])


def test_the_reward_is_paid_at_the_last_trainable_token_and_others_cost_nothing():
    # token 3 is masked: reward 1 at token 2; token 1 is masked: no penalty, but a step of discount
    penalty_R = torch.tensor([0.1, 5.0, 0.3, 7.0]).double()
    returns = discounted_returns(1.0, penalty_R, torch.tensor([1, 0, 1, 0]), gamma=0.5)
    assert returns.tolist() == pytest.approx([-0.1 + 0.25 * 0.7, 0.5 * 0.7, 0.7, 0.0])
    assert discounted_returns(1.0, penalty_R, torch.zeros(4), gamma=0.5).tolist() == [0.0] * 4


@given(st.floats(-5, 5), st.lists(st.floats(-1, 1), min_size=1, max_size=8), st.floats(0, 1))
def test_returns_follow_bellman(reward, penalties, gamma):
    returns = discounted_returns(reward, torch.tensor(penalties).double(), torch.ones(len(penalties)), gamma=gamma)
    for index, value in enumerate(returns.tolist()[:-1]):
        assert value == pytest.approx(-penalties[index] + gamma * returns[index + 1].item(), abs=1e-6)
    assert returns[-1].item() == pytest.approx(reward - penalties[-1], abs=1e-6)


def test_a_penalty_is_taken_off_the_groups_advantage():
    assert penalised_advantages(0.5, torch.tensor([0.1, 0.0]).double()).tolist() == pytest.approx([0.4, 0.5])


def test_a_teacher_that_finds_a_token_less_likely_lowers_its_advantage():
    # ln .5 - ln .25 = ln 2; equal at the second token; coefficient 2
    logp_R, teacher_R = torch.tensor([0.5, 0.5]).log(), torch.tensor([0.25, 0.5]).log()
    answer_R = distillation_advantages(torch.tensor([1.0, 1.0]), logp_R, teacher_R, coefficient=2.0)
    assert answer_R.tolist() == pytest.approx([1 - 2 * math.log(2), 1.0])


@given(st.lists(st.floats(0.05, 1), min_size=2, max_size=5), st.lists(st.floats(0.05, 1), min_size=5, max_size=5))
def test_the_mean_distillation_advantage_is_minus_the_divergence_from_the_teacher(weights, teacher_weights):
    policy = torch.tensor(weights, dtype=torch.float64)
    teacher = torch.tensor(teacher_weights[: len(weights)], dtype=torch.float64)
    policy, teacher = policy / policy.sum(), teacher / teacher.sum()
    advantage_V = distillation_advantages(torch.zeros_like(policy), policy.log(), teacher.log(), coefficient=1.0)
    divergence = (policy * (policy / teacher).log()).sum().item()
    assert (policy * advantage_V).sum().item() == pytest.approx(-divergence, abs=1e-9)


@given(st.lists(st.floats(-50, 50), min_size=2, max_size=20))
def test_whitened_values_have_mean_zero_and_variance_one(values):
    value_T = torch.tensor(values, dtype=torch.float64)
    mean, variance = value_T.mean(), value_T.var(unbiased=False)
    whitened_T = whiten(value_T, mean=mean, variance=variance)
    assert whitened_T.mean().item() == pytest.approx(0, abs=1e-5)
    if variance > 1e-3:
        assert whitened_T.var(unbiased=False).item() == pytest.approx(1, abs=1e-5)
