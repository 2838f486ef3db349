"""The weights of one version as files: what docs/producer-protocol.md says of them, and a manifest."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from vime.gateway.messages import WeightFile, WeightManifest
from vime.weights.hashing import ordered_hash
from vime.weights.plan import TensorMeta


def write_weights(
    directory: Path, tensors: dict[str, torch.Tensor], version: int, num_files: int = 2
) -> WeightManifest:
    """Write `directory` and return what the gateway says of it. The order of the hash is that of the dict; the files
    take turns, so that it is not the order of any file."""
    directory.mkdir(parents=True)
    names = [f"model-{number:05d}-of-{num_files:05d}.safetensors" for number in range(1, num_files + 1)]
    for place, name in enumerate(names):
        part = {key: tensor.contiguous() for key, tensor in list(tensors.items())[place::num_files]}
        save_file(part, directory / name)
    entries = [
        {
            "name": meta.name, "dtype": meta.dtype, "shape": list(meta.shape), "file": names[number % num_files],
        }
        for number, meta in enumerate(TensorMeta.of(name, tensor) for name, tensor in tensors.items())
    ]  # fmt: skip
    hashed = ordered_hash(tensors)
    (directory / "tokenizer.json").write_text('{"version": "1.0"}')  # a run writes a whole Hugging Face directory
    (directory / "tensors.json").write_text(
        json.dumps({"version": version, "content_hash": hashed, "tensors": entries})
    )
    return WeightManifest(
        version=version,
        content_hash=hashed,
        location=str(directory),
        files=[_facts(directory / name) for name in (*names, "tensors.json", "tokenizer.json")],
    )


def _facts(path: Path) -> WeightFile:
    data = path.read_bytes()
    return WeightFile(name=path.name, num_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
