"""Where the payloads of finished groups lie: in TransferQueue for readers anywhere, in the spool for restarts.

`put` before the ledger's `commit`: a crash between the two leaves an orphan payload, never a visible group without
data. What a reader gets is what was put, byte for byte, by the checksum that the ledger keeps. A payload that
TransferQueue lost (its actors died with an earlier run) is read from the spool.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Mapping, Sequence
from typing import Protocol

from vime.handoff.ledger_types import Task
from vime.handoff.spool import Spool
from vime.types import HandoffError, HandoffLostError, WaitTimeoutError
from vime.utils.failpoints import Point, failpoint


class Rows(Protocol):
    """A keyed store of bytes: `queue_client.QueueClient` over TransferQueue, `memory.MemoryRows` without processes."""

    def put_rows(self, partition: str, keys: list[str], payloads: Sequence[bytes]) -> None: ...
    def get_rows(self, partition: str, keys: list[str]) -> list[bytes]: ...
    def clear_rows(self, partition: str, keys: list[str]) -> None: ...
    def close(self) -> None: ...


class GroupStore:
    """Owned by the process that produces; `spool` None: --no-transferqueue-durable. Callable from any thread."""

    def __init__(self, rows: Rows, spool: Spool | None, *, partition: str) -> None:
        self._rows, self._spool, self._partition = rows, spool, f"{partition}_groups"
        self._lock = threading.Lock()  # of the spool
        self._held: set[str] = set()  # keys that this process put into the queue and did not clear
        self.num_spool_reads = 0

    def put(self, groups: Sequence[tuple[Task, bytes]]) -> list[int]:
        """Store payloads; answers their checksums when all are stored in both places."""
        checksums = [zlib.crc32(data) for _, data in groups]
        if self._spool is not None:
            with self._lock:
                checksums = self._spool.append(groups)
        failpoint(Point.SPOOLED)
        keys = [_key(task) for task, _ in groups]
        self._rows.put_rows(self._partition, keys, [data for _, data in groups])
        with self._lock:
            self._held.update(keys)
        return checksums

    def keep(self, task: Task, data: bytes) -> int | None:
        """Store what only a later attempt reads (the tokens of an aborted one), in the spool; None without a spool."""
        if self._spool is None:
            return None
        with self._lock:
            [checksum] = self._spool.append([(task, data)])
        return checksum

    def get(self, payloads: Sequence[tuple[Task, int]]) -> list[bytes]:
        """The payloads with these checksums, in this order."""
        with self._lock:
            queued = [task for task, _ in payloads if _key(task) in self._held]
        try:
            found = self._rows.get_rows(self._partition, [_key(task) for task in queued])
        except (HandoffError, WaitTimeoutError):
            if self._spool is None:
                raise
            found, queued = [], []
        held = dict(zip(queued, found, strict=True))
        return [self._verified(task, checksum, held.get(task)) for task, checksum in payloads]

    def forget(self, tasks: Sequence[Task]) -> None:
        """Nobody will read these from the queue any more. The spool keeps its copies until `compact`."""
        with self._lock:
            keys = [_key(task) for task in tasks if _key(task) in self._held]
            self._held.difference_update(keys)
        self._rows.clear_rows(self._partition, keys)

    def compact(self, needed: Mapping[Task, int | None]) -> int:
        """Drop spool segments that hold nothing of `needed` (`Ledger.needed_payloads`); answers the bytes freed."""
        if self._spool is None:
            return 0
        with self._lock:
            return self._spool.compact(lambda task, checksum: task in needed and needed[task] in (None, checksum))

    @property
    def spool_bytes(self) -> int:
        with self._lock:
            return 0 if self._spool is None else self._spool.num_bytes

    def close(self) -> None:
        """Leave queue and spool; what is stored stays. Calling it again does nothing."""
        self._rows.close()
        if self._spool is not None:
            with self._lock:
                self._spool.close()

    def _verified(self, task: Task, checksum: int, data: bytes | None) -> bytes:
        if data is not None and zlib.crc32(data) == checksum:
            return data
        if self._spool is None:
            what = "is not in the queue any more" if data is None else "came back changed"
            raise HandoffLostError(
                f"group {task}: its payload {what}, and --no-transferqueue-durable keeps no other copy. Resume with "
                "--load: the group is generated again."
            )
        with self._lock:
            self.num_spool_reads += 1
            return self._spool.read(task, checksum)


def _key(task: Task) -> str:
    """No other attempt of the run has it."""
    return str(task)
