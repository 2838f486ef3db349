"""A ticket lists the rows of a round and where each is stored; with it a rank reads its own rows, by key.

It holds no token: the plan, a place for each row, and changes made to rows after they were stored (the rewards of
--custom-reward-post-process-path, the samples that --rollout-sample-filter-path takes out of the loss). The driver
makes it; `fetch_round` reads it into a model-parallel group, where one rank reads and its peers receive;
`check_staleness` holds the bound where rows are consumed.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from vime.data.payload import join_record, pack_rows, split_record, unpack_rows
from vime.data.rows import GroupFacts, TrainRow
from vime.handoff.group_store import Handle, PayloadStore
from vime.types import HandoffError, HandoffLostError, RoundPlan, StaleError, StepPlan, Version, may_pass
from vime.utils.waits import peer, waiting

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

STALENESS_MEAN = "transferqueue/sample_staleness/mean"
STALENESS_MAX = "transferqueue/sample_staleness/max"


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


def fetch_round(
    store: PayloadStore,
    ticket: RoundTicket,
    *,
    dp_rank: int,
    is_source: bool,
    source_rank: int,
    group: dist.ProcessGroup | None,
    device: str | torch.device = "cpu",
) -> tuple[RoundPlan, dict[int, TrainRow]]:
    """Return the round's plan and this data-parallel rank's rows by row number.

    Collective over `group` (the TP x PP x CP peers of one DP index): every rank of it must call, also when it expects
    failure. Only the source reads the store. Its rows, or its failure, go to the peers as data, so that no peer is left
    waiting in a collective: a header by object broadcast, the rows as one tensor on `device` (a CUDA device when
    `group` is NCCL). All ranks raise the same HandoffError. `source_rank` is a global rank. A group of one, or None,
    reads without communication.
    """
    import torch  # the driver makes tickets without it
    import torch.distributed as dist

    if group is None or dist.get_world_size(group) == 1:
        return read_rows(store, ticket, dp_rank)
    header: list[tuple[str, int | str, bool] | None] = [None]
    data = b""
    if is_source:
        try:
            _, rows = read_rows(store, ticket, dp_rank)
            # one chunk for each group: values stored once a chunk differ between groups
            by_group = itertools.groupby((rows[number] for number in sorted(rows)), key=lambda row: row.group_index)
            data = join_record([pack_rows(list(group)) for _, group in by_group], b"")
            header = [("rows", len(data), False)]
        except Exception as error:  # boundary: the peers wait for the header; all ranks raise it below
            header = [("failure", f"{type(error).__name__}: {error}", may_pass(error))]
    with waiting("the rows that a peer reads", *([] if is_source else [peer(source_rank)]), deadline_s=None):
        dist.broadcast_object_list(header, src=source_rank, group=group, device=torch.device(device))
    assert header[0] is not None, "the source sent a header"
    _, said, is_lost = header[0]
    if isinstance(said, str):
        kind = HandoffLostError if is_lost else HandoffError
        raise kind(f"data-parallel rank {dp_rank}: rank {source_rank} could not read the round: {said}")
    buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8) if is_source else torch.empty(said).byte()
    buffer = buffer.to(device)
    dist.broadcast(buffer, src=source_rank, group=group)
    plan = decode_plan(ticket.plan)
    chunks, _ = split_record(np.asarray(buffer.cpu()).tobytes())
    received = [row for chunk in chunks for row in unpack_rows(chunk, rollout_id=ticket.rollout_id)]
    return plan, dict(zip(plan.rows_of(dp_rank), received, strict=True))


def check_staleness(rows: Sequence[TrainRow], *, version: Version, max_staleness: int | None) -> list[int]:
    """Refuse rows older than the bound; return the staleness of each row that trains.

    staleness of a row = version of the weights it trains - oldest version among its trainable tokens. A row without
    trainable tokens has none. Example: tokens of versions 3 and 4 trained on weights 5 are 2 stale. Without a bound
    (None, for recorded rounds: their versions are those of the run that made them) it only measures.
    """
    found: list[int] = []
    for row in rows:
        if row.num_trainable == 0:
            continue
        staleness = version - row.oldest_version
        if max_staleness is not None and not 0 <= staleness <= max_staleness:
            versions = sorted({span.version for span in row.token_policy_versions})
            reason = "newer than the weights" if staleness < 0 else f"{staleness} versions behind"
            raise StaleError(
                f"sample {row.sample_index} of group {row.group_index}: sampled by versions {versions}, {reason} "
                f"{version} that train on it; the bound is {max_staleness} (--transferqueue-max-staleness). Raise the "
                "bound, or update the engines more often (--update-weights-interval)."
            )
        found.append(staleness)
    return found


def staleness_metrics(found: Sequence[int]) -> dict[str, float]:
    """Return mean and maximum over the rows of a round, by metric name."""
    return {
        STALENESS_MEAN: sum(found) / len(found) if found else 0.0,
        STALENESS_MAX: float(max(found, default=0)),
    }
