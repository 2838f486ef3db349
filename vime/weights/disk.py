"""Transport `disk`: safetensors files in a directory that the sender and every engine can read.

The slowest and the least demanding one: it crosses hosts that share nothing but a file system. Each update is a
directory of Hugging Face shards, so the newest one can also start an engine.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from vime.protocols import EngineControl
from vime.types import PublishError
from vime.weights.plan import Bucket
from vime.weights.wire import BucketReceiver, BucketSender, Deliver, bucket_to_wire

KEPT_UPDATES = 2


class DiskSender(BucketSender):
    """Writes one shard per bucket and keeps the newest updates."""

    def __init__(self, directory: Path, *, bucket_bytes: int, timeout_s: float) -> None:
        super().__init__(bucket_bytes=bucket_bytes, timeout_s=timeout_s)
        self._directory = directory.absolute()
        self._count = 0

    def connect(self, fleet: EngineControl) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        fleet.init_transfer([{"transport": "disk"}] * len(fleet.addresses))

    def close(self) -> None:
        """The files stay: they are the newest weights."""

    @property
    def _current(self) -> Path:
        return self._directory / f"update_{self._count:07d}"

    def _begin(self) -> None:
        self._count += 1
        for stale in sorted(self._directory.glob("update_*"))[: -(KEPT_UPDATES - 1) or None]:
            shutil.rmtree(stale)
        self._current.mkdir()

    def _deliver(self, bucket: Bucket, buffer: torch.Tensor, deliver: Deliver) -> None:
        final = self._current / f"model-{bucket.index + 1:05d}-of-{bucket.count:05d}.safetensors"
        partial = final.with_name(f".partial_{final.name}")
        # clone: the format refuses tensors that share one memory
        save_file({slot.meta.name: slot.view(buffer).clone() for slot in bucket.slots}, partial)
        os.replace(partial, final)
        deliver({**bucket_to_wire(bucket), "path": str(final)})


class DiskReceiver(BucketReceiver):
    """Reads one shard per bucket."""

    def _read(self, bucket: Bucket, update_info: Mapping[str, object]) -> list[torch.Tensor]:
        path = str(update_info["path"])
        with safe_open(path, "pt") as file:
            names = {slot.meta.name for slot in bucket.slots}
            if set(file.keys()) != names:
                raise PublishError(f"{path} holds other tensors than announced: {sorted(set(file.keys()) ^ names)[:5]}")
            return [file.get_tensor(slot.meta.name) for slot in bucket.slots]
