"""Reading a round into a model-parallel group: one rank reads, its peers receive."""

from __future__ import annotations

import itertools

import numpy as np
import torch
import torch.distributed as dist

from vime.data.payload import join_record, pack_rows, split_record, unpack_rows
from vime.data.rows import TrainRow
from vime.handoff.stores import PayloadStore
from vime.handoff.ticket import RoundTicket, decode_plan, read_rows
from vime.types import HandoffError, HandoffLostError, RoundPlan, may_pass
from vime.utils.waits import peer, waiting


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
