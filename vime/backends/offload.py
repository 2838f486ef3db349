"""Device memory of one engine, moved to the host and back.

What is moved are storages, not tensors: a storage is copied and then shrunk to nothing, so every view of it (a
parameter inside megatron's buffer, a shard inside a parameter, a bucket's gradients) stays the object it was and is
whole again when the storage is. megatron-core's own helpers move the optimizer by replacing `.data`, which cuts those
views. Nothing is drawn or computed, so random states and values stay as they are.

Host buffers are taken once and kept for the next time: from a GPU they are page-locked, which takes longer than the
copies. All copies of a call are queued before the first is waited for.
"""

from __future__ import annotations

import logging
import weakref
from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, UntypedStorage

logger = logging.getLogger(__name__)


class Offload:
    """Two lists of storages: those whose content is `kept`, and scratch that is zeros when it comes back."""

    def __init__(self) -> None:
        self._kept: list[tuple[UntypedStorage, Tensor]] = []  # (storage, its bytes on the host)
        self._scratch: list[tuple[UntypedStorage, int]] = []  # (storage, its bytes)
        self._free: defaultdict[int, list[Tensor]] = defaultdict(list)  # host buffers without content, by size
        self.is_asleep = False
        self.is_resting = False  # a part is freed; what may be used is known to the caller

    def sleep(self, kept: Iterable[Tensor], scratch: Iterable[Tensor] = ()) -> None:
        """Free the storages of these tensors, and what `rest` left. The device's queued work ends first."""
        self._move(kept, scratch)
        self.is_asleep, self.is_resting = True, False

    def rest(self, kept: Iterable[Tensor], scratch: Iterable[Tensor] = (), *, but: Iterable[Tensor]) -> None:
        """Free the storages of these tensors, of those that are kept without those of `but`, which stay in use."""
        self._move(kept, scratch, but)
        self.is_resting = True

    def _move(self, kept: Iterable[Tensor], scratch: Iterable[Tensor], but: Iterable[Tensor] = ()) -> None:
        stay = _storages(but).keys()
        scratch_storages = _storages(scratch)
        kept_storages = {at: storage for at, storage in _storages(kept).items() if at not in stay}
        moved = [
            (storage, self._host_buffer(storage)) for at, storage in kept_storages.items() if at not in scratch_storages
        ]
        for storage, host in moved:
            host.copy_(_bytes_of(storage), non_blocking=True)
        _wait_for_copies(moved)
        for storage, _ in moved:
            storage.resize_(0)
        for storage in scratch_storages.values():
            self._scratch.append((storage, storage.nbytes()))
            storage.resize_(0)
        self._kept += moved
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def wake_up(self) -> None:
        """Inverse of `sleep` and `rest`."""
        for storage, host in self._kept:
            storage.resize_(host.numel())
            _bytes_of(storage).copy_(host, non_blocking=True)
        for storage, num_bytes in self._scratch:
            storage.resize_(num_bytes)
            _bytes_of(storage).zero_()
        _wait_for_copies(self._kept)
        for storage, host in self._kept:
            if storage.device.type != "cpu":  # there it would only hold memory twice
                self._free[host.numel()].append(host)
        self._kept, self._scratch, self.is_asleep, self.is_resting = [], [], False, False

    def _host_buffer(self, storage: UntypedStorage) -> Tensor:
        free = self._free[storage.nbytes()]
        if free:
            return free.pop()
        host = torch.empty(storage.nbytes(), dtype=torch.uint8)
        if storage.device.type == "cuda":
            lock_pages(host, "a sleeping trainer")
        return host


def lock_pages(host: Tensor, owner: str) -> None:
    """Page-lock memory of torch's while it lives: `pin_memory` would round it up to a power of two, up to twice the
    bytes. Where the system refuses, copies are slower and right all the same."""
    cudart, address = torch.cuda.cudart(), host.data_ptr()
    error = int(cudart.cudaHostRegister(address, host.nbytes, 0))
    if error:
        logger.warning(
            "%d bytes of host memory for %s cannot be page-locked (CUDA error %d): moving them takes "
            "longer. Raise the limit of locked memory (ulimit -l).", host.nbytes, owner, error,
        )  # fmt: skip
        return
    # else CUDA would refuse the same address when it is given out again; at the end of the process CUDA does it itself
    weakref.finalize(host, cudart.cudaHostUnregister, address).atexit = False


def _wait_for_copies(moved: Iterable[tuple[UntypedStorage, Tensor]]) -> None:
    """Nothing to wait for on a CPU, where this would make a context on a GPU that the machine happens to have."""
    if any(storage.device.type == "cuda" for storage, _ in moved):
        torch.cuda.synchronize()


def _storages(tensors: Iterable[Tensor]) -> dict[int, UntypedStorage]:
    """Each storage once, by address; a tensor without elements has none, and neither has one that is freed."""
    found = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage for storage in found if storage.nbytes()}


def _bytes_of(storage: UntypedStorage) -> Tensor:
    """The whole storage as a flat tensor that shares it."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
