"""Mode `buffer`: whole rounds travel through TransferQueue.

One partition per round (`train_<rollout_id>`). In it, for each data-parallel rank, the rows that the plan gives to this
rank, as one payload (`payload.rows_to_bytes`) in as many parts as PART_BYTES asks for, under keys that no other attempt
shares. A reader fetches its own rows and nothing else; plan and keys are in the ticket.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vime.handoff.codec import deal_rows, decode_plan, encode_plan
from vime.handoff.payload import bytes_to_rows, rows_to_bytes
from vime.handoff.queue_client import QueueAddress, QueueClient
from vime.types import HandoffError, RoundPlan, TrainGroup, TrainRow, WaitTimeoutError
from vime.utils.failpoints import Point, failpoint
from vime.utils.waits import waiting

if TYPE_CHECKING:
    from vime.config.training import QueueConfig

logger = logging.getLogger(__name__)

CAPACITY_POLL_S = 0.05
PART_BYTES = 64 << 20
"""A longer payload is cut: its parts lie on several storage units, and none takes long to move."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueTicket:
    """Where one round lies: `keys[dp_rank]` are the parts of that rank's payload."""

    rollout_id: int
    partition: str
    plan: bytes
    keys: tuple[tuple[str, ...], ...]


class TransferQueueBridge:
    """A Carrier over TransferQueue; `connect` in each process, after `queue_client.start_queue` in the driver."""

    @classmethod
    def connect(cls, address: QueueAddress, queue: QueueConfig) -> TransferQueueBridge:
        """Join the queue from this process, waiting until it answers (deadline --transferqueue-timeout-secs)."""
        return cls(QueueClient(address, queue.transferqueue_timeout_secs), queue)

    def __init__(self, client: QueueClient, queue: QueueConfig) -> None:
        self._client = client
        self._prefix, self._extra = queue.transferqueue_partition, queue.transfer_queue_extra_data_fields
        self._timeout_s, self._capacity = queue.transferqueue_timeout_secs, queue.transferqueue_max_staleness + 1

    def put(self, plan: RoundPlan, groups: Sequence[TrainGroup], *, portion: int = 0) -> QueueTicket:
        """Store a round and answer its ticket. Runs in the RolloutManager, the only writer.

        Waits for: room, at most `max staleness + 1` rounds may lie in the queue; a portion is part of one of them.
        Unblocked by: `clear`, which the driver asks for.
        """
        dealt = deal_rows(plan, groups)
        partition = f"{self._prefix}_{plan.rollout_id}" + (f"_portion{portion}" if portion else "")
        attempt = uuid.uuid4().hex[:12]
        keys, parts = [], {}
        for dp_rank, rows in enumerate(dealt):
            data = rows_to_bytes(rows, self._extra)
            cut = [data[start : start + PART_BYTES] for start in range(0, len(data), PART_BYTES)]
            keys.append(tuple(f"rank{dp_rank}.{at}#{attempt}" for at in range(len(cut))))
            parts |= zip(keys[-1], cut, strict=True)
        with waiting("room in the queue for a round", "driver", deadline_s=self._timeout_s):
            self._wait_for_room(partition)
        try:
            self._client.store_rows(partition, list(parts), list(parts.values()))
            failpoint(Point.PUT_HALF)
            self._client.confirm_rows(partition, list(parts))
        except (HandoffError, WaitTimeoutError):
            self._discard(partition)
            raise
        return QueueTicket(rollout_id=plan.rollout_id, partition=partition, plan=encode_plan(plan), keys=tuple(keys))

    def fetch(self, ticket: QueueTicket, dp_rank: int) -> tuple[RoundPlan, dict[int, TrainRow]]:
        """The plan, and the rows of `dp_rank` by row number."""
        plan = decode_plan(ticket.plan)
        numbers = plan.rows_of(dp_rank)
        rows = bytes_to_rows(b"".join(self._client.get_rows(ticket.partition, list(ticket.keys[dp_rank]))))
        rounds = {row.rollout_id for row in rows}
        if len(rows) != len(numbers) or rounds - {ticket.rollout_id}:
            raise HandoffError(
                f"{ticket.partition}, rank {dp_rank}: {len(rows)} rows of rounds {sorted(rounds)}, expected "
                f"{len(numbers)} rows of round {ticket.rollout_id}. The queue answered another round's rows."
            )
        return plan, dict(zip(numbers, rows, strict=True))

    def clear(self, ticket: QueueTicket) -> None:
        """Remove a round. The driver asks for it when every consumer is done; makes room for the next `put`."""
        self._client.clear_partition(ticket.partition)

    def close(self) -> None:
        """Leave the queue; its actors go on. Calling it again does nothing."""
        self._client.close()

    def _wait_for_room(self, partition: str) -> None:
        ends = time.monotonic() + self._timeout_s
        pattern = re.compile(rf"{re.escape(self._prefix)}_\d+")
        while True:
            waiting = sorted(name for name in self._client.list_partitions() if pattern.fullmatch(name))
            if partition in waiting:
                raise HandoffError(f"partition {partition} is there already; clear it before the round is put again.")
            if len(waiting) < self._capacity:
                return
            if time.monotonic() > ends:
                raise WaitTimeoutError(
                    f"room for partition {partition}",
                    self._timeout_s,
                    "driver",
                    f"It must clear {', '.join(waiting)}; --transferqueue-max-staleness {self._capacity - 1} lets at "
                    f"most {self._capacity} wait. See what the trainer does, or raise --transferqueue-timeout-secs.",
                )
            time.sleep(CAPACITY_POLL_S)

    def _discard(self, partition: str) -> None:
        """Remove what a failed put left behind, so that a second attempt is possible."""
        try:
            self._client.clear_partition(partition)
        except (HandoffError, WaitTimeoutError) as error:
            logger.warning("partition %s may hold an incomplete round: %s", partition, error)
