"""Finished groups are stored and committed together, and none fails for another's payload."""

import asyncio
import threading
import zlib

import pytest

from tests.helpers.ledger_cases import issue, open_ledger, payload
from tests.helpers.rows import make_row
from vime.handoff.group_store import GroupStore, MemoryStore, encode_group
from vime.handoff.ledger import LocalLedgerPort
from vime.handoff.ledger_types import LateAttemptError, Task
from vime.rollout import group_writer
from vime.rollout.group_writer import GroupWriter
from vime.types import HandoffError

TASKS = [Task("train", number, 1) for number in range(4)]


GROUPS = [encode_group([make_row(number, group_index=number)]) for number in range(4)]  # of one chunk each


class Queue(MemoryStore):
    """Holds the first put up until it is let go; refuses a key."""

    def __init__(self, refused: str = "") -> None:
        super().__init__()
        self.puts: list[list[str]] = []
        self.go_on, self.has_begun, self._refused = threading.Event(), threading.Event(), refused

    def put(self, partition, keys, chunks):
        self.puts.append(list(keys))
        if len(self.puts) == 1:
            self.has_begun.set()
            assert self.go_on.wait(10)
        if self._refused in keys:
            raise HandoffError(f"{self._refused} is refused")
        return super().put(partition, keys, chunks)


@pytest.fixture
def ledger(tmp_path):
    """TASKS are issued."""
    ledger = open_ledger(tmp_path)
    assert issue(ledger, len(TASKS)) == TASKS
    yield ledger
    ledger.close()


def make_writer(queue, ledger, **options):
    return GroupWriter(GroupStore(queue, None, partition="train"), LocalLedgerPort(ledger), **options)


def put(writer, number):
    return writer.put(TASKS[number], GROUPS[number], payload(0))


def committed(ledger, *numbers):
    """The ledger shows these groups, and with the checksums of their records."""
    needed = ledger.needed_payloads()
    return all(needed[TASKS[number]] == zlib.crc32(GROUPS[number].record) for number in numbers)


async def put_while_the_first_is_written(writer: GroupWriter, queue: Queue) -> list[float | BaseException]:
    first = asyncio.create_task(put(writer, 0))
    await asyncio.to_thread(queue.has_begun.wait, 10)
    others = [asyncio.create_task(put(writer, number)) for number in (1, 2, 3)]
    await asyncio.sleep(0)  # they stand in line
    queue.go_on.set()
    return await asyncio.gather(first, *others, return_exceptions=True)


def test_groups_that_finish_during_a_write_are_written_together_by_the_next(ledger):
    queue = Queue()
    writer = make_writer(queue, ledger)
    answers = asyncio.run(put_while_the_first_is_written(writer, queue))
    writer.close()
    assert queue.puts == [["train/0#1.0"], ["train/1#1.0", "train/2#1.0", "train/3#1.0"]]
    assert all(seconds > 0 for seconds in answers)
    assert committed(ledger, 0, 1, 2, 3)


def test_a_payload_that_cannot_be_stored_fails_alone(ledger):
    queue = Queue(refused="train/1#1.0")
    writer = make_writer(queue, ledger)
    answers = asyncio.run(put_while_the_first_is_written(writer, queue))
    writer.close()
    # the second write, of three, fails for whoever waited longest, group 1; the others write again without it
    assert queue.puts[1:] == [["train/1#1.0", "train/2#1.0", "train/3#1.0"], ["train/2#1.0", "train/3#1.0"]]
    assert isinstance(answers[1], HandoffError)
    assert committed(ledger, 0, 2, 3)
    assert ledger.status().ready == 3


def test_a_group_that_comes_too_late_is_refused_alone(ledger):
    queue = Queue()
    writer = make_writer(queue, ledger)
    ledger.prompts.retry(TASKS[2], "aborted")
    answers = asyncio.run(put_while_the_first_is_written(writer, queue))
    writer.close()
    assert [isinstance(answer, LateAttemptError) for answer in answers] == [False, False, True, False]
    assert committed(ledger, 0, 1, 3)
    assert ledger.status().ready == 3


def test_a_group_that_is_given_up_while_it_is_written_holds_no_other_up(ledger):
    queue = Queue()
    writer = make_writer(queue, ledger)

    async def given_up() -> float:
        first = asyncio.create_task(put(writer, 0))
        await asyncio.to_thread(queue.has_begun.wait, 10)
        second = asyncio.create_task(put(writer, 1))
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        queue.go_on.set()
        return await second

    assert asyncio.run(given_up()) > 0
    assert committed(ledger, 1)
    writer.close()


class Scene:
    """A writer that lingers, for as long as the test says at most; groups are answered one by one."""

    def __init__(self, monkeypatch, ledger, linger_s=10.0):
        monkeypatch.setattr(group_writer, "LINGER_S", linger_s)
        self.queue = Queue()
        self.queue.go_on.set()
        self.writer = make_writer(self.queue, ledger, lingers=True)
        self.answered = [asyncio.Event() for _ in TASKS]

    async def produce(self, number):
        with self.writer.expecting(TASKS[number]):
            await self.answered[number].wait()
        return await put(self.writer, number)

    async def begin(self):
        work = [asyncio.create_task(self.produce(number)) for number in range(len(TASKS))]
        await settle()
        return work


async def settle():
    """Until everything that can go on without waiting has."""
    for _ in range(10):
        await asyncio.sleep(0)


def test_groups_behind_one_that_is_being_answered_are_stored_with_it(monkeypatch, ledger):
    scene = Scene(monkeypatch, ledger)

    async def the_first_is_answered_last():
        work = await scene.begin()
        for number in (2, 1, 3, 0):
            scene.answered[number].set()
            await settle()
        return await asyncio.wait_for(asyncio.gather(*work), 20)

    asyncio.run(the_first_is_answered_last())
    assert [set(keys) for keys in scene.queue.puts] == [{f"train/{number}#1.0" for number in range(4)}]
    assert committed(ledger, 0, 1, 2, 3)
    scene.writer.close()


def test_the_first_of_those_that_are_answered_waits_for_nobody(monkeypatch, ledger):
    # it may be the one that makes a round whole
    scene = Scene(monkeypatch, ledger, linger_s=1e9)

    async def one_after_the_other():
        for number, work in enumerate(await scene.begin()):
            scene.answered[number].set()
            await asyncio.wait_for(work, 20)

    asyncio.run(one_after_the_other())
    assert [len(keys) for keys in scene.queue.puts] == [1, 1, 1, 1]
    scene.writer.close()


def test_company_is_waited_for_no_longer_than_the_limit(monkeypatch, ledger):
    scene = Scene(monkeypatch, ledger, linger_s=0.05)

    async def the_first_is_never_answered():
        work = await scene.begin()
        scene.answered[1].set()
        await asyncio.wait_for(work[1], 20)
        for task in work:
            task.cancel()

    asyncio.run(the_first_is_never_answered())
    assert committed(ledger, 1)
    assert scene.queue.puts == [["train/1#1.0"]]
    scene.writer.close()


def test_a_group_that_is_given_up_while_it_waits_for_company_is_not_stored(monkeypatch, ledger):
    scene = Scene(monkeypatch, ledger)

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
    assert sorted(key for keys in scene.queue.puts for key in keys) == ["train/0#1.0", "train/2#1.0", "train/3#1.0"]
    scene.writer.close()


def test_a_group_that_is_given_up_during_a_write_that_fails_is_not_written_again(monkeypatch, ledger):
    scene = Scene(monkeypatch, ledger)
    scene.queue.go_on.clear()

    async def two_are_given_up():
        work = await scene.begin()
        for number in (1, 2, 3, 0):  # group 1 writes for all
            scene.answered[number].set()
            await settle()
        await asyncio.to_thread(scene.queue.has_begun.wait, 10)
        for number in (2, 1):
            work[number].cancel()
            await settle()
        scene.queue.go_on.set()
        await asyncio.wait(work, timeout=20)

    asyncio.run(two_are_given_up())
    assert [sorted(keys) for keys in scene.queue.puts[1:]] == [["train/0#1.0", "train/3#1.0"]]
    assert committed(ledger, 0, 3)
    assert ledger.status().ready == 2
    scene.writer.close()
