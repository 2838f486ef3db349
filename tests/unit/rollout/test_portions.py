"""Which finished groups a round may be begun with: whole portions, never the whole round, never another round's."""

import threading

from vime.handoff.ledger_types import LeasedGroup, Payload, Task
from vime.rollout.portions import Portions


def group(number: int, *, rows: int = 2) -> LeasedGroup:
    payload = Payload(checksum=number, num_bytes=9, num_tokens=9, num_rows=rows, min_version=0, max_version=0)
    return LeasedGroup(task=Task("train", number, 1), payload=payload)


A, B, C, D = (group(number) for number in range(4))


def test_a_portion_has_at_least_so_many_groups_and_each_group_is_in_one():
    portions = Portions(minimum=2)
    portions.open(0)
    portions.offer([A])
    assert portions.claim() == []
    portions.offer([A, B])
    assert portions.wait(0, 10)
    assert portions.claim() == [A, B]
    portions.offer([A, B, C])
    assert portions.claim() == []
    portions.offer([A, B, C, D])
    assert portions.claim() == [C, D]
    assert portions.close([A, B, C, D])


def test_the_rows_of_a_portion_can_be_dealt_to_all_ranks():
    """Groups of 2, 2 and 3 rows over 4 ranks: 2 and 4 rows fit, then 3 more do not."""
    portions = Portions(minimum=1, row_multiple=4)
    portions.open(0)
    portions.offer([A])
    assert portions.claim() == []
    portions.offer([A, B, group(2, rows=3)])
    assert portions.claim() == [A, B]


def test_no_portion_is_claimed_once_the_round_is_whole_and_a_guess_that_was_wrong_is_said():
    portions = Portions(minimum=1)
    portions.open(0)
    portions.offer([A])
    assert portions.claim() == [A]
    portions.offer([A, B])
    assert not portions.close([B, C])  # A was lost
    assert portions.claim() == []
    assert not portions.wait(0, 10)
    portions.open(1)
    assert portions.claimed == []


def test_who_waits_for_a_portion_learns_at_once_that_the_round_is_whole():
    portions, answers = Portions(minimum=1), []
    waiter = threading.Thread(target=lambda: answers.append(portions.wait(3, 30)))
    waiter.start()
    portions.open(3)
    portions.close([A])
    waiter.join(10)
    assert answers == [False]


def test_without_a_minimum_there_are_no_portions():
    portions = Portions()
    portions.open(0)
    portions.offer([A, B])
    assert not portions.wait(0, 0)
    assert portions.claim() == []
