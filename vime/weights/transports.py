"""Both ends of a transport by its name in --update-weight-transport."""

from __future__ import annotations

from pathlib import Path

import torch

from vime.weights.broadcast import BroadcastReceiver, BroadcastSender, NcclReceiver
from vime.weights.disk import DiskReceiver, DiskSender
from vime.weights.ipc import IpcReceiver, IpcSender
from vime.weights.shm import ShmReceiver, ShmSender
from vime.weights.wire import BucketReceiver, WeightSender

RECEIVERS: dict[str, type[BucketReceiver]] = {
    "shm": ShmReceiver,
    "ipc": IpcReceiver,
    "gloo": BroadcastReceiver,
    "nccl": NcclReceiver,
    "disk": DiskReceiver,
}

EACH_BY_ITSELF = ("shm", "disk")
"""Transports from which an engine takes a bucket without the others."""

BUCKET_BYTES = 512 << 20
SHM_BUCKET_BYTES = 64 << 20
"""Both ends are on one host and each holds a bucket; a larger one gains nothing, because a call takes milliseconds."""


def make_sender(
    name: str, *, bucket_bytes: int | None, directory: Path, timeout_s: float, source: Path | None = None
) -> WeightSender:
    """Make the trainer's end. `directory`, and `source` for config and tokenizer, are used by `disk` alone; `timeout_s`
    bounds each step of a broadcast. `bucket_bytes` None: what suits the transport."""
    bucket_bytes = bucket_bytes or (SHM_BUCKET_BYTES if name == "shm" else BUCKET_BYTES)
    if name == "shm":
        return ShmSender(bucket_bytes=bucket_bytes, timeout_s=timeout_s)
    if name == "ipc":
        return IpcSender(bucket_bytes=bucket_bytes, timeout_s=timeout_s)
    if name == "disk":
        return DiskSender(directory, source=source, bucket_bytes=bucket_bytes, timeout_s=timeout_s)
    if name in ("gloo", "nccl"):
        return BroadcastSender(name, bucket_bytes=bucket_bytes, timeout_s=timeout_s)
    raise ValueError(f"no weight transport {name!r}; expected one of {sorted(RECEIVERS)}")


def make_receiver(name: str, device: torch.device) -> BucketReceiver:
    """Make an engine worker's end."""
    if name not in RECEIVERS:
        raise ValueError(f"no weight transport {name!r}; expected one of {sorted(RECEIVERS)}")
    return RECEIVERS[name](device)
