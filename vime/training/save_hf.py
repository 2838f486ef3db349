"""Write the weights as a Hugging Face directory that transformers and vLLM load."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor

from vime.config.lora import AdapterInfo
from vime.types import CheckpointError
from vime.utils.files import sync, sync_tree
from vime.weights.adapter_files import write_adapter
from vime.weights.hf_files import copy_companions, write_index, write_shard
from vime.weights.plan import TensorMeta

SHARD_BYTES = 4 << 30


def write_hf(
    directory: Path,
    stream: Iterator[tuple[str, Tensor]],
    metadata: Sequence[TensorMeta],
    *,
    source: Path,
    adapter: AdapterInfo | None = None,
) -> None:
    """Consume `stream` into DIRECTORY, in files of at most 4 GiB, with everything but the weights copied from `source`.
    `adapter`: the stream has the tensors of one, for a directory that PEFT and vLLM load beside `source`.

    The directory appears complete or not at all: files are written beside it and renamed. After a kill at any moment
    there is the earlier export, the new one, or, between two renames, both under other names; the next call restores
    the earlier one before it writes. On an error the stream is still consumed to its end before CheckpointError is
    raised, so that peers inside its collectives do not wait.
    """
    partial, former = directory.with_name(directory.name + ".partial"), directory.with_name(directory.name + ".former")
    try:
        _recover(directory, former)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        if adapter is None:
            _write_tensors(partial, stream, metadata)
            copy_companions(partial, source, dtype=metadata[0].dtype)
        else:
            write_adapter(partial, dict(stream), adapter, base=str(source))
        sync_tree(partial)
        if directory.exists():
            directory.rename(former)
        partial.rename(directory)
        sync(directory.parent)
        shutil.rmtree(former, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        for _ in stream:
            pass
        raise CheckpointError(
            f"{directory}: the weights could not be written (by --save-hf or for jobs outside): {error}. Check free "
            "space and permissions; an earlier export of this name stays."
        ) from error


def _recover(directory: Path, former: Path) -> None:
    """Restore or remove what a kill between the two renames, or before the last removal, left behind."""
    if former.exists() and not directory.exists():
        former.rename(directory)
    shutil.rmtree(former, ignore_errors=True)


def _write_tensors(directory: Path, stream: Iterator[tuple[str, Tensor]], metadata: Sequence[TensorMeta]) -> None:
    files = plan_files(metadata)
    for name, metas in files.items():
        tensors = {}
        for meta in metas:
            hf_name, tensor = next(stream)
            assert hf_name == meta.name, (hf_name, meta.name)
            tensors[hf_name] = tensor.detach().cpu().clone()  # a contiguous copy: safetensors refuses shared storage
        write_shard(directory / name, tensors)
    if len(files) > 1:
        write_index(directory, files)
    assert next(stream, None) is None, "the export continues after the last tensor of its metadata"


def plan_files(metadata: Sequence[TensorMeta]) -> dict[str, list[TensorMeta]]:
    """Return file name -> its tensors, in export order."""
    shards: list[list[TensorMeta]] = [[]]
    used = 0
    for meta in metadata:
        if shards[-1] and used + meta.nbytes > SHARD_BYTES:
            shards.append([])
            used = 0
        shards[-1].append(meta)
        used += meta.nbytes
    if len(shards) == 1:
        return {"model.safetensors": shards[0]}
    return {f"model-{number:05d}-of-{len(shards):05d}.safetensors": shard for number, shard in enumerate(shards, 1)}
