"""Advantages from a critic and the critic's loss, against numbers worked by hand and laws that must hold."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vime.algo.values import explained_variance, generalized_advantages, value_loss

NUMBERS = st.floats(-5, 5)
TOKENS = st.lists(st.tuples(NUMBERS, NUMBERS, st.booleans()), min_size=1, max_size=9)  # penalty, value, is trainable
SHARES = st.floats(0, 1)


def columns(tokens: list[tuple[float, float, bool]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    penalty_R, value_R, mask_R = torch.tensor(tokens, dtype=torch.float64).unbind(1)
    return penalty_R, value_R, mask_R


def test_advantages_and_returns_of_three_tokens_worked_by_hand() -> None:
    # rewards -.1, -.2, 1 - .3; gamma .5, lambda .5, values .4, .2, .6, after the last 0; from the end:
    # delta_2 = .7 + 0 - .6 = .1                    A_2 = .1                       R_2 = .7
    # delta_1 = -.2 + .5 * .6 - .2 = -.1            A_1 = -.1 + .25 * .1 = -.075   R_1 = .125
    # delta_0 = -.1 + .5 * .2 - .4 = -.4            A_0 = -.4 + .25 * -.075 = -.41875   R_0 = -.01875
    penalty_R, value_R = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.4, 0.2, 0.6])
    advantage_R, return_R = generalized_advantages(1.0, penalty_R, value_R, torch.ones(3), gamma=0.5, lambd=0.5)
    assert advantage_R.tolist() == pytest.approx([-0.41875, -0.075, 0.1])
    assert return_R.tolist() == pytest.approx([-0.01875, 0.125, 0.7])
    assert advantage_R.dtype == return_R.dtype == torch.float64


def test_tool_output_is_stepped_over_without_discount() -> None:
    # token 1 is the tool's, the last token too: reward 1 at token 2. gamma .5, lambda 1, values .4 and .6:
    # A_2 = 1 - .6 = .4; delta_0 = .5 * .6 - .4 = -.1, A_0 = -.1 + .5 * .4 = .1; R_0 = .5 is one step of discount
    mask_R = torch.tensor([1, 0, 1, 0])
    penalty_R, value_R = torch.tensor([0.0, 9.0, 0.0, 9.0]), torch.tensor([0.4, 7.0, 0.6, -7.0])
    advantage_R, return_R = generalized_advantages(1.0, penalty_R, value_R, mask_R, gamma=0.5, lambd=1.0)
    assert advantage_R.tolist() == pytest.approx([0.1, 0.0, 0.4, 0.0])
    assert return_R.tolist() == pytest.approx([0.5, 0.0, 1.0, 0.0])


def test_an_answer_without_a_trainable_token_teaches_nothing() -> None:
    found = generalized_advantages(1.0, torch.ones(3), torch.ones(3), torch.zeros(3), gamma=1.0, lambd=1.0)
    assert [column_R.tolist() for column_R in found] == [[0.0] * 3] * 2


@given(NUMBERS, TOKENS)
def test_without_discounts_the_advantage_is_the_monte_carlo_return_minus_the_value(
    reward: float, tokens: list[tuple[float, float, bool]]
) -> None:
    kept = [(penalty, value, True) for penalty, value, _ in tokens]
    advantage_R, return_R = generalized_advantages(reward, *columns(kept), gamma=1.0, lambd=1.0)
    for index, (_, value, _) in enumerate(kept):
        to_come = reward - sum(penalty for penalty, _, _ in kept[index:])
        assert return_R[index].item() == pytest.approx(to_come, abs=1e-9)
        assert advantage_R[index].item() == pytest.approx(to_come - value, abs=1e-9)


@given(NUMBERS, TOKENS, SHARES)
def test_lambda_zero_is_the_error_of_one_step(
    reward: float, tokens: list[tuple[float, float, bool]], gamma: float
) -> None:
    kept = [(penalty, value, True) for penalty, value, _ in tokens]
    advantage_R, _ = generalized_advantages(reward, *columns(kept), gamma=gamma, lambd=0.0)
    for index, (penalty, value, _) in enumerate(kept):
        is_last = index == len(kept) - 1
        target = reward - penalty if is_last else -penalty + gamma * kept[index + 1][1]
        assert advantage_R[index].item() == pytest.approx(target - value, abs=1e-9)


@given(st.integers(1, 9), SHARES, SHARES)
def test_no_reward_and_no_value_is_no_advantage(length: int, gamma: float, lambd: float) -> None:
    nothing_R = torch.zeros(length)
    found = generalized_advantages(0.0, nothing_R, nothing_R, torch.ones(length), gamma=gamma, lambd=lambd)
    assert [column_R.abs().max().item() for column_R in found] == [0.0, 0.0]


@given(NUMBERS, TOKENS, SHARES, SHARES)
def test_an_answer_with_tool_output_gets_what_it_would_get_without_it(
    reward: float, tokens: list[tuple[float, float, bool]], gamma: float, lambd: float
) -> None:
    penalty_R, value_R, mask_R = columns(tokens)
    is_kept_R = mask_R > 0
    found = generalized_advantages(reward, penalty_R, value_R, mask_R, gamma=gamma, lambd=lambd)
    short = (penalty_R[is_kept_R], value_R[is_kept_R], mask_R[is_kept_R])
    expected = generalized_advantages(reward, *short, gamma=gamma, lambd=lambd)
    for column_R, expected_R in zip(found, expected, strict=True):
        assert column_R[is_kept_R].tolist() == expected_R.tolist()
        assert column_R[~is_kept_R].abs().sum().item() == 0


def test_the_value_loss_takes_the_worse_of_plain_and_bounded() -> None:
    # old value 0, clip .2, half the square of:
    # v .1, R 1: inside, .9 -> .405               v 1, R 2: bounded .2, 1.8 > 1 -> 1.62, clipped
    # v 1, R 0: bounded .2, .2 < 1 -> .5, not     v -1, R -2: bounded -.2, 1.8 > 1 -> 1.62, clipped
    value_T = torch.tensor([0.1, 1.0, 1.0, -1.0], requires_grad=True)
    target_T = torch.tensor([1.0, 2.0, 0.0, -2.0])
    loss_T, is_clipped_T = value_loss(value_T, torch.zeros(4), target_T, value_clip=0.2)
    assert loss_T.tolist() == pytest.approx([0.405, 1.62, 0.5, 1.62])
    assert is_clipped_T.tolist() == [False, True, False, True]
    loss_T.sum().backward()
    assert value_T.grad is not None
    assert value_T.grad.tolist() == pytest.approx([-0.9, 0.0, 1.0, 0.0])  # v - R, and none where the bound decided


@given(st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS), min_size=1, max_size=9), st.floats(0, 3))
def test_the_value_loss_is_never_below_the_plain_error_and_equal_to_it_without_a_bound(
    rows: list[tuple[float, float, float]], clip: float
) -> None:
    value_T, old_value_T, return_T = torch.tensor(rows, dtype=torch.float64).unbind(1)
    plain_T = 0.5 * (value_T - return_T).square()
    loss_T, is_clipped_T = value_loss(value_T, old_value_T, return_T, value_clip=clip)
    assert bool((loss_T >= plain_T).all())
    assert (loss_T > plain_T).tolist() == is_clipped_T.tolist()
    unbounded_T, was_clipped_T = value_loss(value_T, old_value_T, return_T, value_clip=math.inf)
    assert unbounded_T.tolist() == plain_T.tolist()
    assert not bool(was_clipped_T.any())


def test_explained_variance_of_two_returns_worked_by_hand() -> None:
    # returns (0, 2), values (.5, 1.5): means of R 1, R^2 2, R - V 0, its square .25; variance of R 1
    assert explained_variance(target=1, target_square=2, error=0, error_square=0.25) == 0.75
    # a constant value of 1: errors (-1, 1); and 3 too much at every token changes nothing
    assert explained_variance(target=1, target_square=2, error=0, error_square=1) == 0
    assert explained_variance(target=1, target_square=2, error=-3, error_square=9.25) == 0.75


def test_explained_variance_of_equal_returns_is_not_a_number() -> None:
    third = 1 / 3
    assert math.isnan(explained_variance(target=third, target_square=third**2, error=0, error_square=0))
    assert math.isnan(explained_variance(target=0, target_square=0, error=0.5, error_square=0.25))
