"""Payloads of ready groups, read before a round asks for them.

A round waits for its slowest group. What the others hold is read and decoded meanwhile, so that only the last one is
left to read when the lease is granted. At most `--transferqueue-prefetch-groups` lie here.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from vime.handoff.group_store import GroupStore
from vime.handoff.ledger_port import LedgerPort
from vime.handoff.ledger_rounds import RoundDesk
from vime.handoff.ledger_types import LeasedGroup, Task
from vime.handoff.payload import bytes_to_samples
from vime.types import HandoffError, Sample, Version, VimeError
from vime.utils.waits import waiting

logger = logging.getLogger(__name__)
Samples = list[Sample]
NEWS_S = 0.5
"""How long one wait for news of the ledger lasts; then it is looked whether `close` was called."""
CLOSE_S = 5.0


Reading = tuple[int, Future[list[Samples]], int]
"""Of one group: the checksum of its payload, the read it is part of, and its place in there."""


class ReadAhead:
    """Two threads: one learns what is ready, one reads. Waits for: news of the ledger, the queue. Unblocked by:
    commits, and room here, which `take` makes."""

    def __init__(self, ledger: LedgerPort, store: GroupStore, *, limit: int) -> None:
        """`limit` 0: nothing is read ahead."""
        self._ledger, self._store, self._limit = ledger, store, limit
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="vime-read-ahead")
        self._held: dict[Task, Reading] = {}
        self._lock = threading.Lock()  # of `_held`
        self._is_closed = threading.Event()
        self._watcher: threading.Thread | None = None
        self._version: Version = 0

    @property
    def tasks(self) -> tuple[Task, ...]:
        """What lies here, or is being read."""
        with self._lock:
            return tuple(self._held)

    def start(self) -> None:
        """Begin to watch. Calling it again does nothing."""
        if self._limit and self._watcher is None:
            self._watcher = threading.Thread(target=self._watch, name="vime-read-ahead-watch", daemon=True)
            self._watcher.start()

    def take(self, groups: Sequence[LeasedGroup], *, next_version: Version) -> list[Samples]:
        """The samples of these groups, in this order: those read ahead, and the others now. `next_version`: what the
        round after this one will train."""
        self._version = next_version
        with self._lock:
            held = {group.task: self._held.pop(group.task, None) for group in groups}
        found: dict[Task, Samples] = {}
        with waiting("groups that are being read ahead", deadline_s=None):
            for group in groups:
                reading = held[group.task]
                if reading is not None and reading[0] == group.payload.checksum:
                    with contextlib.suppress(VimeError):  # read again below, and what is wrong is said there
                        found[group.task] = reading[1].result()[reading[2]]
        left = [group for group in groups if group.task not in found]
        found |= zip([group.task for group in left], self._decoded(left), strict=True)
        return [found[group.task] for group in groups]

    def close(self) -> None:
        """End both threads. Calling it again does nothing."""
        self._is_closed.set()
        if self._watcher is not None:
            self._watcher.join(CLOSE_S)
        self._reader.shutdown(wait=True, cancel_futures=True)

    def _watch(self) -> None:
        seen = -1
        while not self._is_closed.is_set():
            try:
                seen = self._ledger.wait_for_news(seen, NEWS_S, ready=len(self._held) + 1)
                self._begin(self._ledger.call(RoundDesk.ready, version=self._version, count=self._limit))
            except VimeError as error:
                logger.info("nothing is read ahead any more: %s", error)  # the round's own calls tell the user
                return

    def _begin(self, ready: Sequence[LeasedGroup]) -> None:
        wanted = {group.task for group in ready}
        with self._lock:
            fresh = [group for group in ready if group.task not in self._held]
            if not fresh or self._is_closed.is_set():
                return
            for task in set(self._held) - wanted:
                del self._held[task]  # too old by now
            fresh = fresh[: self._limit - len(self._held)]
            reading = self._reader.submit(self._decoded, fresh)
            self._held |= {group.task: (group.payload.checksum, reading, at) for at, group in enumerate(fresh)}

    def _decoded(self, groups: Sequence[LeasedGroup]) -> list[Samples]:
        decoded: list[Samples] = []
        payloads = self._store.get([(group.task, group.payload.checksum) for group in groups])
        for group, data in zip(groups, payloads, strict=True):
            samples = bytes_to_samples(data)
            if samples[0].group_index != group.task.group:
                raise HandoffError(f"group {group.task}: its payload is of group {samples[0].group_index}.")
            decoded.append(samples)
        return decoded
