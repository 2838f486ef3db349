"""Hashes of a set of weights: the same number on the trainer's and on the engine's side, or they differ.

`ContentHash` is what trainer and engines compare, two levels of XXH3 with 128 bits:

    piece digest    of 256 KiB of a tensor's bytes; the last piece is shorter
    tensor digest   of the header (name, dtype, shape) and the tensor's piece digests
    content hash    of all tensor digests, in the order of the names

Raw bytes, not values: -0.0 and 0.0 differ, a NaN equals itself, and bfloat16 needs no conversion. Bucket borders, the
order in which tensors come and the device where they lie do not enter, and parts of a model can be hashed by different
senders and joined. It finds faults; it does not protect against somebody who makes up weights on purpose.

`OrderedHash` is BLAKE2b over the same content in stream order: the `content_hash` of docs/producer-protocol.md, for
jobs outside of the run.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
import xxhash

from vime.weights.device_hash import DIGEST_BYTES, PIECE_BYTES, piece_digests
from vime.weights.plan import TensorMeta

_NO_BYTES = memoryview(b"")


class ContentHash:
    """Given tensors in any order, one by one or many at once; counts tensors and payload bytes."""

    def __init__(self) -> None:
        self._digests: list[tuple[str, bytes]] = []
        self.num_bytes = 0

    @property
    def num_tensors(self) -> int:
        return len(self._digests)

    def add(self, meta: TensorMeta, tensor: torch.Tensor) -> None:
        self.add_all([meta], [tensor])

    def add_all(self, metas: Sequence[TensorMeta], tensors: Sequence[torch.Tensor]) -> None:
        """Add tensors where they lie. On a GPU all of them together are a few hundred kernels, so a call for each of
        many small tensors would be slow."""
        flat = [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in tensors]
        pieces = [b""] * len(flat)
        elsewhere = [position for position, raw in enumerate(flat) if raw.device.type != "cpu"]
        for position, found in zip(elsewhere, _on_device([flat[position] for position in elsewhere]), strict=True):
            pieces[position] = found
        for position, (meta, raw) in enumerate(zip(metas, flat, strict=True)):
            found = _on_cpu(raw) if raw.device.type == "cpu" else pieces[position]
            self._digests.append((meta.name, xxhash.xxh3_128_digest(_header(meta) + found)))
            self.num_bytes += meta.nbytes

    def join(self, other: ContentHash) -> None:
        """Take in what another sender has hashed."""
        self._digests += other._digests
        self.num_bytes += other.num_bytes

    def hexdigest(self) -> str:
        return xxhash.xxh3_128_hexdigest(b"".join(digest for _, digest in sorted(self._digests)))


class OrderedHash:
    """Given one tensor after another, in the order that tensors.json names: 1 GB/s."""

    def __init__(self) -> None:
        self._digest = hashlib.blake2b(digest_size=DIGEST_BYTES)

    def add(self, meta: TensorMeta, tensor: torch.Tensor) -> None:
        self._digest.update(_header(meta))
        raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu()  # often a copy: it must live until read
        self._digest.update(_memory(raw))

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


def hashed(
    stream: Iterable[tuple[str, torch.Tensor]], metadata: Sequence[TensorMeta], *hashes: ContentHash | OrderedHash
) -> Iterator[tuple[str, torch.Tensor]]:
    """`stream`, of which each tensor is added to the hashes on its way."""
    for meta, (name, tensor) in zip(metadata, stream, strict=True):
        for each in hashes:
            each.add(meta, tensor)
        yield name, tensor


def content_hash(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the content hash of named tensors."""
    content = ContentHash()
    content.add_all([TensorMeta.of(name, tensor) for name, tensor in tensors.items()], list(tensors.values()))
    return content.hexdigest()


def ordered_hash(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the hash for jobs outside, of named tensors in the order of the mapping."""
    ordered = OrderedHash()
    for name, tensor in tensors.items():
        ordered.add(TensorMeta.of(name, tensor), tensor)
    return ordered.hexdigest()


def _header(meta: TensorMeta) -> bytes:
    header = f"{meta.name}\n{meta.dtype}\n{','.join(map(str, meta.shape))}\n".encode()
    return len(header).to_bytes(4, "little") + header


def _memory(raw: torch.Tensor) -> memoryview:
    """The bytes of a flat uint8 tensor in host memory, which must outlive the view. Not by `numpy()`: it forbids for
    good that the storage is resized, as it is when a trainer sleeps."""
    if not raw.numel():
        return _NO_BYTES
    return memoryview((ctypes.c_char * raw.numel()).from_address(raw.data_ptr())).cast("B")


def _on_cpu(raw: torch.Tensor) -> bytes:
    """Return the piece digests of one tensor. The library leaves Python's lock to others during each piece."""
    memory, digest = _memory(raw), xxhash.xxh3_128_digest
    return b"".join(digest(memory[start : start + PIECE_BYTES]) for start in range(0, len(memory), PIECE_BYTES))


def _on_device(flat: Sequence[torch.Tensor]) -> list[bytes]:
    """Return the piece digests of each tensor. Whole pieces are reduced where they lie; what is left at the end of each
    tensor comes to the host, in one copy."""
    if not flat:
        return []
    counts = [raw.numel() // PIECE_BYTES for raw in flat]
    whole = [raw[: n * PIECE_BYTES].view(n, PIECE_BYTES) for raw, n in zip(flat, counts, strict=True) if n]
    found = piece_digests(whole)
    rests = [raw[n * PIECE_BYTES :] for raw, n in zip(flat, counts, strict=True)]
    left = torch.cat(rests).cpu()
    answers, piece, byte = [], 0, 0
    for count, rest in zip(counts, rests, strict=True):
        tail = _on_cpu(left[byte : byte + rest.numel()])
        answers.append(found[piece * DIGEST_BYTES : (piece + count) * DIGEST_BYTES] + tail)
        piece, byte = piece + count, byte + rest.numel()
    return answers
