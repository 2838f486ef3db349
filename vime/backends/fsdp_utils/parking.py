"""Device memory given back and taken again: values wait on the host, tensors and their views stay what they are."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class Parking:
    """Holds the bytes of tensors whose storage was emptied. One user at a time: `park`, then `fetch`."""

    def __init__(self) -> None:
        self._parked: list[tuple[torch.UntypedStorage, Tensor]] = []

    @property
    def is_empty(self) -> bool:
        return not self._parked

    def park(self, tensors: Iterable[Tensor]) -> None:
        """Copy every storage behind `tensors` to the host and empty it."""
        for storage in {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}.values():
            is_on_host = storage.device.type == "cpu"
            host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=not is_on_host)
            host.copy_(_bytes(storage))
            storage.resize_(0)
            self._parked.append((storage, host))

    def fetch(self) -> None:
        """Fill every storage again."""
        for storage, host in self._parked:
            storage.resize_(host.numel())
            _bytes(storage).copy_(host)
        self._parked.clear()


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    """The whole storage as a flat tensor that shares it."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload,no-any-return]
