"""The two ends of a transfer, without the transport: cutting, checking and hashing are the same for all of them.

A call of each engine brings one bucket (`shm`, whose sender fills a bucket again) or the whole update. Its
`update_info` names the tensors (`names`, `dtypes`, `shapes`), says which call of how many it is (`index`, `count`) and
how the tensors are cut (`bucket_bytes`), and adds what the transport needs to find the bytes. It carries no hash: the
engine computes its own from what it received, and the two are compared afterwards.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import torch

from vime.protocols import EngineControl
from vime.types import PublishError
from vime.weights.hashing import ContentHash
from vime.weights.plan import Bucket, TensorMeta, cut_buckets, single_bucket
from vime.weights.update_info import UpdateInfo

Deliver = Callable[[UpdateInfo], None]
"""Brings an `update_info` to every engine; returns when all of them have loaded what it tells of."""


class WeightSender(Protocol):
    """The trainer's end of one transport. Owned by a trainer rank that publishes."""

    def connect(self, fleet: EngineControl) -> None:
        """Meet the engines. Called once before the first update, and again after the fleet has changed."""

    def send_update(
        self, stream: Iterable[tuple[str, torch.Tensor]], metadata: Sequence[TensorMeta], deliver: Deliver
    ) -> ContentHash:
        """Send all tensors of `metadata` from `stream`, by one or more calls of `deliver`."""

    def close(self) -> None: ...


class BucketSender(ABC):
    """Fills buckets from the stream and hashes them, while the transport delivers those before.

    Memory: two buckets, one that is filled and one that travels.
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
        try:
            self._send(self._filled(stream, metadata, content), metadata, deliver)
        finally:
            self._free_buffers()
        return content

    @abstractmethod
    def close(self) -> None: ...

    @abstractmethod
    def _send(
        self, filled: Iterator[tuple[Bucket, torch.Tensor]], metadata: Sequence[TensorMeta], deliver: Deliver
    ) -> None:
        """Bring every bucket of `filled`, which are made when they are asked for, to every engine, and return when all
        are loaded. The buffer of a bucket is filled again with the second after it."""

    def _filled(
        self, stream: Iterable[tuple[str, torch.Tensor]], metadata: Sequence[TensorMeta], content: ContentHash
    ) -> Iterator[tuple[Bucket, torch.Tensor]]:
        tensors = checked_stream(stream, metadata)
        for bucket in cut_buckets(metadata, self._bucket_bytes):
            buffer = self._buffer(bucket)
            sources = []  # hashed before they are copied: a tensor that overwrites another in the bucket is noticed
            for slot in bucket.slots:
                tensor = next(tensors).detach()
                if tensor.device.type == "cpu":  # kept until the bucket is full, they would be a third one
                    content.add(slot.meta, tensor)
                else:
                    sources.append((slot.meta, tensor))
                slot.view(buffer).copy_(tensor)
            if sources:
                content.add_all(*zip(*sources, strict=True))
            yield bucket, buffer
        for _ in tensors:  # runs the check that the stream ends where the metadata ends
            pass

    def _buffer(self, bucket: Bucket) -> torch.Tensor:
        """A flat uint8 tensor of the bucket's size that `_send` can send."""
        return torch.empty(bucket.nbytes, dtype=torch.uint8)

    def _free_buffers(self) -> None:  # noqa: B027 - a tensor of `_buffer` frees itself
        """The update is over: hold no memory until the next one."""


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

    def check_call(self, update_info: Mapping[str, object]) -> None:  # noqa: B027 - the others hold no connection
        """Raise PublishError when a call is not of the connection made last. Asked before anything is touched."""

    def start(self) -> None:
        self._content, self._next_index, self._count = ContentHash(), 0, None

    def receive(self, update_info: Mapping[str, object]) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """The (name, tensor) pairs of each bucket of a call, in memory that is not written again."""
        told = buckets_from_wire(update_info)
        if told.index != self._next_index or self._count not in (None, told.count):
            raise PublishError(
                f"weight update: got bucket {told.index} of {told.count}, expected bucket {self._next_index} of "
                f"{self._count or told.count}. Start the update again on a fresh engine."
            )
        for bucket, tensors in zip(told.buckets, self._read(told.buckets, update_info), strict=True):
            self._content.add_all([slot.meta for slot in bucket.slots], tensors)
            yield [(slot.meta.name, tensor) for slot, tensor in zip(bucket.slots, tensors, strict=True)]
        self._next_index, self._count = told.index + 1, told.count

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
    def _read(self, buckets: Sequence[Bucket], update_info: Mapping[str, object]) -> Iterator[list[torch.Tensor]]:
        """The tensors of each bucket of a call."""


class _UpdateInfo(msgspec.Struct):
    """An `update_info` as every transport reads it; what a transport adds is ignored."""

    index: int
    count: int
    names: list[str]
    dtypes: list[str]
    shapes: list[tuple[int, ...]]
    bucket_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class ToldBuckets:
    """What a call brings: call `index` of `count`."""

    index: int
    count: int
    buckets: list[Bucket]


def bucket_to_wire(bucket: Bucket) -> UpdateInfo:
    """The call for a bucket of its own."""
    return _to_wire([slot.meta for slot in bucket.slots], bucket.index, bucket.count)


def update_to_wire(metadata: Sequence[TensorMeta], bucket_bytes: int) -> UpdateInfo:
    """The one call of an update whose buckets the engine gets by another way."""
    return {**_to_wire(metadata, 0, 1), "bucket_bytes": bucket_bytes}


def _to_wire(metas: Sequence[TensorMeta], index: int, count: int) -> UpdateInfo:
    return {
        "index": index,
        "count": count,
        "names": [meta.name for meta in metas],
        "dtypes": [meta.dtype for meta in metas],
        "shapes": [list(meta.shape) for meta in metas],
    }


def buckets_from_wire(update_info: Mapping[str, object]) -> ToldBuckets:
    told = msgspec.convert(update_info, _UpdateInfo)
    metas = [
        TensorMeta(name, dtype, shape) for name, dtype, shape in zip(told.names, told.dtypes, told.shapes, strict=True)
    ]
    if told.bucket_bytes is None:
        return ToldBuckets(told.index, told.count, [single_bucket(metas, index=told.index, count=told.count)])
    return ToldBuckets(told.index, told.count, cut_buckets(metas, told.bucket_bytes))


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
