"""A sender of weights that does to one bucket, after it was hashed, what a fault on the way does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from vime.weights.plan import Bucket
from vime.weights.wire import BucketSender

OTHER_BYTES = ("flipped", "stale", "half stale", "swapped")
"""Faults after which every bucket arrives, one of them with other bytes."""


class Faulty:
    """`fault` may change between two updates. `lost` and `last lost` leave a bucket out; `stale` and `half stale` need
    a sound update before."""

    def __init__(self, fault: str, sender: BucketSender) -> None:
        self.fault, self.sender, self._before = fault, sender, torch.empty(0)
        self._filled, sender._filled = sender._filled, self._faulty  # type: ignore[method-assign]

    def _faulty(self, *of_update: Any) -> Iterator[tuple[Bucket, torch.Tensor]]:
        for bucket, buffer in self._filled(*of_update):
            now, middle = buffer.clone(), buffer.numel() // 2
            if bucket.index == 1 and self.fault == "flipped":
                buffer[3] ^= 1
            elif bucket.index == 1 and self.fault == "stale":
                buffer.copy_(self._before)
            elif bucket.index == 1 and self.fault == "half stale":
                buffer[middle:] = self._before[middle:]
            elif self.fault == "swapped":
                alike = [slot for slot in bucket.slots if slot.meta.shape == bucket.slots[-1].meta.shape]
                first, last = alike[0].view(buffer), alike[-1].view(buffer)
                first[:], last[:] = last.clone(), first.clone()
            if bucket.index == 1:
                self._before = now
            if (self.fault, bucket.index) not in (("lost", 1), ("last lost", bucket.count - 1)):
                yield bucket, buffer
