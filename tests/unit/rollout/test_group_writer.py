"""Finished groups are stored together when they finish together, and none fails for another's payload."""

import asyncio
import threading
import zlib

import pytest

from vime.handoff.group_store import GroupStore
from vime.handoff.ledger_types import Task
from vime.handoff.memory import MemoryRows
from vime.rollout import group_writer
from vime.rollout.group_writer import GroupWriter, Stored
from vime.types import HandoffError

TASKS = [Task("train", number, 1) for number in range(4)]


class Rows(MemoryRows):
    """Holds the first put up until it is let go; refuses a key."""

    def __init__(self, refused: str = "") -> None:
        super().__init__()
        self.puts: list[list[str]] = []
        self.go_on, self.has_begun, self._refused = threading.Event(), threading.Event(), refused

    def put_rows(self, partition, keys, payloads):
        self.puts.append(list(keys))
        if len(self.puts) == 1:
            self.has_begun.set()
            assert self.go_on.wait(10)
        if self._refused in keys:
            raise HandoffError(f"{self._refused} is refused")
        super().put_rows(partition, keys, payloads)


async def put_while_the_first_is_written(writer: GroupWriter, rows: Rows) -> list[Stored | BaseException]:
    first = asyncio.create_task(writer.put(TASKS[0], b"0"))
    await asyncio.to_thread(rows.has_begun.wait, 10)
    others = [asyncio.create_task(writer.put(task, str(task.group).encode())) for task in TASKS[1:]]
    await asyncio.sleep(0)  # they stand in line
    rows.go_on.set()
    return await asyncio.gather(first, *others, return_exceptions=True)


def test_groups_that_finish_during_a_write_are_written_together_by_the_next():
    rows = Rows()
    writer = GroupWriter(GroupStore(rows, None, partition="train"))
    answers = asyncio.run(put_while_the_first_is_written(writer, rows))
    writer.close()
    assert rows.puts == [["train/0#1"], ["train/1#1", "train/2#1", "train/3#1"]]
    assert [answer.checksum for answer in answers] == [zlib.crc32(data) for data in (b"0", b"1", b"2", b"3")]


def test_a_payload_that_cannot_be_stored_fails_alone():
    rows = Rows(refused="train/1#1")
    writer = GroupWriter(GroupStore(rows, None, partition="train"))
    answers = asyncio.run(put_while_the_first_is_written(writer, rows))
    writer.close()
    # the second write, of three, fails for whoever waited longest, group 1; the others write again without it
    assert rows.puts[1:] == [["train/1#1", "train/2#1", "train/3#1"], ["train/2#1", "train/3#1"]]
    assert isinstance(answers[1], HandoffError)
    assert [answer.checksum for answer in answers[2:]] == [zlib.crc32(b"2"), zlib.crc32(b"3")]


def test_a_group_that_is_given_up_while_it_is_written_holds_no_other_up():
    rows = Rows()
    writer = GroupWriter(GroupStore(rows, None, partition="train"))

    async def given_up() -> Stored:
        first = asyncio.create_task(writer.put(TASKS[0], b"0"))
        await asyncio.to_thread(rows.has_begun.wait, 10)
        second = asyncio.create_task(writer.put(TASKS[1], b"1"))
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        rows.go_on.set()
        return await second

    assert asyncio.run(given_up()).checksum == zlib.crc32(b"1")
    writer.close()


class Scene:
    """A writer that lingers, for as long as the test says at most; groups are answered one by one."""

    def __init__(self, monkeypatch, linger_s=10.0):
        monkeypatch.setattr(group_writer, "LINGER_S", linger_s)
        self.rows = Rows()
        self.rows.go_on.set()
        self.writer = GroupWriter(GroupStore(self.rows, None, partition="train"), lingers=True)
        self.answered = [asyncio.Event() for _ in TASKS]

    async def produce(self, number):
        with self.writer.expecting(TASKS[number]):
            await self.answered[number].wait()
        return await self.writer.put(TASKS[number], str(number).encode())

    async def begin(self):
        work = [asyncio.create_task(self.produce(number)) for number in range(len(TASKS))]
        await settle()
        return work


async def settle():
    """Until everything that can go on without waiting has."""
    for _ in range(10):
        await asyncio.sleep(0)


def test_groups_behind_one_that_is_being_answered_are_stored_with_it(monkeypatch):
    scene = Scene(monkeypatch)

    async def the_first_is_answered_last():
        work = await scene.begin()
        for number in (2, 1, 3, 0):
            scene.answered[number].set()
            await settle()
        return await asyncio.wait_for(asyncio.gather(*work), 20)

    stored = asyncio.run(the_first_is_answered_last())
    assert [set(keys) for keys in scene.rows.puts] == [{f"train/{number}#1" for number in range(4)}]
    assert [answer.checksum for answer in stored] == [zlib.crc32(str(number).encode()) for number in range(4)]
    scene.writer.close()


def test_the_first_of_those_that_are_answered_waits_for_nobody(monkeypatch):
    # it may be the one that makes a round whole
    scene = Scene(monkeypatch, linger_s=1e9)

    async def one_after_the_other():
        for number, work in enumerate(await scene.begin()):
            scene.answered[number].set()
            await asyncio.wait_for(work, 20)

    asyncio.run(one_after_the_other())
    assert [len(keys) for keys in scene.rows.puts] == [1, 1, 1, 1]
    scene.writer.close()


def test_company_is_waited_for_no_longer_than_the_limit(monkeypatch):
    scene = Scene(monkeypatch, linger_s=0.05)

    async def the_first_is_never_answered():
        work = await scene.begin()
        scene.answered[1].set()
        stored = await asyncio.wait_for(work[1], 20)
        for task in work:
            task.cancel()
        return stored

    assert asyncio.run(the_first_is_never_answered()).checksum == zlib.crc32(b"1")
    assert scene.rows.puts == [["train/1#1"]]
    scene.writer.close()


def test_a_group_that_is_given_up_while_it_waits_for_company_is_not_stored(monkeypatch):
    scene = Scene(monkeypatch)

    async def the_second_is_given_up():
        work = await scene.begin()
        for number in (1, 2, 3):
            scene.answered[number].set()
        await settle()
        work[1].cancel()
        await settle()
        scene.answered[0].set()
        await asyncio.wait(work, timeout=20)
        assert work[1].cancelled()

    asyncio.run(the_second_is_given_up())
    assert sorted(key for keys in scene.rows.puts for key in keys) == ["train/0#1", "train/2#1", "train/3#1"]
    scene.writer.close()
