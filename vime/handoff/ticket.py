"""A ticket lists the rows of a round and where each is stored; with it a rank reads its own rows, by key.

It holds no token: the plan, a place for each row, and changes made to rows after they were stored (the rewards of
--custom-reward-post-process-path, the samples that --rollout-sample-filter-path takes out of the loss).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from vime.data.groups import GroupFacts
from vime.data.payload import unpack_rows
from vime.data.rows import TrainRow
from vime.handoff.stores import Handle, PayloadStore
from vime.types import HandoffError, RoundPlan, StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundTicket:
    """Picklable. Row n of the plan is at `places[n]`: the number of its handle, and its place in that chunk."""

    rollout_id: int
    partition: str
    plan: bytes
    handles: tuple[Handle, ...]
    groups: tuple[int, ...]  # the group of each handle, to check the rows that were read
    places: NDArray[np.int32]  # [rows, 2]
    rewards: NDArray[np.float64]  # [rows] the number that the advantage is made from
    is_removed: NDArray[np.bool_]  # [rows] in the group's mean, not in the loss


def make_ticket(
    plan: RoundPlan, groups: Sequence[tuple[GroupFacts, Sequence[Handle]]], *, partition: str
) -> RoundTicket:
    """Make the ticket of a round. `groups`: numbers and handles of the groups, in the order in which the plan numbers
    their rows."""
    handles: list[Handle] = []
    owners: list[int] = []
    places: list[NDArray[np.int32]] = []
    for facts, of_group in groups:
        place = np.stack([facts.rows["chunk"], facts.rows["place"]], axis=1).astype(np.int32)
        places.append(place + np.asarray([[len(handles), 0]], dtype=np.int32))
        handles += of_group
        owners += [facts.group_index] * len(of_group)
    rows = np.concatenate([facts.rows for facts, _ in groups])
    check_plan(plan, len(rows))
    return RoundTicket(
        rollout_id=plan.rollout_id,
        partition=partition,
        plan=encode_plan(plan),
        handles=tuple(handles),
        groups=tuple(owners),
        places=np.concatenate(places),
        rewards=rows["reward"].astype(np.float64),
        is_removed=rows["is_removed"].astype(bool),
    )


def read_rows(store: PayloadStore, ticket: RoundTicket, dp_rank: int) -> tuple[RoundPlan, dict[int, TrainRow]]:
    """Return the plan, and the rows of `dp_rank` by row number."""
    plan = decode_plan(ticket.plan)
    return plan, read_some(store, ticket, plan.rows_of(dp_rank))


def read_some(store: PayloadStore, ticket: RoundTicket, numbers: Sequence[int]) -> dict[int, TrainRow]:
    """Return the rows with these numbers."""
    needed = sorted({int(ticket.places[number, 0]) for number in numbers})
    found = store.get(ticket.partition, [ticket.handles[chunk] for chunk in needed])
    chunks: dict[int, list[TrainRow]] = {}
    for chunk, data in zip(needed, found, strict=True):
        try:
            chunks[chunk] = unpack_rows(data, rollout_id=ticket.rollout_id)
        except HandoffError as error:
            raise HandoffError(f"{ticket.partition}, {ticket.handles[chunk]}: {error}") from error
    rows = {}
    for number in numbers:
        chunk, place = map(int, ticket.places[number])
        row = chunks[chunk][place] if place < len(chunks[chunk]) else None
        if row is None or row.group_index != ticket.groups[chunk]:
            raise HandoffError(
                f"{ticket.partition}, {ticket.handles[chunk]}: row {number} of round {ticket.rollout_id} is not there; "
                f"expected one of group {ticket.groups[chunk]}. The store returned another group's rows."
            )
        rows[number] = _as_decided(row, float(ticket.rewards[number]), is_removed=bool(ticket.is_removed[number]))
    return rows


def _as_decided(row: TrainRow, reward: float, *, is_removed: bool) -> TrainRow:
    if is_removed:
        return replace(row, reward=reward, loss_mask=np.zeros_like(row.loss_mask))
    return row if row.reward == reward else replace(row, reward=reward)


def check_plan(plan: RoundPlan, num_rows: int) -> None:
    """Refuse a plan that does not name every row exactly once."""
    planned = sorted(row for step in plan.steps for rank in step.micro_batches for batch in rank for row in batch)
    if planned != list(range(num_rows)):
        raise HandoffError(
            f"round {plan.rollout_id}: the plan names {len(planned)} rows, the round has {num_rows}; expected each "
            "row exactly once. Plan the round from the same groups that are handed over."
        )


def encode_plan(plan: RoundPlan) -> bytes:
    steps = [
        [step.num_samples, step.num_tokens, step.micro_batches, *([step.sample_tokens] if step.sample_tokens else [])]
        for step in plan.steps
    ]
    return json.dumps({"rollout_id": plan.rollout_id, "steps": steps}, separators=(",", ":")).encode()


def decode_plan(data: bytes) -> RoundPlan:
    """Read what `encode_plan` wrote."""
    try:
        record = json.loads(data)
        return RoundPlan(
            rollout_id=record["rollout_id"],
            steps=tuple(
                StepPlan(
                    micro_batches=tuple(tuple(tuple(batch) for batch in rank) for rank in micro_batches),
                    num_samples=num_samples,
                    num_tokens=num_tokens,
                    sample_tokens=tuple((row, tokens) for of_step in sample_tokens for row, tokens in of_step),
                )
                for num_samples, num_tokens, micro_batches, *sample_tokens in record["steps"]
            ),
        )
    except (KeyError, TypeError) as error:
        raise HandoffError(f"plan: lacks {error}. The writer is of another version.") from error
    except ValueError as error:
        raise HandoffError(f"plan: {len(data)} bytes are not a plan: {error}. The payload is torn.") from error
