"""Transport `shm`: through memory of the sender that every process of this host can open.

The sender keeps two buckets in anonymous memory files and tells the engines their /proc paths. Unlike files in /dev/shm
they vanish with the sender however it ends, and they are not held to the 64 MB that containers give /dev/shm.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial

import torch

from vime.protocols import EngineControl
from vime.types import PublishError
from vime.utils.background import in_background
from vime.utils.waits import waiting
from vime.weights.plan import Bucket, TensorMeta
from vime.weights.wire import BucketReceiver, BucketSender, Deliver, bucket_to_wire


class ShmSender(BucketSender):
    """Engines must run on this host. One bucket is filled while the engines load the one before."""

    def __init__(self, *, bucket_bytes: int, timeout_s: float) -> None:
        super().__init__(bucket_bytes=bucket_bytes, timeout_s=timeout_s)
        self._files: dict[int, tuple[int, torch.Tensor]] = {}  # descriptor and memory, of even and of odd buckets

    def connect(self, fleet: EngineControl) -> None:
        fleet.init_transfer([{"transport": "shm"}] * len(fleet.addresses))

    def close(self) -> None:
        self._free_buffers()

    def _free_buffers(self) -> None:
        for turn in list(self._files):
            self._free(turn)

    def _free(self, turn: int) -> None:
        file, _ = self._files.pop(turn)
        os.close(file)

    def _buffer(self, bucket: Bucket) -> torch.Tensor:
        turn, nbytes = bucket.index % 2, bucket.nbytes
        if turn in self._files and self._files[turn][1].numel() < nbytes:
            self._free(turn)
        if turn not in self._files:
            file = os.memfd_create("vime-weights")
            try:
                # Reserve now: without it a full machine would end the process by SIGBUS at the first write.
                os.posix_fallocate(file, 0, nbytes)
                self._files[turn] = file, torch.frombuffer(mmap.mmap(file, nbytes), dtype=torch.uint8)
            except BaseException:
                os.close(file)
                raise
        return self._files[turn][1][:nbytes]

    def _send(
        self,
        filled: Iterator[tuple[Bucket, torch.Tensor]],
        metadata: Sequence[TensorMeta],  # noqa: ARG002
        deliver: Deliver,
    ) -> None:
        travelling: Future[None] | None = None
        try:
            for bucket, buffer in filled:
                if travelling is not None:
                    self._wait(travelling)
                travelling = in_background("weight-delivery", partial(self._deliver, bucket, buffer, deliver))
        finally:
            if travelling is not None:  # also when the next bucket cannot be filled: the engines still read this one
                self._wait(travelling)

    def _wait(self, travelling: Future[None]) -> None:
        """`deliver` has the deadline."""
        with waiting("the engines to take a bucket of weights", "engine", deadline_s=self._timeout_s):
            travelling.result()

    def _deliver(self, bucket: Bucket, buffer: torch.Tensor, deliver: Deliver) -> None:  # noqa: ARG002
        deliver({**bucket_to_wire(bucket), "path": f"/proc/{os.getpid()}/fd/{self._files[bucket.index % 2][0]}"})


class ShmReceiver(BucketReceiver):
    """Copies each bucket out: the engine's loader keeps references to tensors until a layer is complete."""

    def _read(self, buckets: Sequence[Bucket], update_info: Mapping[str, object]) -> Iterator[list[torch.Tensor]]:
        path = str(update_info["path"])
        for bucket in buckets:
            buffer = torch.empty(bucket.nbytes, dtype=torch.uint8)
            with open(path, "rb", buffering=0) as file:
                target = buffer.numpy().data
                filled = 0
                while filled < bucket.nbytes:  # one read returns at most 2 GiB
                    got = file.readinto(target[filled:])
                    if not got:
                        raise PublishError(f"shared weights {path}: {filled} bytes, expected {bucket.nbytes}")
                    filled += got
            yield [slot.view(buffer) for slot in bucket.slots]
