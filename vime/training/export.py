"""Outputs of an engine besides a publish: the content hash of its weights, and a Hugging Face directory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import cast

import torch.distributed as dist
from torch import Tensor

from vime.config.lora import AdapterInfo
from vime.protocols import AdapterEngine, TrainEngine
from vime.training.save_hf import plan_files, write_hf
from vime.types import CheckpointError, Version
from vime.weights.hashing import ContentHash, OrderedHash, hashed
from vime.weights.plan import TensorMeta
from vime.weights.published import describe


def weights_hash(engine: TrainEngine, *, trains_adapter: bool = False) -> str:
    """Return the content hash that a generation engine reports for these weights, with --lora-rank for the adapter; the
    same on all ranks. Collective like `TrainEngine.export_weights`, over every replica that calls it."""
    content = ContentHash()
    metadata, stream = _of(engine, is_adapter=trains_adapter)
    for meta, (_, tensor) in zip(metadata, stream, strict=True):
        content.add(meta, tensor)
    return content.hexdigest()


def _of(engine: TrainEngine, *, is_adapter: bool) -> tuple[list[TensorMeta], Iterator[tuple[str, Tensor]]]:
    """Return the model, an adapter merged into it, or the adapter alone."""
    if not is_adapter:
        return engine.weight_metadata(), engine.export_weights()
    trained = cast("AdapterEngine", engine)
    return trained.adapter_metadata(), trained.export_adapter()


def save_hf(engine: TrainEngine, directory: Path, *, source: Path, adapter: AdapterInfo | None = None) -> None:
    """Write a Hugging Face directory of the present weights, with everything but the weights copied from `source`; with
    `adapter` that of the adapter alone.

    Collective over all trainer ranks; rank 0 writes. A failure of rank 0 reaches every rank as CheckpointError.
    """
    failure: list[str | None] = [None]
    if engine.takes_part_in_export:
        metadata, stream = _of(engine, is_adapter=adapter is not None)
        if dist.get_rank() == 0:
            try:
                write_hf(directory, stream, metadata, source=source, adapter=adapter)
            except CheckpointError as error:
                failure = [str(error)]
        for _ in stream:
            pass
    dist.broadcast_object_list(failure, src=0)
    if failure[0] is not None:
        raise CheckpointError(failure[0])


def save_published(
    engine: TrainEngine, directory: Path, stream: Iterator[tuple[str, Tensor]], *, version: Version, source: Path
) -> str:
    """Write the weights of `stream` for jobs outside of the run, and return their content hash. Called by rank 0, while
    its peers take part in the gathering; `stream` is consumed to its end in every case."""
    metadata, content, ordered = engine.weight_metadata(), ContentHash(), OrderedHash()
    write_hf(directory, hashed(stream, metadata, content, ordered), metadata, source=source)
    file_of = {meta.name: name for name, metas in plan_files(metadata).items() for meta in metas}
    describe(directory, version, ordered.hexdigest(), metadata, file_of)
    return content.hexdigest()
