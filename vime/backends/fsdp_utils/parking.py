"""Device memory given back and taken again: values wait on the host, tensors and their views stay what they are."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class Parking:
    """Holds the bytes of tensors whose storage was emptied. One user at a time: `park`, then `fetch`."""

    def __init__(self) -> None:
        self._parked: list[tuple[torch.UntypedStorage, Tensor]] = []
        self.is_parked = False

    def park(self, tensors: Iterable[Tensor]) -> None:
        """Copy every storage behind `tensors` to the host and empty it. A shard without elements has none."""
        found = (tensor.untyped_storage() for tensor in tensors)
        for storage in {storage.data_ptr(): storage for storage in found if storage.nbytes()}.values():
            self._parked.append((storage, _bytes_of(storage).to("cpu", copy=True)))
            storage.resize_(0)
        self.is_parked = True

    def fetch(self) -> None:
        """Fill every storage again."""
        for storage, host in self._parked:
            storage.resize_(host.numel())
            _bytes_of(storage).copy_(host)
        self._parked, self.is_parked = [], False


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """The whole storage as a flat tensor that shares it."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload,no-any-return]
