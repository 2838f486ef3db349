"""What one process of the fetch_round test does."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

from tests.helpers.dist_launch import Ranks
from tests.helpers.rows import hand_over, make_groups, plan_for
from vime.data.rows import TrainRow
from vime.handoff.group_store import MemoryStore
from vime.types import HandoffError, RoundPlan, WaitTimeoutError

WORLD = 4


def rounds() -> tuple[RoundPlan, list[list[TrainRow]]]:
    groups = make_groups(3, 4, rollout_id=6)
    return plan_for(groups, rollout_id=6, steps=2), groups


class _WatchedStore(MemoryStore):
    """Notes what was read, and can fail like a queue that does not answer."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[list[str]] = []
        self.is_broken = False

    def get(self, partition: str, handles: Sequence[Any]) -> list[bytes]:
        if self.is_broken:
            raise WaitTimeoutError("the queue", 3, "TransferQueue")
        self.reads.append(list(handles))
        return super().get(partition, handles)


def run(ranks: Ranks) -> dict[str, Any]:
    """Ranks 0 and 1 are data-parallel index 0, ranks 2 and 3 index 1; the lower rank of each pair is the source."""
    import torch.distributed as dist

    from vime.handoff.ticket import fetch_round

    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{ranks.rendezvous('world', WORLD)}",
        rank=ranks.rank,
        world_size=ranks.world_size,
        timeout=datetime.timedelta(seconds=60),
    )
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    alone = [dist.new_group([rank]) for rank in range(ranks.world_size)]
    dp_rank = ranks.rank // 2
    source = 2 * dp_rank
    store = _WatchedStore()
    ticket = hand_over(store, *rounds())
    common = {"dp_rank": dp_rank, "is_source": ranks.rank == source, "source_rank": source, "group": groups[dp_rank]}

    plan, rows = fetch_round(store, ticket, **common)
    answer: dict[str, Any] = {"plan": plan, "rows": rows, "reads": list(store.reads)}
    store.is_broken = dp_rank == 0
    try:
        fetch_round(store, ticket, **common)
        answer["failure"] = "none"
    except HandoffError as error:
        answer["failure"] = str(error)
    store.is_broken = False
    answer["after"] = fetch_round(store, ticket, **common)[1]
    by_itself = {"dp_rank": dp_rank, "is_source": True, "source_rank": ranks.rank, "group": alone[ranks.rank]}
    answer["alone"] = fetch_round(store, ticket, **by_itself)[1]
    dist.barrier()  # rank 0 holds the store through which a slower rank may only now be meeting its own group
    dist.destroy_process_group()
    return answer
