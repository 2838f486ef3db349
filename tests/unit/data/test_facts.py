"""What is known of a group without its tokens: the same as its rows say, through the ledger's bytes and back."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.rows import make_row, train_groups
from vime.data.rows import (
    FACTS,
    GroupFacts,
    GroupNotes,
    SampleFacts,
    TrainRow,
    check_versions,
    decode_facts,
    encode_facts,
    facts_of,
    sample_numbers,
    trained_tokens,
)
from vime.types import HandoffError, StaleError, VersionSpan


def facts(*rows: TrainRow, group: int = 0, removed: tuple[bool, ...] = (), notes: GroupNotes | None = None):
    return GroupFacts(group_index=group, rows=facts_of([rows], removed), notes=notes or GroupNotes())


def row(at: int = 0, *, versions: tuple[int, ...] = (0, 0, 0), mask: tuple[int, ...] | None = None) -> TrainRow:
    """One version a token."""
    spans = [VersionSpan(version, place, place + 1) for place, version in enumerate(versions)]
    return make_row(at, response=range(len(versions)), versions=spans, loss_mask=mask)


@given(train_groups(), st.integers(1, 4))
def test_facts_say_what_the_rows_say_and_where_each_lies(group: list[TrainRow], size: int) -> None:
    chunks = [group[at : at + size] for at in range(0, len(group), size)]
    found = facts_of(chunks)
    for number, (row, fact) in enumerate(zip(group, found, strict=True)):
        assert chunks[fact["chunk"]][fact["place"]] is row
        names = ("sample_index", "reward", "raw_reward", "total_length", "response_length", "num_trainable")
        assert [fact[name] for name in names] == [getattr(row, name) for name in names]
        versions = [span.version for span in row.token_policy_versions] or [-1]
        assert (fact["oldest_version"], fact["newest_version"]) == (min(versions), max(versions))
        assert fact["oldest_trainable"] == (row.oldest_version if row.token_policy_versions else -1)
        assert (fact["chunk"], fact["place"]) == divmod(number, size)
        assert not fact["is_removed"]
    assert GroupFacts(group_index=0, rows=found).num_chunks == len(chunks)


NAMES = st.text(max_size=5)
ENTRIES = st.none() | st.dictionaries(NAMES, st.floats(allow_nan=False, allow_infinity=False), max_size=2)


@given(train_groups(), st.data())
def test_facts_come_back_equal_and_may_be_changed(group: list[TrainRow], data: st.DataObject) -> None:
    size = len(group)
    notes = GroupNotes(
        producer=data.draw(NAMES),
        entries=data.draw(st.just([]) | st.lists(ENTRIES, min_size=size, max_size=size)),
        sources=data.draw(st.just([]) | st.lists(NAMES, min_size=size, max_size=size)),
    )
    group_index = group[0].group_index
    sent = facts(*group, group=group_index, notes=notes)
    back = decode_facts(group_index, encode_facts(sent))
    assert (back.group_index, back.rows.dtype) == (group_index, FACTS)
    assert back.rows.tolist() == sent.rows.tolist()
    assert (back.notes.producer, list(back.notes.entries), list(back.notes.sources)) == (
        notes.producer,
        list(notes.entries),
        list(notes.sources),
    )
    back.remove([True] * size)
    assert not trained_tokens(back.rows).any()


def test_the_size_of_facts_is_the_same_for_long_answers_and_for_short_ones() -> None:
    # two bytes of a count, 54 a row, and an empty note {}
    for length in (1, 4000):
        data = encode_facts(facts(*(make_row(at, response=range(length)) for at in range(8))))
        assert len(data) == 2 + 8 * 54 + 2
    assert FACTS.itemsize == 54


def test_torn_or_foreign_facts_are_refused_with_their_group() -> None:
    whole = encode_facts(facts(row(0), row(1), notes=GroupNotes(producer="w", sources=("a", "b"))))
    torn = [whole[:end] for end in range(len(whole))]
    foreign = [
        b"\0\0{}",  # no rows
        whole[:110] + b"[]",
        whole[:110] + b"7",
        whole[:110] + json.dumps({"unknown": 1}).encode(),
        whole[:110] + b"\xff",
    ]
    for data in (*torn, *foreign):
        with pytest.raises(HandoffError, match="group 7: its facts cannot be read"):
            decode_facts(7, data)
    assert decode_facts(7, whole).group_index == 7


def test_a_removed_row_has_nothing_to_train_and_keeps_its_reward() -> None:
    made = facts(row(0), row(1), removed=(False, True))
    marked = facts(row(0), row(1))
    marked.remove([False, True])
    for found in (made, marked):
        assert found.rows["is_removed"].tolist() == [0, 1]
        assert trained_tokens(found.rows).tolist() == [3, 0]
        assert found.rows["reward"].tolist() == [1.0, 1.0]


def test_the_last_word_on_a_row_counts_whoever_removed_it_before() -> None:
    # the generate function removed row 1, and --rollout-sample-filter-path takes it in and row 0 out
    found = decode_facts(0, encode_facts(facts(row(0), row(1, mask=(0, 1, 1)), removed=(False, True))))
    found.remove([True, False])
    assert trained_tokens(found.rows).tolist() == [0, 2]


def test_answers_are_told_with_their_notes_where_there_are_any() -> None:
    truncated = TrainRow(
        sample_index=1, group_index=0, rollout_id=0, tokens=(1, 2), response_length=1, loss_mask=(1,),
        rollout_log_probs=(0,), token_policy_versions=(VersionSpan(4, 0, 1),), reward=-0.5, raw_reward=2.0,
        status="truncated", truncated=True,
    )  # fmt: skip
    notes = GroupNotes(entries=[{"acc": 1.0}, None], sources=["a", ""])
    first, second = facts(row(0, versions=(2, 3, 1)), truncated, removed=(True, False), notes=notes).completions()
    assert first == SampleFacts(
        reward=1.0, response_length=3, is_truncated=False, is_removed=True, entries={"acc": 1.0}, source="a",
        oldest_version=1, newest_version=3,
    )  # fmt: skip
    assert second == SampleFacts(
        reward=2.0, response_length=1, is_truncated=True, oldest_version=4, newest_version=4
    )  # the reward that the function gave, not what the advantage is made of
    [bare] = facts(row(0)).completions()
    assert (bare.entries, bare.source) == (None, "")


@pytest.mark.parametrize(
    ("versions", "mask", "bound", "fits"),
    [
        ((5, 5, 5), None, 0, True),
        ((4, 5, 5), None, 0, False),
        ((4, 5, 5), (0, 1, 1), 0, True),  # an old token that is not trained is context
        ((4, 5, 5), None, 1, True),
        ((3, 5, 5), None, 1, False),
        ((3, 5, 5), (0, 0, 0), 1, True),  # nothing of it is trained
        ((5, 6, 5), None, 9, False),  # no weights of version 6 are there yet
        ((5, 6, 5), (0, 0, 0), 9, False),  # whatever is trained of it
    ],
)
def test_versions_must_lie_within_the_bound_of_the_round(
    versions: tuple[int, ...], mask: tuple[int, ...] | None, bound: int, fits: bool
) -> None:
    fine = facts(row(0, versions=(5, 5, 5)))
    group = facts(row(8, versions=(5, 5, 5)), row(9, versions=versions, mask=mask), group=4)
    if fits:
        check_versions([fine, group], 5, bound)
        return
    oldest, newest = min(versions), max(versions)
    message = rf"sample 9 of group 4: versions \[{oldest}, {newest}\] in round 5, expected {max(0, 5 - bound)}\.\.5"
    with pytest.raises(StaleError, match=message):
        check_versions([fine, group], 5, bound)


def test_a_removed_row_may_be_as_old_as_it_likes() -> None:
    check_versions([facts(row(0, versions=(0, 0, 0)), removed=(True,))], 5, 0)
    later = facts(row(0, versions=(0, 0, 0)))
    later.remove([True])
    check_versions([later], 5, 0)


def test_rows_without_versions_have_no_age() -> None:
    check_versions([facts(make_row(response=(), versions=()))], 5, 0)


def test_facts_of_no_rows_are_an_empty_array() -> None:
    assert facts_of([]).dtype == FACTS
    assert len(np.concatenate([facts_of([]), facts(row(0)).rows])) == 1


def test_rows_of_one_index_are_one_sample_and_groups_are_told_apart() -> None:
    # group 0: samples 4, 5 (of three rows), 6; group 1 begins with a sample 6 of its own; its two chunks tear none
    one = facts_of([[make_row(at) for at in (4, 5, 5, 5, 6)]])
    other = facts_of([[make_row(6)], [make_row(6), make_row(7)]])
    assert sample_numbers(np.concatenate([one, other])).tolist() == [0, 1, 1, 1, 2, 3, 3, 4]
    assert sample_numbers(one[:1]).tolist() == [0]
    assert sample_numbers(one[:0]).tolist() == []


def test_only_the_first_row_of_a_sample_counts_as_a_sample() -> None:
    found = facts(*(make_row(at) for at in (4, 5, 5)))
    assert [row.is_first_row for row in found.completions()] == [True, True, False]


def test_samples_of_one_row_are_numbered_like_their_rows() -> None:
    rows = np.concatenate([facts_of([[make_row(at) for at in range(3)]]), facts_of([[make_row(0)]])])
    assert sample_numbers(rows).tolist() == [0, 1, 2, 3]
