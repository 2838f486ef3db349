"""With a ticket a rank reads its own rows by key, as they were decided upon after they were stored."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.rows import flatten, hand_over, make_groups, make_row, plan_for, read_all
from vime.data import payload
from vime.data.payload import pack_rows
from vime.data.rows import GroupFacts, TrainRow
from vime.handoff.group_store import MemoryStore, encode_group
from vime.handoff.ticket import check_plan, decode_plan, encode_plan, make_ticket, read_rows, read_some
from vime.types import HandoffError, HandoffLostError, RoundPlan, StepPlan


class Watched(MemoryStore):
    """Notes the keys that are read."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[list[str]] = []

    def get(self, partition, handles):
        self.reads.append(list(handles))
        return super().get(partition, handles)


def plan_of(*ranks: tuple[int, ...], rollout_id: int = 0) -> RoundPlan:
    """One step of one micro-batch a rank."""
    step = StepPlan(
        micro_batches=tuple((rank,) for rank in ranks), num_samples=sum(map(len, ranks)), num_tokens=1
    )  # fmt: skip
    return RoundPlan(rollout_id=rollout_id, steps=(step,))


@pytest.mark.parametrize("chunk_bytes", [1, 100, 1 << 18])
@pytest.mark.parametrize("steps", [1, 2])
def test_each_rank_gets_exactly_its_rows_of_the_round(
    monkeypatch: pytest.MonkeyPatch, chunk_bytes: int, steps: int
) -> None:
    monkeypatch.setattr(payload, "CHUNK_BYTES", chunk_bytes)
    groups, store = make_groups(3, 4, rollout_id=6), MemoryStore()
    ticket = hand_over(store, plan_for(groups, rollout_id=6, steps=steps), groups)
    found = read_all(store, pickle.loads(pickle.dumps(ticket)))
    assert [found[number] for number in range(12)] == flatten(groups)


def test_a_rank_reads_each_chunk_of_its_rows_once_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payload, "CHUNK_BYTES", 60)  # two rows of 5 tokens, 3 of them response: 2 x (20 + 15)
    groups = [[make_row(4 * group + at, group_index=group) for at in range(4)] for group in range(2)]
    store = Watched()
    ticket = hand_over(store, plan_of((1, 0, 5), (2, 3, 4, 6, 7)), groups)
    assert ticket.handles == ("0.0", "0.1", "1.0", "1.1")
    assert [sorted(read_rows(store, ticket, rank)[1]) for rank in (0, 1)] == [[0, 1, 5], [2, 3, 4, 6, 7]]
    assert store.reads == [["0.0", "1.0"], ["0.1", "1.0", "1.1"]]
    assert list(read_some(store, ticket, [6, 2])) == [6, 2]
    assert store.reads[2] == ["0.1", "1.1"]


def test_a_rank_to_which_the_plan_gives_no_row_reads_none() -> None:
    store = Watched()
    ticket = hand_over(store, plan_of((0,), ()), [[make_row()]])
    assert read_rows(store, ticket, 1)[1] == {}
    assert [key for keys in store.reads for key in keys] == []


def test_the_ticket_holds_no_token_and_no_row() -> None:
    tickets = []
    for length in (3, 3000):
        group = [make_row(at, response=range(length)) for at in range(4)]
        tickets.append(len(pickle.dumps(hand_over(MemoryStore(), plan_of((0, 1, 2, 3)), [group]))))
    assert tickets[0] == tickets[1]


def test_rewards_that_were_decided_later_are_those_of_the_rows() -> None:
    groups, store = make_groups(2, 2), MemoryStore()
    encoded = [encode_group(rows) for rows in groups]
    handles = [store.put("p", [str(at)], group.chunks) for at, group in enumerate(encoded)]
    encoded[1].facts.rows["reward"] = [-7.5, 0.1]
    ticket = make_ticket(
        plan_of((0, 1, 2, 3)),
        [(group.facts, keys) for group, keys in zip(encoded, handles, strict=True)],
        partition="p",
    )
    rows = read_all(store, ticket)
    assert [rows[number].reward for number in range(4)] == [0.0, -0.25, -7.5, 0.1]
    assert [rows[number].raw_reward for number in range(4)] == [row.raw_reward for row in flatten(groups)]
    assert rows[3] == replace(groups[1][1], reward=0.1)


def test_a_row_that_was_removed_is_read_without_anything_to_train_and_with_its_reward() -> None:
    [group], store = make_groups(1, 3), MemoryStore()
    before, after = encode_group(group, removed=[False, True, False]), encode_group(group)
    after.facts.remove([False, True, False])
    for encoded in (before, after):
        ticket = make_ticket(
            plan_of((0, 1, 2)), [(encoded.facts, store.put("p", ["k"], encoded.chunks))], partition="p"
        )
        rows = read_all(store, ticket)
        assert rows[1] == replace(group[1], loss_mask=np.zeros(group[1].response_length))
        assert (rows[1].num_trainable, rows[1].reward) == (0, group[1].reward)
        assert (rows[0], rows[2]) == (group[0], group[2])


def test_the_chunk_of_another_group_is_refused_under_the_key_of_this_one() -> None:
    groups, store = make_groups(2, 2), MemoryStore()
    ticket = hand_over(store, plan_for(groups), groups)
    store.chunks["train_0", "0.0"] = store.chunks["train_0", "1.0"]
    with pytest.raises(HandoffError, match=r"train_0, 0\.0: row \d of round 0 is not there; expected one of group 0"):
        read_all(store, ticket)


def test_a_chunk_of_the_same_group_with_fewer_rows_is_refused() -> None:
    [group], store = make_groups(1, 3), MemoryStore()
    ticket = hand_over(store, plan_of((0, 1, 2)), [group])
    store.chunks["train_0", "0.0"] = pack_rows(group[:2])
    with pytest.raises(HandoffError, match=r"train_0, 0\.0: row 2 of round 0 is not there"):
        read_all(store, ticket)


@pytest.mark.parametrize("at", [0, 20, 100, -1])
def test_a_changed_byte_in_a_chunk_is_named_with_its_key(at: int) -> None:
    groups, store = make_groups(2, 2), MemoryStore()
    ticket = hand_over(store, plan_for(groups), groups)
    data = bytearray(store.chunks["train_0", "1.0"])
    data[at] ^= 4
    store.chunks["train_0", "1.0"] = bytes(data)
    with pytest.raises(HandoffError, match=r"train_0, 1\.0: .*(came back changed|are no chunk)"):
        read_all(store, ticket)


def test_a_chunk_that_is_gone_is_lost() -> None:
    groups, store = make_groups(2, 2), MemoryStore()
    ticket = hand_over(store, plan_for(groups), groups)
    store.clear("train_0", ["1.0"])
    with pytest.raises(HandoffLostError, match=r"1\.0.*cleared, or never put"):
        read_all(store, ticket)


@given(
    num_groups=st.integers(1, 4), half_group=st.integers(1, 2), dp_size=st.integers(1, 2), rollout_id=st.integers(0, 9)
)
def test_a_plan_comes_back_equal(num_groups: int, half_group: int, dp_size: int, rollout_id: int) -> None:
    groups = make_groups(num_groups, 2 * half_group, rollout_id=rollout_id)
    plan = plan_for(groups, rollout_id=rollout_id, dp_size=dp_size)
    check_plan(plan, len(flatten(groups)))
    assert decode_plan(encode_plan(plan)) == plan
    assert plan.dp_size == dp_size


def test_a_plan_carries_the_tokens_of_samples_with_several_rows_and_nothing_of_others() -> None:
    plain = plan_of((0, 1), (2,))
    step = replace(plain.steps[0], num_samples=2, sample_tokens=((1, 7), (2, 7)))
    plan = replace(plain, steps=(step, *plain.steps))
    assert decode_plan(encode_plan(plan)) == plan
    assert encode_plan(plain) == b'{"rollout_id":0,"steps":[[3,1,[[[0,1]],[[2]]]]]}'


@pytest.mark.parametrize("data", [b"", b"{", b'{"rollout_id": 1}', b"[]", b'{"rollout_id": 1, "steps": [[1]]}'])
def test_bytes_that_are_no_plan_are_refused(data: bytes) -> None:
    with pytest.raises(HandoffError, match="plan"):
        decode_plan(data)


@pytest.mark.parametrize(
    "ranks", [((0, 1),), ((0, 1, 2, 2), ()), ((0, 1), (2, 1)), ((0, 1, 3), ()), ((1, 2, 3), ())], ids=str
)
def test_a_plan_that_does_not_name_each_row_of_the_round_once_is_refused(ranks: tuple[tuple[int, ...], ...]) -> None:
    named = sum(map(len, ranks))
    with pytest.raises(HandoffError, match=f"names {named} rows, the round has 3; expected each row exactly once"):
        make_ticket(plan_of(*ranks), [(_facts(3), ["k"])], partition="p")


def _facts(num_rows: int) -> GroupFacts:
    rows: list[TrainRow] = [make_row(at) for at in range(num_rows)]
    return encode_group(rows).facts
