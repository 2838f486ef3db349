"""Weights as files for rollout jobs outside of the run: what the trainer wrote, read back by somebody else.

RUN/published/version_0000003/ is a Hugging Face directory and `tensors.json`, which names every tensor in the order of
its hash. `tensors.json` is written last: a directory without it is not whole.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vime.types import PublishError, Version
from vime.utils.files import sync
from vime.weights.hashing import ContentHash, OrderedHash
from vime.weights.plan import TensorMeta

TENSORS_NAME = "tensors.json"
_CHUNK_BYTES = 1 << 20


class _Tensor(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    dtype: str
    shape: list[int]
    file: str


class _Tensors(msgspec.Struct, frozen=True, kw_only=True):
    version: int
    content_hash: str
    tensors: list[_Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedFile:
    """A file of a version. `sha256`: hexadecimal."""

    name: str
    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedWeights:
    """A version whose files were read back: their content has the hash that the trainer gave it.

    `content_hash` is that of the run's own engines; `ordered_hash` the one for jobs outside, in tensors.json."""

    version: Version
    content_hash: str
    ordered_hash: str
    num_tensors: int
    directory: Path
    files: tuple[PublishedFile, ...]


def published_root(run_dir: Path) -> Path:
    return run_dir / "published"


def version_directory(run_dir: Path, version: Version) -> Path:
    return published_root(run_dir) / f"version_{version:07d}"


def describe(
    directory: Path, version: Version, ordered_hash: str, metadata: Sequence[TensorMeta], file_of: dict[str, str]
) -> None:
    """Write `tensors.json`, which makes the directory whole. `file_of`: tensor -> name of its file."""
    tensors = [
        _Tensor(name=meta.name, dtype=meta.dtype, shape=[*meta.shape], file=file_of[meta.name]) for meta in metadata
    ]
    told = _Tensors(version=version, content_hash=ordered_hash, tensors=tensors)
    draft = directory / f"{TENSORS_NAME}.partial"
    draft.write_bytes(msgspec.json.encode(told))
    sync(draft)
    draft.replace(directory / TENSORS_NAME)
    sync(directory)


def whole_versions(run_dir: Path) -> list[Version]:
    """Return the versions whose files are all there, oldest first."""
    found = published_root(run_dir).glob(f"version_*/{TENSORS_NAME}")
    return sorted(int(path.parent.name.removeprefix("version_")) for path in found)


def read_back(directory: Path) -> PublishedWeights:
    """Read every file, and compare the content of the tensors with the hash that was written. PublishError when they
    differ, or something is missing."""
    told = _told(directory)
    content, ordered = ContentHash(), OrderedHash()
    for meta, tensor in tensors_of(directory):
        content.add(meta, tensor)
        ordered.add(meta, tensor)
    if ordered.hexdigest() != told.content_hash:
        raise PublishError(
            f"{directory}: the tensors have the hash {ordered.hexdigest()}, but the trainer sent {told.content_hash}. "
            "No job gets this version. Look for a fault of the disk, and publish again."
        )
    files = [path for path in sorted(directory.iterdir()) if path.is_file() and path.suffix != ".partial"]
    return PublishedWeights(
        version=told.version,
        content_hash=content.hexdigest(),
        ordered_hash=told.content_hash,
        num_tensors=content.num_tensors,
        directory=directory,
        files=tuple(_hashed(path) for path in files),
    )


def tensors_of(directory: Path) -> Iterator[tuple[TensorMeta, Tensor]]:
    """Return the tensors of a version, one at a time, in the order of tensors.json. Memory: one tensor."""
    for tensor in _told(directory).tensors:
        path = directory / tensor.file
        try:
            with safe_open(path, "pt") as file:
                found = file.get_tensor(tensor.name)
        except (OSError, SafetensorError) as error:
            raise PublishError(f"{path}: tensor {tensor.name} cannot be read: {error}.") from error
        meta = TensorMeta(tensor.name, tensor.dtype, tuple(tensor.shape))
        if TensorMeta.of(tensor.name, found) != meta:
            raise PublishError(f"{path}: tensor {tensor.name} is {found.dtype} {[*found.shape]}, expected {meta}.")
        yield meta, found


def metadata_of(directory: Path) -> list[TensorMeta]:
    """Return name, dtype and shape of every tensor of a version, in the order of tensors.json."""
    return [TensorMeta(each.name, each.dtype, tuple(each.shape)) for each in _told(directory).tensors]


def forget_before(run_dir: Path, oldest: Version) -> list[Version]:
    """Delete the files of older versions and return their numbers. The list of tensors goes first: killed in the middle
    it leaves no version that looks whole, and what it leaves goes with the next call."""
    gone = [version for version in whole_versions(run_dir) if version < oldest]
    for directory in published_root(run_dir).glob("version_*"):
        if int(directory.name.removeprefix("version_")) < oldest:
            (directory / TENSORS_NAME).unlink(missing_ok=True)
            shutil.rmtree(directory)
    return gone


def _told(directory: Path) -> _Tensors:
    try:
        return msgspec.json.decode((directory / TENSORS_NAME).read_bytes(), type=_Tensors)
    except (OSError, msgspec.MsgspecError) as error:
        raise PublishError(f"{directory / TENSORS_NAME} cannot be read: {error}.") from error


def _hashed(path: Path) -> PublishedFile:
    digest, num_bytes = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            num_bytes += len(chunk)
    return PublishedFile(name=path.name, num_bytes=num_bytes, sha256=digest.hexdigest())
