from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.rows import make_groups, make_row, plan_for, train_groups
from vime.handoff.codec import (
    Manifest,
    check_round,
    decode_group,
    decode_manifest,
    decode_plan,
    decode_rows,
    encode_group,
    encode_manifest,
    encode_plan,
    encode_rows,
    from_buffer,
    to_buffer,
)
from vime.types import HandoffError, TrainGroup, TrainRow, VersionSpan

EXTRA = ("teacher_log_probs",)


@given(train_groups())
def test_a_group_comes_back_equal(group):
    assert decode_group(encode_group(group, EXTRA)) == group


@given(train_groups())
def test_columns_come_back_equal_from_one_buffer(group):
    columns = encode_group(group, EXTRA)
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
    columns = encode_group(TrainGroup(group_index=3, rows=(replace(make_row(group_index=3), status="truncated"),)))
    for name in ("raw_reward", "truncated", "sample_indices"):
        del columns[name]
    [row] = decode_group(columns).rows
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
        encode_group(TrainGroup(group_index=0, rows=rows))


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
def test_plan_and_manifest_come_back_equal(num_groups, half_group, dp_size, rollout_id):
    groups = make_groups(num_groups, 2 * half_group, rollout_id=rollout_id)
    plan = plan_for(groups, rollout_id=rollout_id, dp_size=dp_size)
    check_round(plan, groups)
    assert decode_plan(encode_plan(plan)) == plan
    manifest = Manifest(
        plan=plan,
        keys=tuple(str(group.group_index) for group in groups),
        group_sizes=tuple(len(group.rows) for group in groups),
    )
    assert decode_manifest(encode_manifest(manifest)) == manifest


def test_a_manifest_names_the_groups_that_hold_a_ranks_rows():
    # two groups of two rows, dealt contiguously: rows 0 and 1 are group a, rows 2 and 3 group b
    groups = make_groups(2, 2)
    plan = plan_for(groups, dp_size=2)
    step = replace(plan.steps[0], micro_batches=(((0, 1),), ((2, 3),)))
    manifest = Manifest(plan=replace(plan, steps=(step,)), keys=("a", "b"), group_sizes=(2, 2))
    assert manifest.groups_of(0) == [("a", 0, 2)]
    assert manifest.groups_of(1) == [("b", 2, 2)]


@pytest.mark.parametrize("data", [b"", b"{", b'{"keys": []}', b"[]"])
def test_bytes_that_are_no_manifest_are_refused(data):
    with pytest.raises(HandoffError, match="manifest"):
        decode_manifest(data)


def test_a_plan_of_other_rows_than_the_rounds_is_refused():
    groups = make_groups(2, 2)
    with pytest.raises(HandoffError, match="names 4 rows, the round has 2"):
        check_round(plan_for(groups), groups[:1])


def test_rows_of_another_round_are_refused():
    groups = make_groups(2, 2, rollout_id=3)
    with pytest.raises(HandoffError, match=r"rows of rounds \[3\]"):
        check_round(plan_for(groups, rollout_id=0), groups)
