"""Which finished groups a round may be begun with: whole early batches, never the whole round, never another
round's."""

import threading

from vime.handoff.ledger_types import LeasedGroup, Payload, Task
from vime.rollout.early_batches import EarlyBatches


def group(number: int, *, rows: int = 2) -> LeasedGroup:
    payload = Payload(checksum=number, num_bytes=9, num_tokens=9, num_rows=rows, min_version=0, max_version=0)
    return LeasedGroup(task=Task("train", number, 1), payload=payload)


A, B, C, D = (group(number) for number in range(4))


def test_a_portion_has_at_least_so_many_groups_and_each_group_is_in_one():
    early_batches = EarlyBatches(minimum=2)
    early_batches.open(0)
    early_batches.offer([A])
    assert early_batches.claim() == []
    early_batches.offer([A, B])
    assert early_batches.wait(0, 10)
    assert early_batches.claim() == [A, B]
    early_batches.offer([A, B, C])
    assert early_batches.claim() == []
    early_batches.offer([A, B, C, D])
    assert early_batches.claim() == [C, D]
    assert early_batches.close([A, B, C, D])


def test_the_rows_of_a_portion_can_be_dealt_to_all_ranks():
    """Groups of 2, 2 and 3 rows over 4 ranks: 2 and 4 rows fit, then 3 more do not."""
    early_batches = EarlyBatches(minimum=1, row_multiple=4)
    early_batches.open(0)
    early_batches.offer([A])
    assert early_batches.claim() == []
    early_batches.offer([A, B, group(2, rows=3)])
    assert early_batches.claim() == [A, B]


def test_no_portion_is_claimed_once_the_round_is_whole_and_a_guess_that_was_wrong_is_said():
    early_batches = EarlyBatches(minimum=1)
    early_batches.open(0)
    early_batches.offer([A])
    assert early_batches.claim() == [A]
    early_batches.offer([A, B])
    assert not early_batches.close([B, C])  # A was lost
    assert early_batches.claim() == []
    assert not early_batches.wait(0, 10)
    early_batches.open(1)
    assert early_batches.claimed == []


def test_who_waits_for_a_portion_learns_at_once_that_the_round_is_whole():
    early_batches, answers = EarlyBatches(minimum=1), []
    waiter = threading.Thread(target=lambda: answers.append(early_batches.wait(3, 30)))
    waiter.start()
    early_batches.open(3)
    early_batches.close([A])
    waiter.join(10)
    assert answers == [False]


def test_without_a_minimum_there_are_no_early_batches():
    early_batches = EarlyBatches()
    early_batches.open(0)
    early_batches.offer([A, B])
    assert not early_batches.wait(0, 0)
    assert early_batches.claim() == []
