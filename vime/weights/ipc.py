"""Transport `ipc`: a bucket stays on the GPU that trainer rank and engine share (--colocate), and the engine opens it.

As `shm`, with memory of the GPU in the place of a file: two buckets in turn, one call for each. Only who sees the GPU
can open them, so each engine has a sender of its own, whose GPU is the first that the engine's workers see.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence

import msgspec
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from vime.protocols import EngineControl
from vime.weights.plan import Bucket
from vime.weights.shm import ShmSender
from vime.weights.update_info import DeviceMemory
from vime.weights.wire import BucketReceiver, Deliver, bucket_to_wire

SHARED_DEVICE = 0
"""Number of the shared GPU in the engine, whose GPUs are those of the sender's rank and of the ranks after it."""


class IpcSender(ShmSender):
    """One engine, on GPUs of which the first is the sender's."""

    def __init__(self, *, bucket_bytes: int, timeout_s: float) -> None:
        super().__init__(bucket_bytes=bucket_bytes, timeout_s=timeout_s)
        self._buckets: dict[int, torch.Tensor] = {}  # of even and of odd buckets

    def connect(self, fleet: EngineControl) -> None:
        fleet.init_transfer([{"transport": "ipc"}] * len(fleet.addresses))

    def _buffer(self, bucket: Bucket) -> torch.Tensor:
        turn = bucket.index % 2
        if turn not in self._buckets or self._buckets[turn].numel() < bucket.nbytes:
            self._buckets[turn] = torch.empty(bucket.nbytes, dtype=torch.uint8, device=torch.cuda.current_device())
        return self._buckets[turn][: bucket.nbytes]

    def _deliver(self, bucket: Bucket, buffer: torch.Tensor, deliver: Deliver) -> None:
        torch.cuda.synchronize(buffer.device)  # the bucket is filled by work that is only queued
        deliver({**bucket_to_wire(bucket), "device_memory": shared(self._buckets[bucket.index % 2])})

    def _free_buffers(self) -> None:
        self._buckets.clear()
        torch.cuda.ipc_collect()


class IpcReceiver(BucketReceiver):
    """Copies each bucket out, to this worker's own GPU: the sender fills it again."""

    def _read(self, buckets: Sequence[Bucket], update_info: Mapping[str, object]) -> Iterator[list[torch.Tensor]]:
        memory = msgspec.convert(update_info["device_memory"], DeviceMemory)
        for bucket in buckets:
            buffer = opened(memory)[: bucket.nbytes].to(self._device, copy=True)
            torch.cuda.synchronize(self._device)
            yield [slot.view(buffer) for slot in bucket.slots]

    def finish(self) -> None:
        super().finish()
        torch.cuda.ipc_collect()


def shared(memory: torch.Tensor) -> DeviceMemory:
    """Describe a flat tensor of bytes so that another process can open it. It must live until the other has closed it,
    and each description be opened once."""
    _, told = reduce_tensor(memory)
    (_, _, _, _, _, _, _, handle, storage_bytes, offset_bytes, _, counter, counter_offset, event, waits) = told
    return {
        "handle": _text(handle),
        "storage_bytes": storage_bytes,
        "offset_bytes": offset_bytes,
        "counter": _text(counter),
        "counter_offset": counter_offset,
        "event": _text(event),
        "waits_for_event": waits,
    }


def opened(memory: DeviceMemory) -> torch.Tensor:
    """Inverse of `shared`, in another process: the same bytes."""
    tensor: torch.Tensor = rebuild_cuda_tensor(
        torch.Tensor,
        (memory["storage_bytes"],),
        (1,),
        0,
        torch.storage.TypedStorage,
        torch.uint8,
        SHARED_DEVICE,
        base64.b64decode(memory["handle"]),
        memory["storage_bytes"],
        memory["offset_bytes"],
        False,
        base64.b64decode(memory["counter"]),
        memory["counter_offset"],
        base64.b64decode(memory["event"]),
        memory["waits_for_event"],
    )
    return tensor


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode()
