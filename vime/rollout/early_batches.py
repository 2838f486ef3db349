"""Chooses the finished groups of a round that the trainers start with while other groups are still generated.

Two threads of the RolloutManager share it: one waits for the whole round and reports the ready groups (`open`, `offer`,
`close`), one gives early batches to the trainers (`wait`, `claim`). An early batch is a guess: it is right if the
ledger's lease contains the same groups, and `close` tells whether it does.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import accumulate

from vime.handoff.ledger_types import LeasedGroup


class EarlyBatches:
    """Owned by the data source of finished groups."""

    def __init__(self, *, minimum: int = 0, row_multiple: int = 1) -> None:
        """`minimum`: the fewest groups of an early batch; 0: there are none. `row_multiple`: the number of
        data-parallel ranks, each of which gets equally many of its rows."""
        self.minimum, self._row_multiple = minimum, row_multiple
        self._changed = threading.Condition()
        self._round_id, self._is_open = -1, False
        self._unclaimed: list[LeasedGroup] = []
        self._claimed: list[LeasedGroup] = []

    @property
    def claimed(self) -> list[LeasedGroup]:
        with self._changed:
            return list(self._claimed)

    def open(self, round_id: int) -> None:
        """Begin to wait for round `round_id`."""
        with self._changed:
            self._round_id, self._is_open = round_id, True
            self._unclaimed, self._claimed = [], []
            self._changed.notify_all()

    def offer(self, ready: Sequence[LeasedGroup]) -> None:
        """Report the ready groups of the open round; at least one group of it is still missing."""
        with self._changed:
            known = set(self._claimed)
            self._unclaimed = [group for group in ready if group not in known]
            self._changed.notify_all()

    def close(self, leased: Sequence[LeasedGroup]) -> bool:
        """End the claims: the round is complete, or it failed (nothing is leased). Return whether the claimed groups
        are part of the round."""
        with self._changed:
            self._is_open, self._unclaimed = False, []
            self._changed.notify_all()
            return set(self._claimed) <= set(leased)

    def wait(self, round_id: int, timeout_s: float) -> bool:
        """Wait until an early batch of the round can be claimed. False when the round is complete, or over, or after
        `timeout_s`."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._round_id >= round_id and (not self._is_open or self._fits()), timeout_s
            )
            return self._round_id == round_id and self._is_open and bool(self._fits())

    def claim(self) -> list[LeasedGroup]:
        """Return the groups of the next early batch; empty when there are no more."""
        with self._changed:
            early_batch = self._unclaimed[: self._fits()] if self._is_open else []
            self._unclaimed = self._unclaimed[len(early_batch) :]
            self._claimed += early_batch
            return early_batch

    def _fits(self) -> int:
        """Return how many of the unclaimed groups make an early batch: as many as can be split equally over the ranks,
        0 below the minimum."""
        rows = accumulate(group.payload.num_rows for group in self._unclaimed)
        whole = [number for number, count in enumerate(rows, start=1) if count % self._row_multiple == 0]
        return whole[-1] if self.minimum and whole and whole[-1] >= self.minimum else 0
