from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.rows import make_groups, make_row, plan_for, train_groups
from vime.data.rows import TrainRow
from vime.handoff.codec import (
    check_round,
    decode_plan,
    decode_rows,
    encode_plan,
    encode_rows,
    from_buffer,
    to_buffer,
)
from vime.types import HandoffError, VersionSpan

EXTRA = ("teacher_log_probs",)


@given(train_groups())
def test_the_rows_of_a_group_come_back_equal(group):
    assert decode_rows(encode_rows(group.rows, EXTRA)) == group.rows


@given(train_groups())
def test_columns_come_back_equal_from_one_buffer(group):
    columns = encode_rows(group.rows, EXTRA)
    copied = from_buffer(*to_buffer(columns))
    assert {name: (array.dtype, array.tolist()) for name, array in copied.items()} == {
        name: (array.dtype, array.tolist()) for name, array in columns.items()
    }


def test_rows_lie_end_to_end_with_their_lengths_beside_them():
    columns = encode_rows([make_row(0, prompt=(7,), response=(1, 2)), make_row(1, prompt=(8, 9), response=(3,))])
    assert columns["tokens"].tolist() == [7, 1, 2, 8, 9, 3]
    assert columns["total_lengths"].tolist() == [3, 3]
    assert columns["response_lengths"].tolist() == [2, 1]
    assert columns["token_policy_versions"].tolist() == [0, 0, 2, 0, 0, 1]
    assert (columns["tokens"].dtype, columns["rollout_log_probs"].dtype) == (np.int32, np.float32)


def test_log_probabilities_are_rounded_to_float32_and_rewards_are_not():
    [row] = decode_rows(encode_rows([make_row(log_probs=(-0.1, -0.2, -0.3), reward=0.1)]))
    assert row.rollout_log_probs == tuple(float(np.float32(value)) for value in (-0.1, -0.2, -0.3))
    assert row.reward == 0.1


def test_absent_columns_are_filled():
    columns = encode_rows([replace(make_row(group_index=3), status="truncated")])
    for name in ("raw_reward", "truncated", "sample_indices"):
        del columns[name]
    [row] = decode_rows(columns)
    assert (row.raw_reward, row.truncated, row.sample_index) == (1.0, True, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss_mask": (1, 1)}, "3 response tokens, 2 mask entries"),
        ({"rollout_log_probs": (-1.0,)}, "1 log-probabilities"),
        ({"rollout_log_probs": (-1.0, float("nan"), -1.0)}, "not finite"),
        ({"reward": float("inf")}, "expected finite numbers"),
        ({"loss_mask": (1, 2, 1)}, "mask entries 0 or 1"),
        ({"tokens": (7, -1, 1, 2, 3)}, "token ids must be >= 0"),
        ({"response_length": 5}, "expected a prompt"),
        ({"token_policy_versions": (VersionSpan(0, 0, 2),)}, "cover 2 of 3"),
        ({"token_policy_versions": (VersionSpan(0, 1, 3),)}, "do not tile"),
        ({"status": "lost"}, "status 'lost'"),
        ({"tokens": (2**31, 8, 1, 2, 3)}, "does not fit int32"),
    ],
)
def test_an_illegal_row_is_refused(change, message):
    with pytest.raises(HandoffError, match=message):
        encode_rows([replace(make_row(), **change)])


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ((), "has no rows"),
        ((make_row(0), make_row(1, group_index=1)), "belongs to group 1"),
        ((make_row(0), make_row(1, rollout_id=4)), "of round 4"),
        ((make_row(0), make_row(0)), "repeat"),
    ],
)
def test_an_illegal_group_is_refused(rows, message):
    with pytest.raises(HandoffError, match=message):
        check_round(plan_for(make_groups(1, 2)), [TrainGroup(group_index=0, rows=rows)])


def test_a_requested_column_that_the_rollout_did_not_write_is_refused():
    with pytest.raises(HandoffError, match=r"'teacher_log_probs' was requested.*did not write"):
        encode_rows([make_row()], EXTRA)


def with_experts(row: TrainRow, width: int) -> TrainRow:
    experts = np.arange(row.total_length * width, dtype=np.int16).reshape(row.total_length, width) - 1
    return replace(row, extra={"rollout_routed_experts": experts})


def test_a_wide_column_comes_back_as_one_array_a_row():
    rows = [with_experts(make_row(0), 6), with_experts(make_row(1, response=(4, 5, 6, 7)), 6)]
    decoded = decode_rows(encode_rows(rows, ("rollout_routed_experts",)))
    for row, back in zip(rows, decoded, strict=True):
        np.testing.assert_array_equal(back.extra["rollout_routed_experts"], row.extra["rollout_routed_experts"])


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([with_experts(make_row(0), 6), with_experts(make_row(1), 4)], "expected one width"),
        ([replace(make_row(0), extra={"rollout_routed_experts": np.zeros((1, 6))})], "has 1 entries"),
    ],
)
def test_a_wide_column_that_does_not_line_up_is_refused(rows, message):
    with pytest.raises(HandoffError, match=message):
        encode_rows(rows, ("rollout_routed_experts",))


@pytest.mark.parametrize("name", ["tokens", "loss_masks", "rewards"])
def test_a_torn_payload_is_refused(name):
    columns = encode_rows([make_row()])
    columns[name] = columns[name][:-1]
    with pytest.raises(HandoffError, match=f"column {name}.*torn"):
        decode_rows(columns)


def test_a_payload_without_a_required_column_is_refused():
    columns = encode_rows([make_row()])
    del columns["loss_masks"]
    with pytest.raises(HandoffError, match=r"missing \['loss_masks'\]"):
        decode_rows(columns)


@given(
    num_groups=st.integers(1, 4), half_group=st.integers(1, 2), dp_size=st.integers(1, 2), rollout_id=st.integers(0, 9)
)
def test_a_plan_comes_back_equal(num_groups, half_group, dp_size, rollout_id):
    groups = make_groups(num_groups, 2 * half_group, rollout_id=rollout_id)
    plan = plan_for(groups, rollout_id=rollout_id, dp_size=dp_size)
    check_round(plan, groups)
    assert decode_plan(encode_plan(plan)) == plan
    assert plan.dp_size == dp_size


@pytest.mark.parametrize("data", [b"", b"{", b'{"rollout_id": 1}', b"[]"])
def test_bytes_that_are_no_plan_are_refused(data):
    with pytest.raises(HandoffError, match="plan"):
        decode_plan(data)


def test_no_rows_are_legal_also_with_a_wide_column():
    assert decode_rows(encode_rows([], ("rollout_routed_experts", *EXTRA))) == ()


def test_a_plan_of_other_rows_than_the_rounds_is_refused():
    groups = make_groups(2, 2)
    with pytest.raises(HandoffError, match="names 4 rows, the round has 2"):
        check_round(plan_for(groups), groups[:1])


def test_rows_of_another_round_are_refused():
    groups = make_groups(2, 2, rollout_id=3)
    with pytest.raises(HandoffError, match="of round 3; expected one group of round 0"):
        check_round(plan_for(groups, rollout_id=0), groups)
