"""Reading a round into a model-parallel group: one rank reads, its peers receive."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from vime.handoff.codec import Layout, decode_plan, decode_rows, encode_plan, encode_rows, from_buffer, to_buffer
from vime.types import HandoffError, HandoffLostError, RoundPlan, TrainRow, may_pass
from vime.utils.waits import peer, waiting

if TYPE_CHECKING:
    from vime.seams import Carrier


def fetch_round(
    carrier: Carrier,
    ticket: Any,
    *,
    dp_rank: int,
    is_source: bool,
    source_rank: int,
    group: dist.ProcessGroup | None,
    device: str | torch.device = "cpu",
) -> tuple[RoundPlan, dict[int, TrainRow]]:
    """The round's plan and this data-parallel rank's rows by row number.

    Collective over `group` (the TP x PP x CP peers of one DP index): every rank of it must call, also when it expects
    failure. Only the source reads the queue; its answer, or its failure, goes to the peers as data, so that nobody is
    left waiting in a collective: a header by object broadcast, the columns as one tensor on `device` (a CUDA device
    when `group` is NCCL). All ranks raise the same HandoffError. `source_rank` is a global rank. A group of one, or
    None, reads without communication.
    """
    if group is None or dist.get_world_size(group) == 1:
        return carrier.fetch(ticket, dp_rank)
    header: list[Any] = [None]
    buffer = np.zeros(0, dtype=np.uint8)
    if is_source:
        try:
            plan, rows = carrier.fetch(ticket, dp_rank)
            layout, buffer = _pack(rows)
            header = [("rows", encode_plan(plan), sorted(rows), layout, buffer.nbytes)]
        except Exception as error:  # boundary: the peers wait for the header; all ranks raise it below
            header = [("failure", f"{type(error).__name__}: {error}", may_pass(error))]
    with waiting("the rows that a peer reads", *([] if is_source else [peer(source_rank)]), deadline_s=None):
        dist.broadcast_object_list(header, src=source_rank, group=group, device=torch.device(device))
    if header[0][0] == "failure":
        kind = HandoffLostError if header[0][2] else HandoffError
        raise kind(f"data-parallel rank {dp_rank}: rank {source_rank} could not read the round: {header[0][1]}")
    _, plan_bytes, numbers, layout, num_bytes = header[0]
    payload = torch.from_numpy(buffer.copy()) if is_source else torch.empty(num_bytes, dtype=torch.uint8)
    payload = payload.to(device)
    if num_bytes:
        dist.broadcast(payload, src=source_rank, group=group)
    rows_in_order = decode_rows(from_buffer(layout, payload.cpu().numpy()))
    return decode_plan(plan_bytes), dict(zip(numbers, rows_in_order, strict=True))


def _pack(rows: dict[int, TrainRow]) -> tuple[Layout, np.ndarray[Any, np.dtype[np.uint8]]]:
    """Rows in the order of their numbers, with the optional columns that they carry."""
    ordered = [rows[number] for number in sorted(rows)]
    extra = sorted(ordered[0].extra) if ordered else []
    return to_buffer(encode_rows(ordered, extra))
