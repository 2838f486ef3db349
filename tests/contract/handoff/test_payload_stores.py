"""Every store brings each rank its rows by key, and answers nothing else than what was put."""

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.helpers.rows import flatten, hand_over, make_groups, make_row, plan_for, read_all
from vime.data import payload
from vime.data.rows import TrainRow
from vime.handoff.group_store import RoundStore, encode_group
from vime.handoff.ticket import make_ticket, read_rows
from vime.types import HandoffError, HandoffLostError, RoundPlan, WaitTimeoutError


def _with_extra(row: TrainRow) -> TrainRow:
    experts = np.arange(6 * row.total_length, dtype=np.int16).reshape(-1, 6) - 1
    teacher = np.full(row.response_length, -1.5, np.float32)
    return dataclasses.replace(row, extra={"experts": experts, "teacher_log_probs": teacher, "why": b'"\xc3\xa9"'})


def _round(rollout_id: int = 0, *, steps: int = 1) -> tuple[RoundPlan, list[list[TrainRow]]]:
    groups = [[_with_extra(row) for row in rows] for rows in make_groups(3, 4, rollout_id=rollout_id)]
    return plan_for(groups, rollout_id=rollout_id, steps=steps), groups


@pytest.mark.parametrize("chunk_bytes", [1, 1 << 18], ids=["one row a chunk", "one chunk a group"])
def test_each_rank_gets_exactly_its_rows_and_every_bit_of_them(case, monkeypatch, chunk_bytes):
    monkeypatch.setattr(payload, "CHUNK_BYTES", chunk_bytes)
    plan, groups = _round(4, steps=2)
    ticket = case.travel(hand_over(case.writer, plan, groups, partition=case.partition))
    assert read_rows(case.reader, ticket, 0)[0] == plan
    found = read_all(case.reader, ticket)
    assert [found[number] for number in range(12)] == flatten(groups)


def test_log_probabilities_arrive_as_the_same_float32_whatever_the_store(case):
    group = [make_row(at, response=(5,), log_probs=(-0.1,)) for at in range(2)]
    found = read_all(case.reader, hand_over(case.writer, plan_for([group]), [group], partition=case.partition))
    assert [row.rollout_log_probs.tolist() for row in found.values()] == [[float(np.float32(-0.1))]] * 2


def test_a_round_of_empty_responses_arrives(case):
    group = [make_row(at, response=(), versions=()) for at in range(2)]
    found = read_all(case.reader, hand_over(case.writer, plan_for([group]), [group], partition=case.partition))
    assert list(found.values()) == group


def test_a_rank_to_which_the_plan_gives_no_row_gets_none(case):
    group = [_with_extra(make_row())]
    step = dataclasses.replace(plan_for([group], dp_size=1).steps[0], micro_batches=(((0,),), ((),)))
    plan = RoundPlan(rollout_id=0, steps=(step,))
    ticket = hand_over(case.writer, plan, [group], partition=case.partition)
    assert [tuple(read_rows(case.reader, ticket, dp_rank)[1]) for dp_rank in range(2)] == [(0,), ()]


def test_what_was_decided_after_a_group_was_stored_is_obeyed(case):
    [rows] = make_groups(1, 2)
    group = encode_group(rows)
    handles = case.writer.put(case.partition, ["0.0"], group.chunks)
    group.facts.rows["reward"] = [0.25, -3.0]
    group.facts.remove([False, True])
    found = read_all(case.reader, make_ticket(plan_for([rows]), [(group.facts, handles)], partition=case.partition))
    assert [(found[at].reward, found[at].num_trainable) for at in range(2)] == [(0.25, 1), (-3.0, 0)]  # 1 and 6 tokens


def test_a_round_may_be_read_again_until_it_is_cleared(case):
    ticket = hand_over(case.writer, *_round(), partition=case.partition)
    assert read_all(case.reader, ticket) == read_all(case.reader, ticket)


def test_a_lost_chunk_is_an_error_and_never_a_shorter_round(case):
    ticket = hand_over(case.writer, *_round(), partition=case.partition)
    case.lose(ticket.handles[1])
    with pytest.raises(HandoffLostError):
        read_all(case.reader, ticket)


def test_the_chunk_of_another_group_is_refused(case):
    ticket = hand_over(case.writer, *_round(), partition=case.partition)
    swapped = dataclasses.replace(ticket, handles=(ticket.handles[1], ticket.handles[0], ticket.handles[2]))
    with pytest.raises(HandoffError, match=r"is not there; expected one of group [01]"):
        read_all(case.reader, swapped)


def test_chunks_come_back_in_the_order_asked_for_and_byte_for_byte(case):
    chunks = [b"", bytes(1), bytes(1), bytes(range(256)) * 5]
    handles = case.writer.put(case.partition, ["empty", "zero", "again", "all"], chunks)
    for order in ([0, 1, 2, 3], [3, 0], [2], []):
        assert case.reader.get(case.partition, [handles[at] for at in order]) == [chunks[at] for at in order]
    assert case.writer.put(case.partition, [], []) == []


def test_clearing_what_is_not_there_is_no_error_and_clears_nothing_else(case):
    kept, gone = case.writer.put(case.partition, ["kept", "gone"], [b"1", b"2"])
    case.writer.clear(case.partition, [gone])
    case.writer.clear(case.partition, [gone])
    case.writer.clear(case.partition, [])
    assert case.reader.get(case.partition, [kept]) == [b"1"]


def test_a_cleared_chunk_cannot_be_read_and_the_others_can(keyed_case):
    case = keyed_case
    ticket = hand_over(case.writer, *_round(), partition=case.partition)
    case.writer.clear(case.partition, ticket.handles[:1])
    with pytest.raises(HandoffLostError, match="cleared"):
        read_all(case.reader, ticket)
    assert len(case.reader.get(case.partition, ticket.handles[1:])) == 2


def test_a_ticket_of_a_partition_that_was_never_put_is_refused(keyed_case):
    case = keyed_case
    ticket = hand_over(case.writer, *_round(), partition=case.partition)
    with pytest.raises(HandoffLostError, match="cleared"):
        read_all(case.reader, dataclasses.replace(ticket, partition=f"{case.partition}_nowhere"))


def test_a_store_says_which_partitions_it_holds(keyed_case):
    case = keyed_case
    names = {f"{case.partition}_{at}" for at in range(2)}
    for name in names:
        case.writer.put(name, ["key"], [b"1"])
    assert names <= set(case.reader.partitions())
    case.writer.clear_partition(f"{case.partition}_0")
    assert names & set(case.reader.partitions()) == {f"{case.partition}_1"}


def _rounds(case, timeout_s=2.0):
    """At staleness 0: one round fills the store."""
    return RoundStore(case.writer, prefix=case.partition, capacity=1, timeout_s=timeout_s)


def _encoded(rollout_id):
    return [encode_group(rows) for rows in _round(rollout_id)[1]]


def test_a_round_is_put_as_a_whole_and_its_handles_are_those_of_its_groups(case):
    plan, groups = _round(3)
    encoded = [encode_group(rows) for rows in groups]
    rounds = _rounds(case)
    partition, handles = rounds.put(3, encoded)
    assert partition == f"{case.partition}_3"
    facts = [group.facts for group in encoded]
    found = read_all(case.reader, make_ticket(plan, list(zip(facts, handles, strict=True)), partition=partition))
    assert [found[number] for number in range(12)] == flatten(groups)
    rounds.clear(partition)


def test_the_ticket_of_a_cleared_round_does_not_read_the_same_round_put_again(keyed_case):
    # TransferQueue recycles row numbers over partitions
    rounds = _rounds(keyed_case)
    partition, old = rounds.put(0, _encoded(0))
    rounds.clear(partition)
    assert rounds.put(0, _encoded(0))[0] == partition
    with pytest.raises(HandoffLostError, match="cleared"):
        keyed_case.reader.get(partition, [key for keys in old for key in keys])


def test_a_round_is_not_put_twice(keyed_case):
    rounds = _rounds(keyed_case)
    rounds.put(0, _encoded(0))
    with pytest.raises(HandoffError, match="there already"):
        rounds.put(0, _encoded(0))


def test_a_full_store_makes_the_writer_wait_for_clear(keyed_case):
    rounds = _rounds(keyed_case, timeout_s=60.0)
    first, _ = rounds.put(0, _encoded(0))
    with ThreadPoolExecutor(1, thread_name_prefix="writer") as writer:
        second = writer.submit(rounds.put, 1, _encoded(1))
        with pytest.raises(TimeoutError):
            second.result(timeout=0.3)
        keyed_case.reader.clear_partition(first)
        assert second.result(timeout=60)[0] == f"{keyed_case.partition}_1"


def test_a_store_that_is_not_cleared_ends_the_wait_naming_who_must_clear(keyed_case):
    rounds = _rounds(keyed_case)
    rounds.put(0, _encoded(0))
    with pytest.raises(WaitTimeoutError, match=r"waited 2 s for room .*_1 \(owner: driver\).*_0"):
        rounds.put(1, _encoded(1))


def test_partitions_of_others_take_no_room(keyed_case):
    keyed_case.writer.put(f"{keyed_case.partition}_groups", ["key"], [b"1"])
    keyed_case.writer.put(f"{keyed_case.partition}x_1", ["key"], [b"1"])
    _rounds(keyed_case).put(0, _encoded(0))


def test_a_put_that_fails_leaves_nothing_behind(keyed_case, monkeypatch):
    rounds, put = _rounds(keyed_case), keyed_case.writer.put

    def half(partition, keys, chunks):
        put(partition, keys[:1], chunks[:1])
        raise HandoffError("the queue is full")

    with monkeypatch.context() as patch:
        patch.setattr(keyed_case.writer, "put", half)
        with pytest.raises(HandoffError, match="the queue is full"):
            rounds.put(0, _encoded(0))
    assert rounds.put(0, _encoded(0))[0] == f"{keyed_case.partition}_0"
