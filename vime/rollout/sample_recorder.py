"""Keeps the samples of each round for `vime samples`, beside the run. The RolloutManager hands a round over when it is
generated; a thread writes it while the round trains. Nothing of it passes through the driver.

Dropped groups are noted where they are dropped, on the rollout loop, and written with the current round.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from vime.observability.samples import DroppedGroup, RoundGroup, SampleStore
from vime.types import Sample
from vime.utils.waits import waiting

logger = logging.getLogger(__name__)

MAX_DROPPED = 64
"""Dropped groups of a round whose completions are held until it is written; of the others only numbers and reasons."""
WRITE_S = 60.0
"""When the disk takes longer for a round, the samples of that round are lost, but the run continues."""


class SampleRecorder:
    """Writes one round at a time. Waits for: the write of the round before, when the next is handed over. Any
    thread."""

    def __init__(self) -> None:
        self._store: SampleStore | None = None
        self._lock = threading.Lock()  # protects `_dropped`
        self._dropped: list[DroppedGroup] = []
        self._thread: ThreadPoolExecutor | None = None
        self._writing: Future[None] | None = None
        self._round_id = -1  # the newest round that was handed over
        self._has_warned = False
        self._is_collecting = False

    def open(self, run_dir: Path, *, max_bytes: int) -> None:
        """Keep samples from now on; with 0 bytes none. A second call replaces the first one."""
        self.close()
        if max_bytes > 0:
            self._store = SampleStore(run_dir, max_bytes)
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="vime-samples")

    def collect(self) -> None:
        """Note dropped groups for `take_dropped`: used in a process whose samples another process writes."""
        self.close()
        self._is_collecting = True

    def take_dropped(self) -> list[DroppedGroup]:
        """Return what was noted since the last call."""
        with self._lock:
            dropped, self._dropped = self._dropped, []
        return dropped

    def note_dropped(self, group_index: int, reason: str, samples: Sequence[Sample]) -> None:
        """Note a finished group that is not trained."""
        if self._store is None and not self._is_collecting:
            return
        with self._lock:
            held = tuple(samples) if len(self._dropped) < MAX_DROPPED else ()
            self._dropped.append(DroppedGroup(group_index=group_index, reason=reason, samples=held))

    def write_round(self, round_id: int, groups: Sequence[RoundGroup]) -> None:
        """Hand a round over to be written. Its samples must not be changed after that."""
        if self._store is None or self._thread is None:
            return
        self._round_id = round_id
        with self._lock:
            dropped, self._dropped = self._dropped, []
        if self._is_written():
            self._writing = self._thread.submit(self._write, self._store, round_id, list(groups), dropped)

    def close(self) -> None:
        """Write what is left: groups that were dropped for a round that never became complete."""
        if self._store is None or self._thread is None:
            return
        if self._dropped:
            self.write_round(self._round_id + 1, [])
        is_idle = self._is_written()
        self._thread.shutdown(wait=is_idle)
        self._store, self._thread, self._writing, self._round_id = None, None, None, -1

    def _is_written(self) -> bool:
        """Wait for the write of the round before; return whether it ended in time."""
        if self._writing is None:
            return True
        with waiting("the samples of the round before to be written", deadline_s=WRITE_S):
            try:
                self._writing.result(WRITE_S)
            except TimeoutError:
                self._warn(f"the disk took over {WRITE_S:g} s for one round")
                return False
        return True

    def _write(self, store: SampleStore, round_id: int, groups: list[RoundGroup], dropped: list[DroppedGroup]) -> None:
        try:
            store.write(round_id, groups, dropped)
        except Exception as error:  # boundary: samples that people look at do not end a run
            self._warn(f"round {round_id}: {type(error).__name__} {error}")

    def _warn(self, what: str) -> None:
        if not self._has_warned:
            logger.warning("samples of some rounds are not kept for `vime samples`: %s", what)
        self._has_warned = True


RECORDER = SampleRecorder()
