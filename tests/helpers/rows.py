"""Training rows and groups for tests: by hand, as hypothesis strategies, and handed over."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from vime.batching.plan import plan_round
from vime.data.rows import TrainRow
from vime.handoff.group_store import PayloadStore, encode_group
from vime.handoff.ticket import RoundTicket, make_ticket, read_rows
from vime.types import RoundPlan, VersionSpan

STATUSES = ("pending", "completed", "truncated", "aborted", "failed")


def make_row(
    sample_index: int = 0,
    *,
    group_index: int = 0,
    rollout_id: int = 0,
    prompt: Sequence[int] = (7, 8),
    response: Sequence[int] = (1, 2, 3),
    loss_mask: Sequence[int] | None = None,
    log_probs: Sequence[float] | None = None,
    versions: Sequence[VersionSpan] | None = None,
    reward: float = 1.0,
) -> TrainRow:
    length = len(response)
    return TrainRow(
        sample_index=sample_index,
        group_index=group_index,
        rollout_id=rollout_id,
        tokens=(*prompt, *response),
        response_length=length,
        loss_mask=tuple(loss_mask) if loss_mask is not None else (1,) * length,
        rollout_log_probs=tuple(log_probs) if log_probs is not None else (-0.5,) * length,
        token_policy_versions=tuple(versions) if versions is not None else (VersionSpan(0, 0, length),),
        reward=reward,
        raw_reward=reward,
        status="completed",
        truncated=False,
    )


def make_groups(num_groups: int, group_size: int, *, rollout_id: int = 0) -> list[list[TrainRow]]:
    """Groups whose rows all differ in length, tokens and reward."""
    return [
        [
            make_row(
                group * group_size + at,
                group_index=group,
                rollout_id=rollout_id,
                prompt=range(10, 12 + group),
                response=range(100, 101 + (3 * group + 5 * at) % 7),
                reward=group - at / 4,
            )
            for at in range(group_size)
        ]
        for group in range(num_groups)
    ]


def flatten(groups: Sequence[Sequence[TrainRow]]) -> list[TrainRow]:
    return [row for group in groups for row in group]


def hand_over(
    store: PayloadStore, plan: RoundPlan, groups: Sequence[Sequence[TrainRow]], *, partition: str = "train_0"
) -> RoundTicket:
    """Encode and store a round's groups, each under keys of its own; the ticket with which ranks read them."""
    placed = []
    for rows in groups:
        group = encode_group(rows)
        keys = [f"{group.facts.group_index}.{number}" for number in range(len(group.chunks))]
        placed.append((group.facts, store.put(partition, keys, group.chunks)))
    return make_ticket(plan, placed, partition=partition)


def read_all(store: PayloadStore, ticket: RoundTicket) -> dict[int, TrainRow]:
    """The rows of every rank, each of which gets what the plan gives it and nothing that another one has."""
    found: dict[int, TrainRow] = {}
    dp_rank, dp_size = 0, 1
    while dp_rank < dp_size:
        plan, rows = read_rows(store, ticket, dp_rank)
        dp_size = plan.dp_size
        assert tuple(sorted(rows)) == plan.rows_of(dp_rank)
        assert not rows.keys() & found.keys()
        found |= rows
        dp_rank += 1
    return found


def plan_for(
    groups: Sequence[Sequence[TrainRow]], *, rollout_id: int = 0, dp_size: int = 2, steps: int = 1
) -> RoundPlan:
    rows = flatten(groups)
    return plan_round(
        rollout_id,
        [row.total_length for row in rows],
        [row.num_trainable for row in rows],
        dp_size=dp_size,
        samples_per_step=len(rows) // steps,
        micro_batch_size=2,
        max_tokens_per_micro_batch=None,
        loads=[row.total_length for row in rows],
    )


@st.composite
def train_rows(draw: st.DrawFn, *, sample_index: int, group_index: int, rollout_id: int) -> TrainRow:
    """Any legal row, with optional columns of several shapes and types."""
    length = draw(st.integers(0, 6))
    cuts = sorted(draw(st.sets(st.integers(1, max(1, length - 1)), max_size=3))) if length > 1 else []
    edges = [0, *cuts, length] if length else []
    spans = [VersionSpan(draw(st.integers(0, 9)), edges[at], edges[at + 1]) for at in range(len(edges) - 1)]
    log_prob = st.floats(-1e4, 0, width=32)
    prompt = draw(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=4))
    response = draw(st.lists(st.integers(0, 2**31 - 1), min_size=length, max_size=length))
    return TrainRow(
        sample_index=sample_index,
        group_index=group_index,
        rollout_id=rollout_id,
        tokens=(*prompt, *response),
        response_length=length,
        loss_mask=tuple(draw(st.lists(st.integers(0, 1), min_size=length, max_size=length))),
        rollout_log_probs=tuple(draw(st.lists(log_prob, min_size=length, max_size=length))),
        token_policy_versions=tuple(spans),
        reward=draw(st.floats(allow_nan=False, allow_infinity=False)),
        raw_reward=draw(st.floats(allow_nan=False, allow_infinity=False)),
        status=draw(st.sampled_from(STATUSES)),
        truncated=draw(st.booleans()),
        extra={
            "teacher_log_probs": np.array(draw(st.lists(log_prob, min_size=length, max_size=length)), np.float32),
            "experts": np.arange(3 * (len(prompt) + length), dtype=np.int16).reshape(-1, 3) - 1,
            "score": np.asarray(draw(st.floats(allow_nan=False))),
            "note": draw(st.binary(max_size=9)),
        },
        attempt=draw(st.integers(0, 2**31 - 1)),
        partition_id="train",
        producer_id="worker-0",
    )


@st.composite
def train_groups(draw: st.DrawFn) -> list[TrainRow]:
    group_index, rollout_id = draw(st.integers(0, 2**40)), draw(st.integers(0, 2**40))
    size = draw(st.integers(1, 4))
    return [draw(train_rows(sample_index=at, group_index=group_index, rollout_id=rollout_id)) for at in range(size)]
