"""Transport `disk`: safetensors files in a directory that the sender and every engine can read.

The slowest and the least demanding one: it crosses hosts that share nothing but a file system. Each update is a
directory that transformers and vLLM load, with config and tokenizer, so anybody can start an engine from the newest
one (an update of an adapter: its tensors alone). It has its name when it is whole, and a higher number than those
before it, whichever sender made them.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open

from vime.protocols import EngineControl
from vime.types import PublishError
from vime.weights.hf_files import copy_companions, write_index, write_shard
from vime.weights.plan import Bucket, TensorMeta
from vime.weights.wire import BucketReceiver, BucketSender, Deliver, update_to_wire

KEPT_UPDATES = 2
UPDATE, DRAFT = "update_", ".update_"


class DiskSender(BucketSender):
    """Writes one shard per bucket and keeps the newest updates. `source`: the model's directory, for all but the
    weights; None where they are no model's."""

    def __init__(self, directory: Path, *, source: Path | None, bucket_bytes: int, timeout_s: float) -> None:
        super().__init__(bucket_bytes=bucket_bytes, timeout_s=timeout_s)
        self._directory, self._source = directory.absolute(), source

    def connect(self, fleet: EngineControl) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        fleet.init_transfer([{"transport": "disk"}] * len(fleet.addresses))

    def close(self) -> None:
        """The files stay: they are the newest weights."""

    def _send(
        self, filled: Iterator[tuple[Bucket, torch.Tensor]], metadata: Sequence[TensorMeta], deliver: Deliver
    ) -> None:
        """Write while the engines generate; they are asked when every file is there."""
        updates = sorted(self._directory.glob(f"{UPDATE}*"))
        number = int(updates[-1].name.removeprefix(UPDATE)) + 1 if updates else 1
        drafts = self._directory.glob(f"{DRAFT}*")  # of a sender that was ended
        for stale in [*updates[: -(KEPT_UPDATES - 1) or None], *drafts]:
            shutil.rmtree(stale)
        update = self._directory / f"{UPDATE}{number:07d}"
        draft = self._directory / f"{DRAFT}{number:07d}"
        draft.mkdir()
        files: dict[str, list[TensorMeta]] = {}
        for bucket, buffer in filled:
            name = shard_name(bucket)
            # clone: the format refuses tensors that share one memory
            tensors = {slot.meta.name: slot.view(buffer).clone() for slot in bucket.slots}
            write_shard(draft / name, tensors)
            files[name] = [slot.meta for slot in bucket.slots]
        if self._source is not None:
            write_index(draft, files)
            copy_companions(draft, self._source, dtype=metadata[0].dtype)
        draft.rename(update)
        deliver({**update_to_wire(metadata, self._bucket_bytes), "path": str(update)})


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
