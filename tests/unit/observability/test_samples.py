"""The answers of every round are kept, found again, and bounded on disk."""

from __future__ import annotations

import gzip
import itertools
import random
from pathlib import Path

import numpy
import pytest

from tests.helpers.kept import round_groups
from vime.observability.samples import (
    DIRECTORY,
    FATES_FILE,
    DroppedGroup,
    RoundGroup,
    SampleStore,
    kept_rounds,
    read_fates,
    read_round,
    thinned,
)
from vime.rollout.sample_recorder import MAX_DROPPED, SampleRecorder
from vime.types import Sample, SampleStatus, VersionSpan


def answered(group: int, index: int, length: int = 3, **fields: object) -> Sample:
    sample = Sample(group_index=group, index=index, prompt=f"question {group}", tokens=[7, 8], label="x")
    sample.append_response_tokens(
        list(range(length)), [-0.5 - place for place in range(length)], versions=[VersionSpan(4, 0, length)]
    )
    sample.response, sample.status, sample.reward = f"answer {index}", SampleStatus.COMPLETED, float(index)
    for name, value in fields.items():
        setattr(sample, name, value)
    return sample


def test_a_round_comes_back_with_tokens_versions_rewards_and_reasons(tmp_path: Path) -> None:
    tool = answered(5, 11, reward={"right": 1.0, "short": 0.25}, metadata={"k": [1]}, remove_sample=True)
    tool.append_response_tokens([50, 51], [0.0, 0.0], trainable=False, versions=[VersionSpan(6, 0, 2)])
    lost = DroppedGroup(group_index=9, reason="zero_std", samples=[answered(9, 18)])
    SampleStore(tmp_path, 1 << 20).write(3, round_groups([[answered(5, 10), tool]]), [lost])
    [first, second] = read_round(tmp_path, 3)
    assert (first.group_index, first.reason, first.prompt, first.label) == (5, None, "question 5", "x")
    assert (second.group_index, second.reason) == (9, "zero_std")
    plain, mixed = first.answers
    assert (plain.prompt_tokens, plain.tokens, plain.log_probs) == ((7, 8), (0, 1, 2), (-0.5, -1.5, -2.5))
    assert (plain.loss_mask, plain.versions, plain.is_removed) == ((1, 1, 1), ((4, 0, 3),), False)
    assert (mixed.tokens, mixed.loss_mask) == ((0, 1, 2, 50, 51), (1, 1, 1, 0, 0))
    assert (mixed.versions, mixed.is_removed) == (((4, 0, 3), (6, 3, 5)), True)
    assert (mixed.reward, mixed.score(), mixed.score("short")) == ({"right": 1.0, "short": 0.25}, 1.0, 0.25)
    fates = read_fates(tmp_path)[3]
    assert (fates.kept, fates.dropped) == ((5,), {"zero_std": (9,)})


def test_values_that_json_does_not_know_do_not_cost_the_round(tmp_path: Path) -> None:
    odd = answered(0, 0, metadata={"when": numpy.datetime64("2026-01-01")}, label="y" * 5000)
    SampleStore(tmp_path, 1 << 20).write(0, round_groups([[odd]]), [])
    [group] = read_round(tmp_path, 0)
    assert (group.metadata, group.label) == ({"when": "2026-01-01"}, '"' + "y" * 1999 + "...")


def test_the_round_that_goes_is_the_one_that_is_missed_least() -> None:
    assert thinned([0, 1, 2, 3]) == 1  # equally close: the oldest
    assert thinned([0, 2, 3, 4]) == 3  # 2 and 4 are two apart, 0 and 3 are three
    rounds = []
    for round_id in range(200):
        rounds.append(round_id)
        if len(rounds) > 8:
            rounds.remove(thinned(rounds))
    assert rounds[0] == 0
    assert rounds[-1] == 199
    assert max(b - a for a, b in itertools.pairwise(rounds)) <= 64  # evenly: 199 / 7 is 28, twice that


def test_the_directory_keeps_to_its_bound_and_every_fate_stays(tmp_path: Path) -> None:
    """Random tokens: they do not compress to nothing."""
    bound, randoms = 200_000, random.Random(0)
    store = SampleStore(tmp_path, bound)
    for round_id in range(60):
        groups = [[answered(round_id * 4 + number, number, 200)] for number in range(4)]
        for [sample] in groups:
            sample.tokens = [randoms.randrange(1 << 16) for _ in sample.tokens]
        store.write(round_id, round_groups(groups), [])
        assert sum(path.stat().st_size for path in (tmp_path / DIRECTORY).glob("round_*")) <= bound
    rounds = kept_rounds(tmp_path)
    assert (rounds[0], rounds[-1]) == (0, 59)
    assert len(rounds) < 60
    assert [fate.kept for fate in read_fates(tmp_path).values()] == [
        tuple(range(first, first + 4)) for first in range(0, 240, 4)
    ]


def test_of_a_huge_round_groups_are_left_out_evenly(tmp_path: Path) -> None:
    # 12 bytes x 102 tokens x 40 groups are 48,960; a sixteenth of 64,000 are 4,000: every 13th group
    SampleStore(tmp_path, 64_000).write(0, round_groups([[answered(group, 0, 100)] for group in range(40)]), [])
    assert [group.group_index for group in read_round(tmp_path, 0)] == [0, 13, 26, 39]
    assert len(read_fates(tmp_path)[0].kept) == 40


def test_only_groups_that_are_written_are_read_from_where_they_lie(tmp_path: Path) -> None:
    read: list[int] = []

    def lying(group: int) -> RoundGroup:
        return RoundGroup(
            group_index=group, num_tokens=102, read=lambda: read.append(group) or [answered(group, 0, 100)]
        )

    SampleStore(tmp_path, 64_000).write(0, [lying(group) for group in range(40)], [])
    assert read == [0, 13, 26, 39]  # as above
    assert len(read_fates(tmp_path)[0].kept) == 40


def test_a_resumed_run_takes_back_the_rounds_it_trains_anew(tmp_path: Path) -> None:
    first = SampleStore(tmp_path, 1 << 20)
    for round_id in range(5):
        first.write(round_id, round_groups([[answered(round_id, 0)]]), [])
    SampleStore(tmp_path, 1 << 20).write(2, round_groups([[answered(20, 0)]]), [])
    assert kept_rounds(tmp_path) == [0, 1, 2]
    assert {round_id: fate.kept for round_id, fate in read_fates(tmp_path).items()} == {0: (0,), 1: (1,), 2: (20,)}


def test_damage_costs_what_is_damaged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = SampleStore(tmp_path, 1 << 20)
    store.write(0, round_groups([[answered(0, 0)]]), [])
    [path] = (tmp_path / DIRECTORY).glob("round_*")
    path.write_bytes(path.read_bytes()[:-20])
    assert list(read_round(tmp_path, 0)) == []
    assert "the file is damaged" in caplog.text
    path.write_bytes(gzip.compress(b'{"round": 0}\n{"group": 3}\nnot json\n'))
    assert list(read_round(tmp_path, 0)) == []
    with (tmp_path / DIRECTORY / FATES_FILE).open("a") as file:
        file.write('{"round": 1, "ke')
    SampleStore(tmp_path, 1 << 20).write(1, round_groups([[answered(1, 0)]]), [])
    assert sorted(read_fates(tmp_path)) == [0, 1]


def test_the_book_writes_dropped_groups_with_the_round_in_hand(tmp_path: Path) -> None:
    book = SampleRecorder()
    book.note_dropped(1, "before it is open", [answered(1, 0)])
    book.open(tmp_path, max_bytes=1 << 20)
    for group in range(MAX_DROPPED + 5):
        book.note_dropped(group, "zero_std", [answered(group, 0)])
    book.write_round(0, round_groups([[answered(100, 0)]]))
    book.note_dropped(200, "filter", [answered(200, 0)])
    book.close()  # round 1 never became whole
    groups = list(read_round(tmp_path, 0))
    assert [group.group_index for group in groups] == [100, *range(MAX_DROPPED)]
    fates = read_fates(tmp_path)
    assert (len(fates[0].dropped["zero_std"]), fates[0].kept) == (MAX_DROPPED + 5, (100,))
    assert (fates[1].dropped, fates[1].kept) == ({"filter": (200,)}, ())


def test_a_sample_that_cannot_be_kept_does_not_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    book = SampleRecorder()
    book.open(tmp_path, max_bytes=1 << 20)
    book.write_round(0, round_groups([[answered(0, 0, tokens=["no", "numbers"])]]))
    book.write_round(1, round_groups([[answered(1, 0)]]))
    book.close()
    assert kept_rounds(tmp_path) == [1]
    assert "round 0: TypeError" in caplog.text


def test_without_room_nothing_is_kept(tmp_path: Path) -> None:
    book = SampleRecorder()
    book.open(tmp_path, max_bytes=0)
    book.write_round(0, round_groups([[answered(0, 0)]]))
    book.close()
    assert not (tmp_path / DIRECTORY).exists()
