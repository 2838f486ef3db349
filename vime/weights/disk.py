"""Transport `disk`: safetensors files in a directory that the sender and every engine can read.

The slowest and the least demanding one: it crosses hosts that share nothing but a file system. Each update is a
directory of Hugging Face shards, so the newest one can also start an engine.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from vime.protocols import EngineControl
from vime.types import PublishError
from vime.weights.plan import Bucket, TensorMeta
from vime.weights.wire import BucketReceiver, BucketSender, Deliver, update_to_wire

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

    def _send(
        self, filled: Iterator[tuple[Bucket, torch.Tensor]], metadata: Sequence[TensorMeta], deliver: Deliver
    ) -> None:
        """Write while the engines generate; they are asked when every file is there."""
        self._count += 1
        for stale in sorted(self._directory.glob("update_*"))[: -(KEPT_UPDATES - 1) or None]:
            shutil.rmtree(stale)
        self._current.mkdir()
        for bucket, buffer in filled:
            final = self._current / shard_name(bucket)
            partial = final.with_name(f".partial_{final.name}")
            # clone: the format refuses tensors that share one memory
            save_file({slot.meta.name: slot.view(buffer).clone() for slot in bucket.slots}, partial)
            os.replace(partial, final)
        deliver({**update_to_wire(metadata, self._bucket_bytes), "path": str(self._current)})


def shard_name(bucket: Bucket) -> str:
    return f"model-{bucket.index + 1:05d}-of-{bucket.count:05d}.safetensors"


class DiskReceiver(BucketReceiver):
    """Reads one shard per bucket."""

    def _read(self, buckets: Sequence[Bucket], update_info: Mapping[str, object]) -> Iterator[list[torch.Tensor]]:
        for bucket in buckets:
            path = Path(str(update_info["path"]), shard_name(bucket))
            with safe_open(path, "pt") as file:
                names = {slot.meta.name for slot in bucket.slots}
                if other := set(file.keys()) ^ names:
                    raise PublishError(f"{path} holds other tensors than announced: {sorted(other)[:5]}")
                tensors = [file.get_tensor(slot.meta.name) for slot in bucket.slots]
            yield tensors
