"""A checkpoint that trainer ranks are writing, as the driver waits for it."""

from __future__ import annotations

import ray
from ray import ObjectRef

from vime.ray.waits import wait_for
from vime.utils.manifest import Entry


class RanksSave:
    """A checkpoint that the ranks are writing: one pending result for each, by process name."""

    def __init__(self, owed: dict[ObjectRef[dict[str, Entry]], str]) -> None:
        self._owed, self._refs = owed, list(owed)

    def is_over(self) -> bool:
        """Whether all have returned, or one failed: the others may then never return."""
        done, pending = ray.wait(self._refs, num_returns=len(self._refs), timeout=0)
        return not pending or any(_has_failed(ref) for ref in done)

    def wait(self, name: str, deadline_s: float) -> dict[str, Entry]:
        """Return size and hash of every file that a rank wrote."""
        parties = list(self._owed.values())
        written = wait_for(self._refs, name=name, owner="trainer", deadline_s=deadline_s, parties=parties)
        return {name: entry for mine in written for name, entry in mine.items()}


def _has_failed(ref: ObjectRef[dict[str, Entry]]) -> bool:
    try:
        ray.get(ref, timeout=10)
    except ray.exceptions.RayError:
        return True
    return False
