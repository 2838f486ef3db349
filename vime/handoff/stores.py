"""Stores of chunks of rows, between the process that generated them and the ranks that train on them.

`PayloadStore` has three implementations: TransferQueue (queue_client.py, modes buffer and streaming), objects of Ray
(mode off), and a dict in this process for tests and examples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from vime.types import HandoffError, HandoffLostError
from vime.utils.waits import waiting

Handle = object
"""What finds a chunk again: a key of TransferQueue, or a reference to an object of Ray. Only its store looks inside."""


class PayloadStore(Protocol):
    """Bytes by handle. The handles that `put` returns, with the partition, are all that a reader in another process
    needs."""

    def put(self, partition: str, keys: list[str], chunks: Sequence[bytes]) -> list[Handle]:
        """Store a chunk under each key, none of which was used before; return a handle for each."""
        ...

    def get(self, partition: str, handles: Sequence[Handle]) -> list[bytes]:
        """Return chunks in this order. HandoffLostError when one is missing, or is not what was put."""
        ...

    def clear(self, partition: str, handles: Sequence[Handle]) -> None:
        """Delete chunks that will not be read any more; missing ones are skipped."""
        ...

    def partitions(self) -> list[str]:
        """Return the partitions that were put into and not cleared as a whole."""
        ...

    def clear_partition(self, partition: str) -> None: ...

    def close(self) -> None: ...


class MemoryStore:
    """A dict in this process; the key is the handle."""

    def __init__(self) -> None:
        self.chunks: dict[tuple[str, Handle], bytes] = {}

    def put(self, partition: str, keys: list[str], chunks: Sequence[bytes]) -> list[Handle]:
        self.chunks |= {(partition, key): chunk for key, chunk in zip(keys, chunks, strict=True)}
        return list(keys)

    def get(self, partition: str, handles: Sequence[Handle]) -> list[bytes]:
        missing = [key for key in handles if (partition, key) not in self.chunks]
        if missing:
            raise HandoffLostError(f"{partition}: chunks {missing} are not here: they were cleared, or never put.")
        return [self.chunks[partition, key] for key in handles]

    def clear(self, partition: str, handles: Sequence[Handle]) -> None:
        for key in handles:
            self.chunks.pop((partition, key), None)

    def partitions(self) -> list[str]:
        return sorted({partition for partition, _ in list(self.chunks)})  # another thread may change it meanwhile

    def clear_partition(self, partition: str) -> None:
        self.clear(partition, [key for held, key in list(self.chunks) if held == partition])

    def close(self) -> None:
        """Close; other holders of the store keep its chunks."""


class ObjectStore:
    """Chunks as objects, which live as long as a handle of theirs does. Ray itself is not imported here.

    `put(value) -> reference` moves one object, `get(references) -> values` several; `get` has a deadline of its own.
    """

    def __init__(self, *, put: Callable[[bytes], Handle], get: Callable[[list[Handle]], list[bytes]]) -> None:
        self._put, self._get = put, get

    def put(self, partition: str, keys: list[str], chunks: Sequence[bytes]) -> list[Handle]:  # noqa: ARG002
        return [self._put(chunk) for chunk in chunks]

    def get(self, partition: str, handles: Sequence[Handle]) -> list[bytes]:
        try:
            with waiting("the rows of a round", "rollout-manager", deadline_s=None):
                return self._get(list(handles))
        except HandoffError:
            raise
        except Exception as error:
            raise HandoffLostError(
                f"{partition}: an object of {len(handles)} cannot be read ({type(error).__name__}: {error}). The "
                "process that owned it died."
            ) from error

    def clear(self, partition: str, handles: Sequence[Handle]) -> None:
        """Do nothing: an object is deleted with its last handle."""

    def partitions(self) -> list[str]:
        return []

    def clear_partition(self, partition: str) -> None:
        """See `clear`."""

    def close(self) -> None:
        """Do nothing: no resource is held here."""
