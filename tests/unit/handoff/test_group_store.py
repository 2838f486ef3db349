"""Finished groups lie in queue and spool, and are found again: by who made them, and by a later life of the run."""

from __future__ import annotations

import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.helpers.rows import make_row
from vime.data import payload
from vime.data.payload import record_size, split_record, unpack_rows
from vime.data.rows import TrainRow
from vime.handoff import spool as spool_module
from vime.handoff.group_store import (
    EncodedGroup,
    GroupStore,
    MemoryStore,
    StoredGroup,
    chunk_keys,
    compact_left_behind,
    encode_group,
)
from vime.handoff.ledger_types import Task
from vime.handoff.spool import Spool, Spools, worker_spool
from vime.types import HandoffError, HandoffLostError, Sample, SampleStatus, VersionSpan

TASKS = [Task("train", number, 1) for number in range(3)]


def samples(group: int, count: int = 2) -> list[Sample]:
    made = []
    for at in range(count):
        sample = Sample(group_index=group, index=2 * group + at, prompt="p", tokens=[1], status=SampleStatus.COMPLETED)
        sample.append_response_tokens([5, 6], [-0.5, -0.25], versions=[VersionSpan(0, 0, 2)])
        sample.reward = float(at)
        made.append(sample)
    return made


def rows(group: int, count: int = 2) -> list[TrainRow]:
    return [
        make_row(2 * group + at, group_index=group, prompt=(1,), response=(5, 6), log_probs=(-0.5, -0.25))
        for at in range(count)
    ]


def encoded(group: int) -> EncodedGroup:
    return encode_group(rows(group), samples=samples(group))


@pytest.fixture
def durable(tmp_path: Path):
    store = GroupStore(MemoryStore(), Spool(tmp_path), partition="train")
    yield store
    store.close()


def test_a_group_is_encoded_in_chunks_of_whole_rows_and_its_facts_say_where_each_lies(monkeypatch) -> None:
    monkeypatch.setattr(payload, "CHUNK_BYTES", 40)  # two rows of 3 tokens, 2 of them response: 2 x (12 + 10)
    group = encode_group(rows(4, 5))
    assert [len(unpack_rows(chunk)) for chunk in group.chunks] == [2, 2, 1]
    assert list(zip(group.facts.rows["chunk"].tolist(), group.facts.rows["place"].tolist(), strict=True)) == [
        (0, 0), (0, 1), (1, 0), (1, 1), (2, 0),
    ]  # fmt: skip
    assert (group.facts.group_index, group.facts.num_chunks) == (4, 3)
    assert chunk_keys(TASKS[0], 3) == ["train/0#1.0", "train/0#1.1", "train/0#1.2"]
    assert record_size(group.record) == (5, 15)


@pytest.mark.parametrize("bad", [[], [make_row(0), make_row(1, group_index=1)], [make_row(0, loss_mask=(1,))]])
def test_rows_that_are_no_group_are_refused_where_they_are_encoded(bad: list[TrainRow]) -> None:
    with pytest.raises(HandoffError):
        encode_group(bad)


def test_chunks_lie_in_the_queue_under_their_keys_and_records_in_the_spool(tmp_path: Path) -> None:
    queue, spool = MemoryStore(), Spool(tmp_path)
    store, groups = GroupStore(queue, spool, partition="train"), [encoded(0), encoded(1)]
    checksums = store.put(list(zip(TASKS[:2], groups, strict=True)))
    assert checksums == [zlib.crc32(group.record) for group in groups]
    assert queue.chunks == {
        ("train_groups", "train/0#1.0"): groups[0].chunks[0],
        ("train_groups", "train/1#1.0"): groups[1].chunks[0],
    }
    assert [spool.read(task, crc) for task, crc in zip(TASKS, checksums, strict=False)] == [g.record for g in groups]
    assert split_record(groups[0].record)[0] == list(groups[0].chunks)
    store.close()


def test_answers_are_read_from_memory_while_they_are_held_and_then_from_the_spool(durable: GroupStore) -> None:
    [checksum] = durable.put([(TASKS[1], encoded(1))])
    assert durable.samples(TASKS[1], checksum) == samples(1)
    assert durable.num_spool_reads == 0
    durable.release([TASKS[1], TASKS[2]])
    assert durable.samples(TASKS[1], checksum) == samples(1)
    assert durable.num_spool_reads == 1


def test_a_later_life_puts_the_chunks_into_its_queue_again(tmp_path: Path) -> None:
    first = GroupStore(MemoryStore(), Spool(tmp_path), partition="train")
    checksums = first.put([(task, encoded(task.group)) for task in TASKS])
    first.close()
    queue = MemoryStore()
    second = GroupStore(queue, Spool(tmp_path), partition="train")
    second.restore(list(map(StoredGroup, TASKS[:2], checksums[:2])))
    second.restore([StoredGroup(TASKS[0], checksums[0])])  # asked twice
    assert [unpack_rows(queue.chunks["train_groups", f"train/{group}#1.0"])[0].group_index for group in (0, 1)] == [
        0,
        1,
    ]
    assert len(queue.chunks) == 2
    second.close()


def test_without_a_spool_what_is_not_held_is_lost() -> None:
    store = GroupStore(MemoryStore(), None, partition="train")
    [checksum] = store.put([(TASKS[0], encoded(0))])
    assert store.samples(TASKS[0], checksum) == samples(0)
    assert store.keep(TASKS[1], b"tokens of an aborted one") is None
    store.release(TASKS)
    for ask in (lambda: store.samples(TASKS[0], checksum), lambda: store.restore([StoredGroup(TASKS[0], checksum)])):
        with pytest.raises(HandoffLostError, match=r"group train/0#1: .*--no-transferqueue-durable keeps no other"):
            ask()


def test_a_group_that_came_too_late_leaves_the_queue(durable: GroupStore) -> None:
    queue = durable._store
    durable.put([(task, encoded(task.group)) for task in TASKS[:2]])
    durable.forget([TASKS[0]])
    durable.forget([TASKS[0]])
    assert [key for _, key in queue.chunks] == ["train/1#1.0"]


def test_compacting_keeps_what_is_needed_in_queue_and_spool(tmp_path: Path) -> None:
    queue, spool = MemoryStore(), Spool(tmp_path, segment_bytes=1)  # a segment for each group
    store = GroupStore(queue, spool, partition="train")
    checksums = [store.put([(task, encoded(task.group))])[0] for task in TASKS]
    before = store.spool_bytes
    freed = store.compact({TASKS[1]: checksums[1]})
    assert freed > 0
    assert store.spool_bytes == before - freed
    assert [key for _, key in queue.chunks] == ["train/1#1.0"]
    assert store.samples(TASKS[1], checksums[1]) == samples(1)
    store.close()


def test_spools_of_workers_that_are_no_more_are_compacted_and_others_left_alone(tmp_path: Path) -> None:
    for number, tasks in ((0, TASKS[:1]), (3, TASKS[1:])):
        spool = Spool(worker_spool(tmp_path, number), segment_bytes=1)  # a segment for each record
        for task in tasks:
            spool.append([(task, bytes(100))])
        spool.close()
    left = [worker_spool(tmp_path, number) for number in (0, 3)]
    [crc] = {crc for _, crc, _ in Spools(tmp_path).entries()}
    freed = compact_left_behind(tmp_path, [left[0]], {})
    assert [task for task, _, _ in Spools(tmp_path).entries()] == [TASKS[0], TASKS[2]]  # a spool's newest segment stays
    assert freed > 100
    assert compact_left_behind(tmp_path, [], {TASKS[0]: crc, TASKS[2]: None}) == 0


def test_what_is_still_to_be_read_is_put_into_another_queue_by_who_has_it_in_memory(tmp_path: Path) -> None:
    """Not what was trained, nor what another process holds; also a group on its way into the queue that died."""
    queue = MemoryStore()
    store = GroupStore(queue, Spool(tmp_path), partition="train")
    groups = dict(zip(TASKS, map(encoded, range(3)), strict=True))
    checksums = store.put(list(groups.items()))
    queue.chunks.clear()  # the queue died
    elsewhere = Task("train", 9, 1)
    assert store.put_again({TASKS[0]: checksums[0], TASKS[1]: None, elsewhere: 1}) == TASKS[:2]
    lying = queue.get("train_groups", [key for task in TASKS[:2] for key in chunk_keys(task, 1)])
    assert lying == [chunk for task in TASKS[:2] for chunk in groups[task].chunks]
    assert len(queue.chunks) == 2
    assert store.put_again({TASKS[0]: checksums[0] + 1}) == []  # another attempt's payload under the same task


def test_a_put_that_fails_is_not_held(tmp_path: Path) -> None:
    class Broken(MemoryStore):
        def put(self, partition, keys, chunks):
            raise HandoffLostError("it died")

    store = GroupStore(Broken(), Spool(tmp_path), partition="train")
    with pytest.raises(HandoffLostError):
        store.put([(TASKS[0], encoded(0))])
    assert store.put_again({TASKS[0]: None}) == []


def test_a_group_whose_put_is_under_way_is_put_into_another_queue_too(tmp_path: Path) -> None:
    """Its put may have ended in the queue that died, and its commit comes after the question what is to be read."""
    found: list[list[Task]] = []

    class Replaced(MemoryStore):
        def put(self, partition, keys, chunks):
            if not found:
                found.append([])
                found[0] = store.put_again({TASKS[0]: None})
            return super().put(partition, keys, chunks)

    store = GroupStore(Replaced(), Spool(tmp_path), partition="train")
    store.put([(TASKS[0], encoded(0))])
    assert found == [TASKS[:1]]


def worker(directory: Path, number: int) -> GroupStore:
    spool = Spool(worker_spool(directory, number))
    return GroupStore(MemoryStore(), spool, partition="train", directory=directory)


def test_the_spool_of_another_worker_is_read_once_however_many_groups_of_it_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that takes over from a dead one, or a resume with more workers, asks for thousands."""
    one, other = worker(tmp_path, 0), worker(tmp_path, 1)
    tasks = [Task("train", number, 1) for number in range(20)]
    checksums = one.put([(task, encoded(task.group)) for task in tasks[:10]])
    read: list[tuple[str, int]] = []
    scan = spool_module.scan

    def noted(path: Path, start: int, *, is_last: bool) -> object:
        read.append((path.parent.name, start))
        return scan(path, start, is_last=is_last)

    monkeypatch.setattr(spool_module, "scan", noted)
    for task, checksum in zip(tasks[:10], checksums, strict=True):
        assert other.samples(task, checksum) == samples(task.group)
    assert read == [("worker-0", 0)]
    checksums += one.put([(task, encoded(task.group)) for task in tasks[10:]])
    other.restore(list(map(StoredGroup, tasks, checksums)))
    assert [start > 0 for place, start in read if place == "worker-0"] == [False, True]
    assert len(other._store.chunks) == 20
    one.close()
    other.close()


def test_a_worker_stores_and_reports_while_it_reads_the_spool_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gigabytes take longer than a worker may be silent."""
    one, other = worker(tmp_path, 0), worker(tmp_path, 1)
    [checksum] = one.put([(TASKS[0], encoded(0))])
    begun, may_go_on = threading.Event(), threading.Event()
    scan = spool_module.scan

    def slow(path: Path, start: int, *, is_last: bool) -> object:
        begun.set()
        assert may_go_on.wait(30)
        return scan(path, start, is_last=is_last)

    monkeypatch.setattr(spool_module, "scan", slow)
    with ThreadPoolExecutor(max_workers=2) as threads:
        reading = threads.submit(other.samples, TASKS[0], checksum)
        try:
            assert begun.wait(30)
            assert len(threads.submit(other.put, [(TASKS[1], encoded(1))]).result(30)) == 1
            assert other.spool_bytes > 0
            assert not reading.done()
        finally:
            may_go_on.set()
        assert reading.result(30) == samples(0)
    one.close()
    other.close()
