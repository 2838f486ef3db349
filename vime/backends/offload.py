"""Device memory of one engine, moved to the host and back.

What is moved are storages, not tensors: a storage is copied and then shrunk to nothing, so every view of it (a
parameter inside megatron's buffer, a shard inside a parameter, a bucket's gradients) stays the object it was and is
whole again when the storage is. megatron-core's own helpers move the optimizer by replacing `.data`, which cuts those
views. Nothing is drawn or computed, so random states and values stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, UntypedStorage


class Offload:
    """Two lists of storages: those whose content is `kept`, and scratch that is zeros when it comes back."""

    def __init__(self) -> None:
        self._kept: list[tuple[UntypedStorage, Tensor]] = []  # (storage, its bytes on the host)
        self._scratch: list[tuple[UntypedStorage, int]] = []  # (storage, its bytes)
        self.is_asleep = False

    def sleep(self, kept: Iterable[Tensor], scratch: Iterable[Tensor] = ()) -> None:
        """Free the storages of these tensors. The device's queued work ends first."""
        scratch_storages = _storages(scratch)
        for storage in scratch_storages.values():
            self._scratch.append((storage, storage.nbytes()))
        for address, storage in _storages(kept).items():
            if address not in scratch_storages:
                self._kept.append((storage, _bytes_of(storage).to("cpu", copy=True)))
                storage.resize_(0)
        for storage, _ in self._scratch:
            storage.resize_(0)
        self.is_asleep = True
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def wake_up(self) -> None:
        """Inverse of `sleep`."""
        for storage, host in self._kept:
            storage.resize_(host.numel())
            _bytes_of(storage).copy_(host)
        for storage, num_bytes in self._scratch:
            storage.resize_(num_bytes)
            _bytes_of(storage).zero_()
        self._kept, self._scratch, self.is_asleep = [], [], False


def _storages(tensors: Iterable[Tensor]) -> dict[int, UntypedStorage]:
    """Each storage once, by address; a tensor without elements has none."""
    found = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage for storage in found if storage.nbytes()}


def _bytes_of(storage: UntypedStorage) -> Tensor:
    """The whole storage as a flat tensor that shares it."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
