"""A round of samples as its one rank would train it: converted, decided upon, stored and read back by key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vime.data.rows import TrainRow, check_versions
from vime.handoff.group_store import MemoryStore
from vime.handoff.ticket import make_ticket, read_rows
from vime.rollout.convert import encoded_group, set_custom_rewards
from vime.types import RoundPlan, Sample, StepPlan


def trained_rows(args: Any, groups: list[list[Sample]], rollout_id: int) -> list[list[TrainRow]]:
    """What the RolloutManager does of a round in the modes off and buffer, and a rank; the rows of each group."""
    encoded = [encoded_group(args, samples) for samples in groups]
    facts = [group.facts for group in encoded]
    set_custom_rewards(args, facts, lambda: groups)
    if not (args.debug_rollout_only or args.load_debug_rollout_data):
        check_versions(facts, rollout_id, args.transferqueue_max_staleness)
    store, placed = MemoryStore(), []
    for group in encoded:
        keys = [f"{group.facts.group_index}.{number}" for number in range(len(group.chunks))]
        placed.append((group.facts, store.put("train", keys, group.chunks)))
    numbers = tuple(range(sum(map(len, groups))))
    step = StepPlan(micro_batches=((numbers,),), num_samples=len(numbers), num_tokens=1)
    ticket = make_ticket(RoundPlan(rollout_id=rollout_id, steps=(step,)), placed, partition="train")
    _, rows = read_rows(store, ticket, 0)
    return _cut([rows[number] for number in numbers], [len(group) for group in groups])


def _cut(rows: list[TrainRow], sizes: Sequence[int]) -> list[list[TrainRow]]:
    taken = iter(rows)
    return [[next(taken) for _ in range(size)] for size in sizes]
