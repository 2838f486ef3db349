"""Mode `buffer`: whole rounds travel through TransferQueue.

One partition per round (`train_<rollout_id>`), one row per group under a key that no other attempt shares, and one
manifest row, written last, with the plan and the keys in order. Readers go by the manifest.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from vime.handoff.codec import (
    Manifest,
    check_round,
    decode_group,
    decode_manifest,
    encode_group,
    encode_manifest,
)
from vime.handoff.queue_client import QueueAddress, QueueClient
from vime.types import HandoffError, RoundPlan, TrainGroup, TrainRow, WaitTimeoutError
from vime.utils.failpoints import Point, failpoint
from vime.utils.waits import waiting

if TYPE_CHECKING:
    from vime.config.training import QueueConfig

logger = logging.getLogger(__name__)

CAPACITY_POLL_S = 0.05
MANIFEST_FIELD = "manifest"


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueTicket:
    """Where one round lies."""

    rollout_id: int
    partition: str
    manifest_key: str


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
        Unblocked by: the driver's `clear`.
        """
        check_round(plan, groups)
        partition = f"{self._prefix}_{plan.rollout_id}" + (f"_portion{portion}" if portion else "")
        attempt = uuid.uuid4().hex[:12]
        keys = [f"{group.group_index}#{attempt}" for group in groups]
        rows = [encode_group(group, self._extra) for group in groups]
        manifest = Manifest(plan=plan, keys=tuple(keys), group_sizes=tuple(len(group.rows) for group in groups))
        manifest_key = f"manifest#{attempt}"
        manifest_row = {MANIFEST_FIELD: np.frombuffer(encode_manifest(manifest), dtype=np.uint8)}
        with waiting("room in the queue for a round", "driver", deadline_s=self._timeout_s):
            self._wait_for_room(partition)
        try:
            self._client.put_rows(partition, keys, rows)
            failpoint(Point.PUT_HALF)
            self._client.put_rows(partition, [manifest_key], [manifest_row])
        except (HandoffError, WaitTimeoutError):
            self._discard(partition)
            raise
        return QueueTicket(rollout_id=plan.rollout_id, partition=partition, manifest_key=manifest_key)

    def fetch(self, ticket: QueueTicket, dp_rank: int) -> tuple[RoundPlan, dict[int, TrainRow]]:
        """The plan, and the rows of `dp_rank` by row number; reads only the groups that hold one of them."""
        partition = ticket.partition
        [manifest_row] = self._client.get_rows(partition, [ticket.manifest_key])
        manifest = decode_manifest(manifest_row[MANIFEST_FIELD].tobytes())
        if manifest.plan.rollout_id != ticket.rollout_id:
            raise HandoffError(f"{partition} holds round {manifest.plan.rollout_id}, expected {ticket.rollout_id}.")
        wanted = set(manifest.plan.rows_of(dp_rank))
        places = manifest.groups_of(dp_rank)
        payloads = self._client.get_rows(partition, [key for key, _, _ in places])
        rows: dict[int, TrainRow] = {}
        for (key, first, size), columns in zip(places, payloads, strict=True):
            group = decode_group(columns)
            if len(group.rows) != size or group.rows[0].rollout_id != ticket.rollout_id:
                raise HandoffError(
                    f"{partition}, group {key}: {len(group.rows)} rows of round {group.rows[0].rollout_id}, expected "
                    f"{size} rows of round {ticket.rollout_id}. The queue answered another group's row."
                )
            rows.update({first + at: row for at, row in enumerate(group.rows) if first + at in wanted})
        return manifest.plan, rows

    def clear(self, ticket: QueueTicket) -> None:
        """Remove a round. Runs in the driver when every consumer is done; makes room for the next `put`."""
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
