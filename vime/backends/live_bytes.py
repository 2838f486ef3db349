"""Bytes of the storages that are alive in a block of code, counted as torch makes and frees them, on any device."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten


class LiveBytes(TorchDispatchMode):
    """Inside of its `with` block every storage that an operation returns is counted until it is freed. Storages that
    are older than the block are not to be counted: name them to `ignore`, or a view would add them.

    What an operation allocates for itself and frees before it returns (a workspace) is not seen.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.peak = 0
        self._held: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._counting = threading.RLock()  # the thread of a collective may be the last that holds a tensor

    def __torch_dispatch__(
        self,
        function: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        result = self.call(function, args, kwargs or {})
        for leaf in tree_flatten(result)[0]:
            if isinstance(leaf, Tensor):
                self._count(leaf.untyped_storage())
        return result

    def call(self, function: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]) -> object:
        """Run one operation. A subclass may stand in for those that a device without data cannot compute."""
        return function(*args, **kwargs)

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            self._hold(tensor.untyped_storage(), 0)

    def _count(self, storage: torch.UntypedStorage) -> None:
        if _key(storage) not in self._held:
            self._hold(storage, storage.nbytes())

    def _hold(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        key = _key(storage)

        def free(_: object) -> None:
            with self._counting:
                del self._held[key]
                self.now -= num_bytes

        with self._counting:
            self._held[key] = weakref.ref(storage, free), num_bytes
            self.now += num_bytes
            self.peak = max(self.peak, self.now)


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the storages of `tensors`, each counted once."""
    return sum(storages(tensors).values())


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return the bytes of each storage by a key that two views of it share."""
    found = [tensor.untyped_storage() for tensor in tensors]
    return {_key(storage): storage.nbytes() for storage in found}


def _key(storage: torch.UntypedStorage) -> int:
    address: int = storage._cdata  # noqa: SLF001  its data has no address on the meta device
    return address
