"""Slots of an engine go to the group that training needs first."""

import asyncio

from vime.rollout.request_priority import Slots, set_request_priority


async def _holder(slots: Slots, group: int, entered: list[int], may_leave: asyncio.Event) -> None:
    set_request_priority(group)
    await slots.acquire()
    entered.append(group)
    await may_leave.wait()
    slots.release()


async def _settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_the_lowest_group_enters_first_and_equals_in_the_order_of_arrival() -> None:
    async def run() -> list[int]:
        slots, entered, doors = Slots(1), [], {group: asyncio.Event() for group in (9, 7, 3, 5)}
        tasks = []
        for group in doors:  # 9 finds a free slot, the others wait
            tasks.append(asyncio.create_task(_holder(slots, group, entered, doors[group])))
            await _settle()
        for group in (9, 3, 5, 7):
            doors[group].set()
            await _settle()
        await asyncio.gather(*tasks)
        return entered

    assert asyncio.run(run()) == [9, 3, 5, 7]


def test_never_more_than_allowed_and_whoever_is_cancelled_leaves_its_slot_to_others() -> None:
    async def run() -> list[int]:
        slots, entered, door = Slots(2), [], asyncio.Event()
        tasks = [asyncio.create_task(_holder(slots, group, entered, door)) for group in range(5)]
        await _settle()
        assert entered == [0, 1]
        tasks[2].cancel()  # while it waits
        slots.release()  # as if 0 had left: 3 is handed the slot, and is cancelled before it runs
        tasks[3].cancel()
        await _settle()
        assert entered == [0, 1, 4]
        door.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        return entered

    assert asyncio.run(run()) == [0, 1, 4]
