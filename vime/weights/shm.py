"""Transport `shm`: through memory of the sender that every process of this host can open.

The sender keeps one bucket in an anonymous memory file and tells the engines its /proc path. Unlike a file in /dev/shm
it vanishes with the sender however that ends, and it is not held to the 64 MB that containers give /dev/shm.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping

import torch

from vime.protocols import EngineControl
from vime.types import PublishError
from vime.weights.plan import Bucket
from vime.weights.wire import BucketReceiver, BucketSender, Deliver, bucket_to_wire


class ShmSender(BucketSender):
    """Engines must run on this host."""

    def __init__(self, *, bucket_bytes: int, timeout_s: float) -> None:
        super().__init__(bucket_bytes=bucket_bytes, timeout_s=timeout_s)
        self._file: int | None = None
        self._memory: torch.Tensor | None = None

    def connect(self, fleet: EngineControl) -> None:
        fleet.init_transfer([{"transport": "shm"}] * len(fleet.addresses))

    def close(self) -> None:
        self._free_buffer()

    def _free_buffer(self) -> None:
        self._memory = None
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _buffer(self, nbytes: int) -> torch.Tensor:
        if self._memory is None or self._memory.numel() < nbytes:
            self._free_buffer()
            self._file = os.memfd_create("vime-weights")
            # Reserve now: without it a full machine would end the process by SIGBUS at the first write.
            os.posix_fallocate(self._file, 0, nbytes)
            self._memory = torch.frombuffer(mmap.mmap(self._file, nbytes), dtype=torch.uint8)
        return self._memory[:nbytes]

    def _deliver(self, bucket: Bucket, buffer: torch.Tensor, deliver: Deliver) -> None:  # noqa: ARG002
        deliver({**bucket_to_wire(bucket), "path": f"/proc/{os.getpid()}/fd/{self._file}"})


class ShmReceiver(BucketReceiver):
    """Copies each bucket out: the engine's loader keeps references to tensors until a layer is complete."""

    def _read(self, bucket: Bucket, update_info: Mapping[str, object]) -> list[torch.Tensor]:
        buffer = torch.empty(bucket.nbytes, dtype=torch.uint8)
        path = str(update_info["path"])
        with open(path, "rb", buffering=0) as file:
            target = buffer.numpy().data
            filled = 0
            while filled < bucket.nbytes:  # one read returns at most 2 GiB
                got = file.readinto(target[filled:])
                if not got:
                    raise PublishError(f"shared weights {path}: {filled} bytes, expected {bucket.nbytes}")
                filled += got
        return [slot.view(buffer) for slot in bucket.slots]
