"""Outputs of an engine besides a publish: the content hash of its weights, and a Hugging Face directory."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from vime.protocols import TrainEngine
from vime.training.save_hf import write_hf
from vime.types import CheckpointError
from vime.weights.hashing import ContentHash


def weights_hash(engine: TrainEngine) -> str:
    """Return the content hash that a generation engine reports for these weights, the same on all ranks. Collective
    like `TrainEngine.export_weights`, over every replica that calls it. It covers the order of the stream, so two
    layouts agree when they export in the same order."""
    content = ContentHash()
    for meta, (_, tensor) in zip(engine.weight_metadata(), engine.export_weights(), strict=True):
        content.add(meta, tensor)
    return content.hexdigest()


def save_hf(engine: TrainEngine, directory: Path, *, source: Path) -> None:
    """Write a Hugging Face directory of the present weights, with everything but the weights copied from `source`.

    Collective over all trainer ranks; rank 0 writes. A failure of rank 0 reaches every rank as CheckpointError.
    """
    failure: list[str | None] = [None]
    if engine.takes_part_in_export:
        stream = engine.export_weights()
        if dist.get_rank() == 0:
            try:
                write_hf(directory, stream, engine.weight_metadata(), source=source)
            except CheckpointError as error:
                failure = [str(error)]
        for _ in stream:
            pass
    dist.broadcast_object_list(failure, src=0)
    if failure[0] is not None:
        raise CheckpointError(failure[0])
