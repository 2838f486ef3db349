"""TransferQueue as a store that outlives its queue: when a part of the queue dies, calls wait for the next queue.

TransferQueue keeps rows in the memory of its actors, so a dead one takes them along. In mode streaming every row is
also in the memory or in the spool of the worker that stored it. The driver starts another queue
(`ray/queue_keeper.py`), what is still to be read is put into it, and each call that failed is made again there
(decision 0047).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from vime.handoff.group_store import Handle
from vime.handoff.queue_client import QueueAddress, QueueClient, QueueLostError
from vime.types import HandoffError, WaitTimeoutError
from vime.utils.waits import waiting

Result = TypeVar("Result")


class LastingQueue:
    """A `PayloadStore` for any number of threads. `replace` is called by the process that has started another queue."""

    def __init__(self, address: QueueAddress, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._changed = threading.Condition()  # protects what follows
        self._client = QueueClient(address, timeout_s)
        self._address = address
        self._is_filled = True  # what lay in the queue before lies in this one
        self._is_closed = False

    def replace(self, address: QueueAddress, *, is_filled: bool) -> None:
        """Use another queue from now on. `is_filled`: what was in the last one has been put there; otherwise reads wait
        for `filled`."""
        client = QueueClient(address, self._timeout_s)
        with self._changed:
            before, self._client = self._client, client
            self._address, self._is_filled = address, is_filled
            self._changed.notify_all()
        before.close()

    def filled(self, address: QueueAddress) -> None:
        """Note that what is still to be read lies in this queue, unless another one has taken its place too."""
        with self._changed:
            self._is_filled = self._is_filled or address is self._address
            self._changed.notify_all()

    def put(self, partition: str, keys: list[str], chunks: Sequence[bytes]) -> list[Handle]:
        return self._on_a_live_queue(lambda queue: queue.put(partition, keys, chunks))

    def get(self, partition: str, handles: Sequence[Handle]) -> list[bytes]:
        return self._on_a_live_queue(lambda queue: queue.get(partition, handles), reads=True)

    def clear(self, partition: str, handles: Sequence[Handle]) -> None:
        self._on_a_live_queue(lambda queue: queue.clear(partition, handles))

    def partitions(self) -> list[str]:
        return self._on_a_live_queue(lambda queue: queue.partitions())

    def clear_partition(self, partition: str) -> None:
        self._on_a_live_queue(lambda queue: queue.clear_partition(partition))

    def close(self) -> None:
        """Leave the queue; calls that wait for another one fail."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._client.close()

    def _on_a_live_queue(self, call: Callable[[QueueClient], Result], *, reads: bool = False) -> Result:
        """Make a call, and again whenever the queue was replaced during it. Waits for: another queue, where a part of
        this one died. Unblocked by: the driver."""
        while True:
            client = self._ready_client(reads=reads)
            try:
                return call(client)
            except (HandoffError, WaitTimeoutError) as error:
                if not self._is_replaced(client, wait=isinstance(error, QueueLostError)):
                    raise

    def _ready_client(self, *, reads: bool) -> QueueClient:
        with self._changed:
            if reads and not self._is_filled:
                self._wait_until(lambda: self._is_filled, "finished groups to lie in the new queue", "rollout-manager")
            return self._client

    def _is_replaced(self, client: QueueClient, *, wait: bool) -> bool:
        with self._changed:
            if wait and self._client is client:
                self._wait_until(lambda: self._client is not client, "another queue for the one that died", "driver")
            return self._client is not client

    def _wait_until(self, is_so: Callable[[], bool], what: str, owner: str) -> None:
        """Wait, with the lock held on entry and exit, until it is so, this store is closed, or the deadline is over."""
        ends = time.monotonic() + self._timeout_s
        with waiting(what, owner, deadline_s=self._timeout_s):
            while not (is_so() or self._is_closed) and time.monotonic() < ends:
                self._changed.wait(max(0.0, ends - time.monotonic()))
