"""A row takes any sequence of numbers, and is checked once, where it was made."""

from dataclasses import replace

import numpy as np
import pytest

from tests.helpers.rows import make_row
from vime.data.rows import check_group, check_row
from vime.types import HandoffError, VersionSpan


@pytest.mark.parametrize("kind", [tuple, list, np.array, lambda values: np.array(values, dtype=np.int64)])
def test_any_sequence_of_numbers_is_held_as_an_array_of_the_columns_type(kind):
    row = replace(make_row(), tokens=kind((7, 8, 1, 2, 3)), loss_mask=kind((1, 0, 1)), rollout_log_probs=kind((0, 0, 0)))
    arrays = (row.tokens, row.loss_mask, row.rollout_log_probs)
    assert [array.dtype for array in arrays] == [np.int32, np.uint8, np.float32]
    assert [array.tolist() for array in arrays] == [[7, 8, 1, 2, 3], [1, 0, 1], [0, 0, 0]]
    assert (row.total_length, row.num_trainable) == (5, 2)


def test_log_probabilities_are_rounded_to_float32_and_rewards_are_not():
    row = make_row(log_probs=(-0.1, -0.2, -0.3), reward=0.1)
    assert row.rollout_log_probs.tolist() == [float(np.float32(value)) for value in (-0.1, -0.2, -0.3)]
    assert row.reward == 0.1


def test_rows_are_equal_when_every_number_of_them_is():
    row = replace(make_row(), extra={"x": np.array([1, 2])})
    assert row == replace(row, tokens=row.tokens.copy(), extra={"x": np.array([1, 2])})
    others = [
        replace(row, tokens=(7, 8, 1, 2, 4)),
        replace(row, rollout_log_probs=(-0.5, -0.5, -0.25)),
        replace(row, loss_mask=(1, 1, 0)),
        replace(row, reward=0.5),
        replace(row, token_policy_versions=(VersionSpan(1, 0, 3),)),
        replace(row, extra={"x": np.array([1, 3])}),
        replace(row, extra={"x": np.array([1.0, 2.0])}),
        replace(row, extra={}),
    ]
    assert [row == other for other in others] == [False] * len(others)
    assert row != "a row"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": (2**31, 8, 1, 2, 3)}, "sample 0 of group 0: tokens: a value does not fit int32"),
        ({"tokens": np.array([2**32 + 7, 8, 1, 2, 3])}, "tokens: a value does not fit int32"),
        ({"loss_mask": (1, 300, 1)}, "loss_mask: a value does not fit uint8"),
        ({"loss_mask": np.array([1, 257, 1])}, "loss_mask: a value does not fit uint8"),
        ({"loss_mask": (1, -1, 1)}, "loss_mask: a value does not fit uint8"),
        ({"rollout_log_probs": ("a", 0, 0)}, "rollout_log_probs: a value does not fit float32"),
        ({"tokens": ((1, 2), (3,))}, "tokens: a value does not fit int32"),
    ],
)
def test_a_number_that_its_type_does_not_hold_is_refused_where_the_row_is_made(change, message):
    with pytest.raises(HandoffError, match=message):
        replace(make_row(), **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss_mask": (1, 1)}, "3 response tokens, 2 mask entries"),
        ({"rollout_log_probs": (-1.0,)}, "1 log-probabilities"),
        ({"rollout_log_probs": (-1.0, float("nan"), -1.0)}, "not finite"),
        ({"reward": float("inf")}, "expected finite numbers"),
        ({"raw_reward": float("nan")}, "expected finite numbers"),
        ({"loss_mask": (1, 2, 1)}, "mask entries 0 or 1"),
        ({"tokens": (7, -1, 1, 2, 3)}, "token ids must be >= 0"),
        ({"response_length": 5}, "expected a prompt"),
        ({"tokens": (), "response_length": 0}, "expected a prompt"),
        ({"token_policy_versions": (VersionSpan(0, 0, 2),)}, "cover 2 of 3"),
        ({"token_policy_versions": (VersionSpan(0, 1, 3),)}, "do not tile"),
        ({"status": "lost"}, "status 'lost'"),
    ],
)
def test_an_illegal_row_is_refused(change, message):
    row = replace(make_row(4, group_index=9), **change)
    with pytest.raises(HandoffError, match=f"sample 4 of group 9: .*{message}"):
        check_row(row)


def test_a_row_without_a_response_is_legal():
    check_row(make_row(response=(), versions=()))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ((), "has no rows"),
        ((make_row(0), make_row(1, group_index=1)), r"samples of groups \[0, 1\]"),
        ((make_row(0), make_row(1), make_row(0)), "repeat"),
        ((make_row(-1), make_row(-1)), "repeat"),
        ((make_row(0), make_row(1), make_row(1, reward=0.5)), r"sample 1 of group 0: 2 rows with the rewards \[0.5, 1.0\]"),
        ((make_row(0), make_row(1, response=(), versions=(VersionSpan(0, 0, 3),))), "sample 1 of group 0"),
    ],
)
def test_an_illegal_group_is_refused(rows, message):
    with pytest.raises(HandoffError, match=message):
        check_group(rows)


def test_rows_of_one_index_that_follow_each_other_are_one_sample():
    check_group((make_row(0), make_row(1), make_row(1, response=(4,)), make_row(2)))


def test_the_versions_of_a_row_are_those_of_its_first_and_last_token():
    row = make_row(versions=(VersionSpan(3, 0, 1), VersionSpan(2, 1, 2), VersionSpan(5, 2, 3)))
    assert (row.version_start, row.version_end, row.oldest_version) == (3, 5, 2)
    empty = make_row(response=(), versions=())
    assert (empty.version_start, empty.version_end) == (-1, -1)
