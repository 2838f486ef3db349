"""Writing a Hugging Face directory from a stream of tensors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from vime.training import save_hf
from vime.types import CheckpointError
from vime.weights.plan import TensorMeta

TENSORS = {f"layer.{index}": torch.full((2, 8), float(index)) for index in range(3)}  # 64 bytes each
METADATA = [TensorMeta.of(name, tensor) for name, tensor in TENSORS.items()]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    directory = tmp_path / "source"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"model_type": "llama", "torch_dtype": "bfloat16"}))
    (directory / "tokenizer.json").write_text("{}")
    (directory / "chat_template.jinja").write_text("hello")
    (directory / "model.safetensors").write_text("old weights")
    (directory / "model.safetensors.index.json").write_text("old index")
    return directory


def test_companions_are_copied_and_the_dtype_is_that_of_the_weights(tmp_path: Path, source: Path) -> None:
    save_hf.write_hf(tmp_path / "out", iter(TENSORS.items()), METADATA, source=source)
    files = {file.name for file in (tmp_path / "out").iterdir()}
    assert files == {"config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors"}
    assert json.loads((tmp_path / "out/config.json").read_text()) == {"model_type": "llama", "dtype": "float32"}
    loaded = load_file(tmp_path / "out/model.safetensors")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in TENSORS.items())


def test_large_models_are_cut_into_files_with_an_index(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save_hf, "SHARD_BYTES", 128)  # two tensors of 64 bytes
    save_hf.write_hf(tmp_path / "out", iter(TENSORS.items()), METADATA, source=source)
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    assert index == {
        "metadata": {"total_size": 192},
        "weight_map": {"layer.0": first, "layer.1": first, "layer.2": second},
    }
    assert set(load_file(tmp_path / "out" / second)) == {"layer.2"}


def test_an_older_export_is_replaced_whole(tmp_path: Path, source: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/stale.safetensors").write_text("stale")
    save_hf.write_hf(tmp_path / "out", iter(TENSORS.items()), METADATA, source=source)
    assert not (tmp_path / "out/stale.safetensors").exists()
    assert not (tmp_path / "out.partial").exists()


def test_a_failure_consumes_the_stream_so_that_peers_are_not_left_waiting(tmp_path: Path, source: Path) -> None:
    seen = []

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in TENSORS.items():
            seen.append(name)
            yield name, tensor

    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(CheckpointError, match="--save-hf"):
        save_hf.write_hf(tmp_path / "file" / "out", stream(), METADATA, source=source)
    assert seen == list(TENSORS)
