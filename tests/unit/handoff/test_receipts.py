"""Receipts: hashes that add up over ranks, lines that are linked, and a file that survives what ends a driver."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.rows import make_row
from vime.data.images import IMAGE_COLUMN
from vime.data.rows import TrainRow
from vime.handoff import receipts
from vime.handoff.group_store import encode_group
from vime.handoff.receipts import (
    RECEIPTS_NAME,
    ReceiptFile,
    Receipts,
    SteppedGroup,
    add_up,
    group_content,
    read_receipts,
    row_content,
    stepped_groups,
)
from vime.types import HandoffError, RoundPlan, StepPlan

GROUPS = [SteppedGroup(4, 1, rows=2, tokens=20, trainable=9, content=2**63)]


def read(directory: Path) -> Receipts:
    found = read_receipts(directory / RECEIPTS_NAME)
    assert found is not None
    return found


def plan(*micro_batches_of_ranks: tuple[tuple[int, ...], ...]) -> RoundPlan:
    """Of one step."""
    rows = sum(len(batch) for rank in micro_batches_of_ranks for batch in rank)
    return RoundPlan(
        rollout_id=0, steps=(StepPlan(micro_batches=micro_batches_of_ranks, num_samples=rows, num_tokens=1),)
    )


def rows_of(num_groups: int, num_rows: int) -> dict[int, TrainRow]:
    return {
        group * num_rows + at: make_row(group * num_rows + at, group_index=group)
        for group in range(num_groups)
        for at in range(num_rows)
    }


@given(st.permutations(range(6)), st.integers(0, 6))
def test_ranks_that_have_parts_of_groups_add_up_to_what_the_producer_committed(order: list[int], cut: int) -> None:
    rows = rows_of(2, 3)
    dealt = plan((tuple(order[:cut]),), (tuple(order[cut:]),))
    found = add_up(part for rank in range(2) for part in stepped_groups(dealt, rows, rank))
    for group in found:
        members = [row for row in rows.values() if row.group_index == group.group]
        committed = group_content((row.sample_index, row.tokens, row.response_length) for row in members)
        assert (group.rows, f"{group.content:016x}") == (3, committed)
        assert group.tokens == sum(row.total_length for row in members)
        assert group.trainable == sum(row.num_trainable for row in members)
    assert [group.group for group in found] == [0, 1]


def test_a_row_that_two_micro_batches_name_is_there_twice() -> None:
    rows = rows_of(1, 2)
    once, twice = (stepped_groups(plan((batch,)), rows, 0) for batch in ((0, 1), (0, 1, 1)))
    assert (once[0].rows, twice[0].rows) == (2, 3)
    assert once[0].content != twice[0].content


def test_another_token_another_sample_another_cut_or_another_image_is_another_content() -> None:
    one = row_content(0, [1, 2, 3], 2)
    others = [row_content(0, [1, 2, 4], 2), row_content(1, [1, 2, 3], 2), row_content(0, [1, 2, 3], 1)]
    seen = [row_content(0, [1, 2, 3], 2, image) for image in (b"red", b"blue")]
    assert len({one, *others, row_content(0, [1, 2], 2), *seen}) == 7


def test_images_that_reach_another_row_are_another_content_than_was_committed() -> None:
    """Of two samples with the same tokens."""
    rows = rows_of(1, 2)
    seen = {
        number: replace(row, tokens=rows[0].tokens, extra={IMAGE_COLUMN: image})
        for (number, row), image in zip(rows.items(), (b"red", b"blue"), strict=True)
    }
    swapped = {number: replace(row, extra=seen[1 - number].extra) for number, row in seen.items()}
    group = encode_group(list(seen.values()))
    committed = group_content(
        (row.sample_index, row.tokens, row.response_length, image)
        for row, image in zip(seen.values(), group.images, strict=True)
    )
    found, wrong = (stepped_groups(plan((tuple(seen),)), of, 0)[0].content for of in (seen, swapped))
    assert f"{found:016x}" == committed != f"{wrong:016x}"


def test_lines_are_linked_over_a_restart_and_a_round_trained_again_alike_has_the_same_link(tmp_path: Path) -> None:
    store = ReceiptFile(tmp_path, start_round=0, link=None)
    links = [store.note(round_id, round_id, GROUPS) for round_id in range(3)]
    store.close()
    again = ReceiptFile(tmp_path, start_round=1, link=links[0])  # the checkpoint of round 0
    assert again.note(1, 1, GROUPS) == links[1]
    assert again.note(2, 2, []) not in links
    again.close()
    found = read(tmp_path)
    assert (found.faults, len(found.beginnings), found.newest) == ((), 1, again.link)
    assert [found.lines[link].previous for link in links[1:]] == links[:2]
    assert found.lines[links[1]].groups == tuple(GROUPS)


def test_from_a_checkpoint_of_another_directory_the_links_begin_with_its_own(tmp_path: Path) -> None:
    store = ReceiptFile(tmp_path, start_round=5, link="ab" * 8)
    store.note(5, 5, GROUPS)
    store.close()
    ReceiptFile(tmp_path, start_round=5, link="ab" * 8).close()  # a second time from there: no second beginning
    [begun] = read(tmp_path).beginnings.values()
    assert (begun.round_id, begun.after) == (5, "ab" * 8)


@pytest.mark.parametrize("cut", [1, 10])
def test_half_a_line_at_the_end_is_left_out_and_goes_when_the_run_goes_on(tmp_path: Path, cut: int) -> None:
    store = ReceiptFile(tmp_path, start_round=0, link=None)
    first, _ = store.note(0, 0, GROUPS), store.note(1, 1, GROUPS)
    store.close()
    path = tmp_path / RECEIPTS_NAME
    os.truncate(path, path.stat().st_size - cut)
    assert (read(tmp_path).newest, read(tmp_path).faults) == (first, ())
    again = ReceiptFile(tmp_path, start_round=1, link=first)
    newest = again.note(1, 1, GROUPS)
    again.close()
    assert (read(tmp_path).newest, read(tmp_path).faults) == (newest, ())


def test_half_a_line_is_found_however_long_the_file_and_the_line_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One read returns 2 GiB at most: a longer file lost its newest lines."""
    monkeypatch.setattr(receipts, "TAIL_BYTES", 16)
    store = ReceiptFile(tmp_path, start_round=0, link=None)
    links = [store.note(number, number, GROUPS) for number in range(3)]
    store.close()
    path = tmp_path / RECEIPTS_NAME
    whole = path.read_bytes()
    ReceiptFile(tmp_path, start_round=3, link=links[2]).close()
    assert path.read_bytes() == whole
    path.write_bytes(whole[:-5])
    ReceiptFile(tmp_path, start_round=2, link=links[1]).close()
    assert path.read_bytes() == whole[: whole.rfind(b"\n", 0, -1) + 1]
    path.write_bytes(b"no line yet, but many bytes of one")
    store = ReceiptFile(tmp_path, start_round=0, link=None)
    store.close()
    assert read(tmp_path).faults == ()


def test_a_changed_byte_in_any_line_is_named(tmp_path: Path) -> None:
    store = ReceiptFile(tmp_path, start_round=0, link=None)
    for round_id in range(2):
        store.note(round_id, round_id, GROUPS)
    store.close()
    path = tmp_path / RECEIPTS_NAME
    whole = path.read_bytes()
    for at in range(len(whole) - 1):  # but for the last end of line: without it the line is half
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert read(tmp_path).faults, whole[max(0, at - 20) : at + 20]


def test_a_full_disk_is_named_and_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ReceiptFile(tmp_path, start_round=0, link=None)
    first, whole, write = store.note(0, 0, GROUPS), (tmp_path / RECEIPTS_NAME).read_bytes(), os.write

    def full(file: int, data: bytes) -> int:
        if len(data) < 20:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data[:-10])

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(HandoffError, match=r"receipts.jsonl: .*cannot be written down: .*No space left.*--load"):
        store.note(1, 1, GROUPS)
    monkeypatch.undo()
    assert ((tmp_path / RECEIPTS_NAME).read_bytes(), store.link) == (whole, first)
    store.close()
