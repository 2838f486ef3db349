"""A Hugging Face directory: files with weights, and what makes a model of them: an index, config and tokenizer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from vime.weights.plan import TensorMeta

COPIED_SUFFIXES = {".json", ".txt", ".model", ".jinja"}  # config, tokenizer, chat template, generation defaults


def write_shard(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write one file with weights, for whoever may read its directory: the library makes it for its owner alone. The
    format refuses tensors that share one memory."""
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(path.parent.stat().st_mode & 0o666)


def write_index(directory: Path, files: Mapping[str, Sequence[TensorMeta]]) -> None:
    """`files`: file name -> the tensors in it."""
    weight_map = {meta.name: name for name, metas in files.items() for meta in metas}
    total_bytes = sum(meta.nbytes for metas in files.values() for meta in metas)
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def copy_companions(directory: Path, source: Path, *, dtype: str) -> None:
    """Write config.json with the dtype of these weights, and copy the tokenizer's files."""
    for file in sorted(source.iterdir()):
        if file.is_file() and file.suffix in COPIED_SUFFIXES and not file.name.endswith(".index.json"):
            shutil.copyfile(file, directory / file.name)
    config = json.loads((source / "config.json").read_text())
    config.pop("torch_dtype", None)
    config["dtype"] = dtype
    (directory / "config.json").write_text(json.dumps(config, indent=2))
