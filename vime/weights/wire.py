"""The two ends of a transfer, without the transport: cutting, checking and hashing are the same for all of them.

One call of each engine carries one bucket. Its `update_info` names the tensors (`names`, `dtypes`, `shapes`), says
which bucket of how many it is (`index`, `count`), and adds what the transport needs to find the bytes. It carries no
hash: the engine computes its own from what it received, and the two are compared afterwards.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import msgspec
import torch

from vime.protocols import EngineControl
from vime.types import PublishError
from vime.weights.hashing import ContentHash
from vime.weights.plan import Bucket, TensorMeta, cut_buckets, single_bucket
from vime.weights.update_info import UpdateInfo

Deliver = Callable[[UpdateInfo], None]
"""Brings the `update_info` of a bucket to every engine; returns when all of them have loaded it."""


class WeightSender(Protocol):
    """The trainer's end of one transport. Owned by the one trainer rank that publishes."""

    def connect(self, fleet: EngineControl) -> None:
        """Meet the engines. Called once before the first update, and again after the fleet has changed."""

    def send_update(
        self, stream: Iterable[tuple[str, torch.Tensor]], metadata: Sequence[TensorMeta], deliver: Deliver
    ) -> ContentHash:
        """Send all tensors of `metadata` from `stream`, a bucket by each call of `deliver`."""

    def close(self) -> None: ...


class BucketSender(ABC):
    """Fills one bucket at a time from the stream, hashes it on the way, and lets the transport deliver it.

    Memory: one bucket. A bucket is delivered when every engine has loaded it, so the buffer may be filled again.
    """

    def __init__(self, *, bucket_bytes: int, timeout_s: float) -> None:
        self._bucket_bytes = bucket_bytes
        self._timeout_s = timeout_s

    @abstractmethod
    def connect(self, fleet: EngineControl) -> None: ...

    def send_update(
        self, stream: Iterable[tuple[str, torch.Tensor]], metadata: Sequence[TensorMeta], deliver: Deliver
    ) -> ContentHash:
        content = ContentHash()
        pairs = checked_stream(stream, metadata)
        self._begin()
        try:
            for bucket in cut_buckets(metadata, self._bucket_bytes):
                buffer = self._buffer(bucket.nbytes)
                for slot in bucket.slots:
                    tensor = next(pairs)
                    content.add(slot.meta, tensor)
                    slot.view(buffer).copy_(tensor.detach())
                self._deliver(bucket, buffer, deliver)
        finally:
            self._free_buffer()
        for _ in pairs:  # runs the check that the stream ends where the metadata ends
            pass
        return content

    @abstractmethod
    def close(self) -> None: ...

    def _begin(self) -> None:  # noqa: B027 - most transports have nothing to do here
        """A new update starts."""

    def _buffer(self, nbytes: int) -> torch.Tensor:
        """A flat uint8 tensor of `nbytes` that `_deliver` can send."""
        return torch.empty(nbytes, dtype=torch.uint8)

    def _free_buffer(self) -> None:  # noqa: B027 - a tensor of `_buffer` frees itself
        """The update is over: hold no memory until the next one."""

    @abstractmethod
    def _deliver(self, bucket: Bucket, buffer: torch.Tensor, deliver: Deliver) -> None:
        """Bring the bucket to every engine and return when all of them have loaded it."""


class BucketReceiver(ABC):
    """An engine worker's end of one transport: the tensors of each bucket, hashed as received.

    A bucket out of order, a missing bucket or a repeated one is refused, so an update is whole or it fails.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._content = ContentHash()
        self._next_index = 0
        self._count: int | None = None

    def connect(self, init_info: Mapping[str, object], worker_rank: int) -> None:  # noqa: B027 - shm and disk need none
        """Meet the sender. `worker_rank` numbers the workers of this engine from 0."""

    def start(self) -> None:
        self._content, self._next_index, self._count = ContentHash(), 0, None

    def receive(self, update_info: Mapping[str, object]) -> list[tuple[str, torch.Tensor]]:
        """The (name, tensor) pairs of one bucket, in memory that is not written again."""
        bucket = bucket_from_wire(update_info)
        if bucket.index != self._next_index or self._count not in (None, bucket.count):
            raise PublishError(
                f"weight update: got bucket {bucket.index} of {bucket.count}, expected bucket {self._next_index} of "
                f"{self._count or bucket.count}. Start the update again on a fresh engine."
            )
        tensors = self._read(bucket, update_info)
        for slot, tensor in zip(bucket.slots, tensors, strict=True):
            self._content.add(slot.meta, tensor)
        self._next_index, self._count = bucket.index + 1, bucket.count
        return [(slot.meta.name, tensor) for slot, tensor in zip(bucket.slots, tensors, strict=True)]

    def finish(self) -> None:
        if self._count is None or self._next_index != self._count:
            raise PublishError(
                f"weight update finished after {self._next_index} of {self._count or 'an unknown number of'} buckets. "
                "A partial update would mix two versions: restart the engine."
            )

    @property
    def content_hash(self) -> str:
        return self._content.hexdigest()

    @property
    def num_tensors(self) -> int:
        return self._content.num_tensors

    def close(self) -> None:  # noqa: B027 - shm and disk hold nothing
        """Give back what `connect` took."""

    @abstractmethod
    def _read(self, bucket: Bucket, update_info: Mapping[str, object]) -> list[torch.Tensor]: ...


class _BucketInfo(msgspec.Struct):
    """An `update_info` as every transport reads it; what a transport adds is ignored."""

    index: int
    count: int
    names: list[str]
    dtypes: list[str]
    shapes: list[tuple[int, ...]]


def bucket_to_wire(bucket: Bucket) -> UpdateInfo:
    metas = [slot.meta for slot in bucket.slots]
    return {
        "index": bucket.index,
        "count": bucket.count,
        "names": [meta.name for meta in metas],
        "dtypes": [meta.dtype for meta in metas],
        "shapes": [list(meta.shape) for meta in metas],
    }


def bucket_from_wire(update_info: Mapping[str, object]) -> Bucket:
    told = msgspec.convert(update_info, _BucketInfo)
    metas = [
        TensorMeta(name, dtype, shape) for name, dtype, shape in zip(told.names, told.dtypes, told.shapes, strict=True)
    ]
    return single_bucket(metas, index=told.index, count=told.count)


def checked_stream(
    stream: Iterable[tuple[str, torch.Tensor]], metadata: Sequence[TensorMeta]
) -> Iterator[torch.Tensor]:
    """The tensors of `stream`; PublishError at the first that is not what `metadata` says, is missing or is too many.

    Collective over whatever `stream` gathers over: it is consumed to its end when all is well.
    """
    source = iter(stream)
    for position, expected in enumerate(metadata):
        pair = next(source, None)
        if pair is None:
            raise PublishError(
                f"the weight stream ended after {position} of {len(metadata)} tensors; next was {expected.name}. "
                "The exporter and its metadata disagree: check the model conversion."
            )
        got = TensorMeta.of(*pair)
        if got != expected:
            raise PublishError(
                f"weight {position} of {len(metadata)}: got {got.name} {got.dtype} {got.shape}, expected "
                f"{expected.name} {expected.dtype} {expected.shape}. The exporter and its metadata disagree."
            )
        yield pair[1]
    extra = next(source, None)
    if extra is not None:
        raise PublishError(
            f"the weight stream holds more than the {len(metadata)} tensors of its metadata; next is {extra[0]}. "
            "The exporter and its metadata disagree: check the model conversion."
        )
