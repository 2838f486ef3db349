import dataclasses
import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.helpers.rows import flatten, make_groups, make_row, plan_for
from vime.data.rows import TrainRow
from vime.types import HandoffError, RoundPlan, WaitTimeoutError


def _with_teacher(row: TrainRow) -> TrainRow:
    return dataclasses.replace(row, extra={"teacher_log_probs": (-1.5,) * row.response_length})


def _round(rollout_id: int = 0, *, steps: int = 1) -> tuple[RoundPlan, list[TrainGroup]]:
    groups = [
        TrainGroup(group_index=group.group_index, rows=tuple(_with_teacher(row) for row in group.rows))
        for group in make_groups(3, 4, rollout_id=rollout_id)
    ]
    return plan_for(groups, rollout_id=rollout_id, steps=steps), groups


def _fetch_all(carrier, ticket) -> dict[int, TrainRow]:
    found: dict[int, TrainRow] = {}
    for dp_rank in range(2):
        plan, rows = carrier.fetch(ticket, dp_rank)
        assert tuple(sorted(rows)) == plan.rows_of(dp_rank)
        assert not rows.keys() & found.keys()
        found |= rows
    return found


def test_each_rank_gets_exactly_its_rows_and_every_bit_of_them(case):
    plan, groups = _round(steps=2)
    ticket = pickle.loads(pickle.dumps(case.writer.put(plan, groups)))
    assert case.reader.fetch(ticket, 0)[0] == plan
    found = _fetch_all(case.reader, ticket)
    assert [found[number] for number in range(12)] == flatten(groups)
    case.writer.clear(ticket)


def test_log_probabilities_arrive_as_the_same_float32_whatever_the_carrier(case):
    row = make_row(response=(5,), log_probs=(-0.1,))
    group = TrainGroup(
        group_index=0,
        rows=tuple(dataclasses.replace(row, sample_index=at, extra={"teacher_log_probs": (-0.3,)}) for at in range(2)),
    )
    ticket = case.writer.put(plan_for([group]), [group])
    found = _fetch_all(case.reader, ticket)
    assert {row.rollout_log_probs for row in found.values()} == {(float(np.float32(-0.1)),)}
    assert {row.extra["teacher_log_probs"] for row in found.values()} == {(float(np.float32(-0.3)),)}


def test_a_column_of_several_numbers_a_token_arrives(wide_case):
    rows = [make_row(at, response=tuple(range(2 + at))) for at in range(2)]
    experts = [np.full((row.total_length, 6), at - 1, dtype=np.int16) for at, row in enumerate(rows)]
    held = [
        dataclasses.replace(row, extra={"rollout_routed_experts": array})
        for row, array in zip(rows, experts, strict=True)
    ]
    group = TrainGroup(group_index=0, rows=tuple(held))
    ticket = wide_case.writer.put(plan_for([group]), [group])
    found = _fetch_all(wide_case.reader, ticket)
    for number, array in enumerate(experts):
        np.testing.assert_array_equal(found[number].extra["rollout_routed_experts"], array)


def test_a_round_of_empty_responses_arrives(case):
    row = make_row(response=(), versions=())
    rows = tuple(dataclasses.replace(row, sample_index=at, extra={"teacher_log_probs": ()}) for at in range(2))
    group = TrainGroup(group_index=0, rows=rows)
    ticket = case.writer.put(plan_for([group]), [group])
    assert tuple(_fetch_all(case.reader, ticket).values()) == rows


def test_a_rank_to_which_the_plan_gives_no_row_gets_none(wide_case):
    row = make_row()
    experts = np.zeros((row.total_length, 6), dtype=np.int16)
    group = TrainGroup(group_index=0, rows=(dataclasses.replace(row, extra={"rollout_routed_experts": experts}),))
    step = dataclasses.replace(plan_for([group], dp_size=1).steps[0], micro_batches=(((0,),), ((),)))
    ticket = wide_case.writer.put(RoundPlan(rollout_id=0, steps=(step,)), [group])
    assert [tuple(wide_case.reader.fetch(ticket, dp_rank)[1]) for dp_rank in range(2)] == [(0,), ()]


def test_a_round_may_be_read_again_until_it_is_cleared(case):
    ticket = case.writer.put(*_round())
    assert _fetch_all(case.reader, ticket) == _fetch_all(case.reader, ticket)


def test_a_cleared_round_cannot_be_read(case):
    ticket = case.writer.put(*_round())
    case.writer.clear(ticket)
    with pytest.raises(HandoffError, match="cleared"):
        case.reader.fetch(ticket, 0)


def test_the_ticket_of_a_cleared_round_does_not_read_the_next_one(case):
    # TransferQueue recycles row numbers over partitions, and the references of these tests are recycled too
    old = case.writer.put(*_round(0))
    case.writer.clear(old)
    case.writer.put(*_round(1))
    with pytest.raises(HandoffError, match=r"cleared|holds round 1"):
        case.reader.fetch(old, 0)


def test_a_ticket_of_a_round_that_was_never_put_is_refused(case):
    ticket = case.writer.put(*_round(0))
    changes = {"partition": "nowhere_9"} if hasattr(ticket, "partition") else {"references": (98, 99)}
    with pytest.raises(HandoffError, match="cleared"):
        case.reader.fetch(dataclasses.replace(ticket, **changes), 0)


def test_a_lost_group_is_an_error_and_never_a_shorter_round(case):
    ticket = case.writer.put(*_round())
    case.lose_one(ticket)
    with pytest.raises(HandoffError):
        _fetch_all(case.reader, ticket)


def test_a_plan_of_other_rows_is_refused_before_anything_is_stored(case):
    plan, groups = _round()
    with pytest.raises(HandoffError, match="exactly once"):
        case.writer.put(plan, groups[:-1])
    case.writer.clear(case.writer.put(plan, groups))


def test_a_group_without_the_requested_column_is_refused_and_leaves_nothing_behind(case):
    plan, groups = _round()
    bare = make_groups(3, 4)
    with pytest.raises(HandoffError, match="teacher_log_probs"):
        case.writer.put(plan, bare)
    case.writer.clear(case.writer.put(plan, groups))


def test_a_round_is_not_put_twice(bounded_case):
    bounded_case.writer.put(*_round())
    with pytest.raises(HandoffError, match="there already"):
        bounded_case.writer.put(*_round())


def test_a_full_queue_makes_the_writer_wait_for_clear(bounded_case):
    bounded_case.writer._timeout_s = 60.0
    first = bounded_case.writer.put(*_round(0))
    with ThreadPoolExecutor(1, thread_name_prefix="writer") as writer:
        second = writer.submit(bounded_case.writer.put, *_round(1))
        with pytest.raises(TimeoutError):
            second.result(timeout=0.3)  # at staleness 0 one round fills the queue
        bounded_case.reader.clear(first)
        assert second.result(timeout=60).rollout_id == 1


def test_a_queue_that_is_not_cleared_ends_the_wait_naming_who_must_clear(bounded_case):
    bounded_case.writer.put(*_round(0))
    with pytest.raises(WaitTimeoutError, match=r"waited 2 s for room .*_1 \(owner: driver\).*_0"):
        bounded_case.writer.put(*_round(1))
