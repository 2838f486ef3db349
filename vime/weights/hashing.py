"""The content hash of a set of weights: the same number on the trainer's and on the engine's side, or they differ.

BLAKE2b over, tensor by tensor in stream order: name, dtype, shape, raw bytes. Raw bytes, not values: -0.0 and 0.0
differ, a NaN equals itself, and bfloat16 needs no conversion. Bucket borders do not enter.
"""

from __future__ import annotations

import ctypes
import hashlib

import torch

from vime.weights.plan import TensorMeta

DIGEST_BYTES = 16


class ContentHash:
    """Fed one tensor after another; counts tensors and payload bytes."""

    def __init__(self) -> None:
        self._digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
        self.num_tensors = 0
        self.num_bytes = 0

    def add(self, meta: TensorMeta, tensor: torch.Tensor) -> None:
        """Add one tensor. Copies it to the CPU when it is not there (about 1 GB/s a thread is hashed)."""
        header = f"{meta.name}\n{meta.dtype}\n{','.join(map(str, meta.shape))}\n".encode()
        self._digest.update(len(header).to_bytes(4, "little") + header)
        raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu()
        # Not by raw.numpy(): it forbids for good that the storage is resized, as it is when a trainer sleeps.
        self._digest.update((ctypes.c_char * raw.numel()).from_address(raw.data_ptr()) if raw.numel() else b"")
        self.num_tensors += 1
        self.num_bytes += meta.nbytes

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


def content_hash(tensors: dict[str, torch.Tensor]) -> str:
    """Hash of named tensors in the order of the dict."""
    content = ContentHash()
    for name, tensor in tensors.items():
        content.add(TensorMeta.of(name, tensor), tensor)
    return content.hexdigest()
