"""Which tensors travel in which bucket, and where in it. Sender and engine cut alike from the same metadata.

A bucket is one flat run of bytes. Offsets are 16-byte aligned, so that a view of any dtype is legal, and the
cut depends on nothing but (names, dtypes, shapes, bucket_bytes): both sides compute it and no offset crosses the wire.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

ALIGNMENT_BYTES = 16
ITEM_BYTES = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """Name, dtype (as torch spells it, without `torch.`) and full shape of one tensor in Hugging Face layout."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"{self.name}: dtype {self.dtype!r} cannot be sent; expected one of {sorted(ITEM_BYTES)}")

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> TensorMeta:
        return cls(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one tensor lies in its bucket."""

    meta: TensorMeta
    offset: int

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        """The tensor inside `buffer` (uint8, flat): shares its memory."""
        flat = buffer[self.offset : self.offset + self.meta.nbytes]
        dtype: torch.dtype = getattr(torch, self.meta.dtype)
        return flat.view(dtype).view(self.meta.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """The tensors that travel together. `index` of `count`."""

    index: int
    count: int
    slots: tuple[Slot, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the flat buffer, alignment gaps included; never 0, so that a buffer can always be mapped."""
        last = self.slots[-1]
        return max(_aligned(last.offset + last.meta.nbytes), ALIGNMENT_BYTES)


def cut_buckets(metadata: Sequence[TensorMeta], bucket_bytes: int) -> list[Bucket]:
    """Cut `metadata`, in order, into buckets of at most `bucket_bytes`. A larger tensor gets a bucket of its own."""
    runs: list[list[Slot]] = []
    used = 0
    for meta in metadata:
        if not runs or used + meta.nbytes > bucket_bytes:
            runs.append([])
            used = 0
        runs[-1].append(Slot(meta, used))
        used = _aligned(used + meta.nbytes)
    return [Bucket(index=index, count=len(runs), slots=tuple(run)) for index, run in enumerate(runs)]


def single_bucket(metadata: Iterable[TensorMeta], *, index: int, count: int) -> Bucket:
    """The bucket that holds all of `metadata`: how the receiver rebuilds a bucket from the names it was told."""
    metas = list(metadata)
    (whole,) = cut_buckets(metas, sum(_aligned(meta.nbytes) for meta in metas))
    return Bucket(index=index, count=count, slots=whole.slots)


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
