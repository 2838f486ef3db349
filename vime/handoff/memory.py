"""A carrier and a store of rows inside one process, for tests and examples: TransferQueue without its processes."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from vime.handoff.codec import deal_rows, decode_plan, encode_plan
from vime.handoff.payload import bytes_to_rows, rows_to_bytes
from vime.types import HandoffError, HandoffLostError, RoundPlan, TrainGroup, TrainRow, WaitTimeoutError


class MemoryRows:
    """A keyed store of rows over a dict (`group_store.Rows`)."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, str], bytes] = {}

    def put_rows(self, partition: str, keys: list[str], payloads: Sequence[bytes]) -> None:
        self.rows |= {(partition, key): payload for key, payload in zip(keys, payloads, strict=True)}

    def get_rows(self, partition: str, keys: list[str]) -> list[bytes]:
        missing = [key for key in keys if (partition, key) not in self.rows]
        if missing:
            raise HandoffLostError(f"{partition}: rows {missing} are not here: they were cleared, or never put.")
        return [self.rows[partition, key] for key in keys]

    def clear_rows(self, partition: str, keys: list[str]) -> None:
        for key in keys:
            self.rows.pop((partition, key), None)

    def close(self) -> None:
        self.rows.clear()


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTicket:
    """Which partition holds a round."""

    rollout_id: int
    partition: str


class MemoryCarrier:
    """A Carrier over a dict. At most `max_staleness + 1` rounds lie here; `put` waits for `clear`, with a deadline."""

    def __init__(self, *, max_staleness: int = 0, timeout_s: float = 10.0, extra: Sequence[str] = ()) -> None:
        self._capacity, self._timeout_s, self._extra = max_staleness + 1, timeout_s, tuple(extra)
        self._changed = threading.Condition()
        self.partitions: dict[str, tuple[bytes, list[bytes]]] = {}  # the plan, and a payload per data-parallel rank

    def put(self, plan: RoundPlan, groups: Sequence[TrainGroup], *, portion: int = 0) -> MemoryTicket:
        """Waits for: a partition to be cleared. Unblocked by: `clear`."""
        payloads = [rows_to_bytes(rows, self._extra) for rows in deal_rows(plan, groups)]
        partition = f"memory_{plan.rollout_id}" + (f"_portion{portion}" if portion else "")
        with self._changed:
            if partition in self.partitions:
                raise HandoffError(f"partition {partition} is there already; clear it before the round is put again.")
            if not self._changed.wait_for(lambda: len(self.partitions) < self._capacity, timeout=self._timeout_s):
                raise WaitTimeoutError(
                    f"room for partition {partition}",
                    self._timeout_s,
                    "driver",
                    f"{sorted(self.partitions)} were not cleared.",
                )
            self.partitions[partition] = (encode_plan(plan), payloads)
        return MemoryTicket(rollout_id=plan.rollout_id, partition=partition)

    def fetch(self, ticket: MemoryTicket, dp_rank: int) -> tuple[RoundPlan, dict[int, TrainRow]]:
        """The plan, and the rows of `dp_rank` by row number."""
        with self._changed:
            if ticket.partition not in self.partitions:
                raise HandoffLostError(f"partition {ticket.partition} is not here: it was cleared, or never put.")
            data, payloads = self.partitions[ticket.partition]
        plan = decode_plan(data)
        return plan, dict(zip(plan.rows_of(dp_rank), bytes_to_rows(payloads[dp_rank]), strict=True))

    def clear(self, ticket: MemoryTicket) -> None:
        with self._changed:
            self.partitions.pop(ticket.partition, None)
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self.partitions.clear()
            self._changed.notify_all()
