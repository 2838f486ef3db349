"""When a part that was lost is started again: at once, and after each further loss later."""

from __future__ import annotations

import time

from vime.utils.waits import NO_NODE, STARTS_AGAIN, Stretch, doing

FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 2.0, 60.0


class Losses:
    """Losses of the part `name` since it was last known to be well. Times are monotonic."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.count = 0
        self.first_at: float | None = None
        self.start_at = 0.0  # when it is started again
        self.has_node = True  # of the cluster, with room for it
        self._told: Stretch | None = None

    def add(self) -> float:
        """Note a loss. Returns the seconds until it is started again: none after the first, then more and more."""
        now = time.monotonic()
        self.count += 1
        backoff_s = min(FIRST_BACKOFF_S * 2 ** min(self.count - 2, 10), LONGEST_BACKOFF_S) if self.count > 1 else 0.0
        self.first_at = self.first_at or now
        self.start_at = now + backoff_s
        self.has_node = True
        self._tell(f"{STARTS_AGAIN}{self._name}")
        return backoff_s

    def see(self, *, has_node: bool) -> None:
        """Note whether the cluster has a node for it."""
        if has_node == self.has_node:
            return
        self.has_node = has_node
        self._tell(f"{STARTS_AGAIN if has_node else NO_NODE}{self._name}")

    def end(self) -> float | None:
        """Note that it is well. Returns for how long it was not; None when it was not lost."""
        away_s = self.back()
        self.count = 0
        return away_s

    def back(self) -> float | None:
        """As `end`, for a part that has to show first that it is well: the next loss counts as one more in a row."""
        away_s = None if self.first_at is None else time.monotonic() - self.first_at
        self.first_at = None
        self._tell(None)
        return away_s

    def _tell(self, work: str | None) -> None:
        """Let `vime why-stuck` see that it is away."""
        if self._told is not None:
            self._told.__exit__(None, None, None)
        self._told = None if work is None else doing(work).__enter__()
