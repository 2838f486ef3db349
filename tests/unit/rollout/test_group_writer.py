"""Finished groups are stored together when they finish together, and none fails for another's payload."""

import asyncio
import threading
import zlib

import pytest

from vime.handoff.group_store import GroupStore
from vime.handoff.ledger_types import Task
from vime.handoff.memory import MemoryRows
from vime.rollout.group_writer import GroupWriter
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


async def put_while_the_first_is_written(writer: GroupWriter, rows: Rows) -> list[int | BaseException]:
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
    assert answers == [zlib.crc32(data) for data in (b"0", b"1", b"2", b"3")]


def test_a_payload_that_cannot_be_stored_fails_alone():
    rows = Rows(refused="train/1#1")
    writer = GroupWriter(GroupStore(rows, None, partition="train"))
    answers = asyncio.run(put_while_the_first_is_written(writer, rows))
    writer.close()
    # the second write, of three, fails for whoever waited longest, group 1; the others write again without it
    assert rows.puts[1:] == [["train/1#1", "train/2#1", "train/3#1"], ["train/2#1", "train/3#1"]]
    assert isinstance(answers[1], HandoffError)
    assert answers[2:] == [zlib.crc32(b"2"), zlib.crc32(b"3")]


def test_a_group_that_is_given_up_while_it_is_written_holds_no_other_up():
    rows = Rows()
    writer = GroupWriter(GroupStore(rows, None, partition="train"))

    async def given_up() -> int:
        first = asyncio.create_task(writer.put(TASKS[0], b"0"))
        await asyncio.to_thread(rows.has_begun.wait, 10)
        second = asyncio.create_task(writer.put(TASKS[1], b"1"))
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        rows.go_on.set()
        return await second

    assert asyncio.run(given_up()) == zlib.crc32(b"1")
    writer.close()
