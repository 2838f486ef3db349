"""Writing a Hugging Face directory from a stream of tensors."""

from __future__ import annotations

import itertools
import json
import os
import resource
import shutil
import signal
import sys
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


def test_a_new_export_is_on_the_disk_before_it_takes_the_name(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = []

    def note(directory: Path) -> None:
        synced.append((directory.name, {file.name for file in directory.iterdir()}, (tmp_path / "out").exists()))

    monkeypatch.setattr(save_hf, "sync_tree", note)
    save_hf.write_hf(tmp_path / "out", iter(TENSORS.items()), METADATA, source=source)
    files = {"config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors"}
    assert synced == [("out.partial", files, False)]


def export_killed_at(step: int, out: Path, source: Path) -> bool:
    """In a forked process that kills itself before its `step`-th change of a name; whether it was killed."""
    pid = os.fork()
    if pid == 0:
        steps = itertools.count(1)

        def count(event: str, _: object) -> None:
            if event in {"os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree"} and next(steps) == step:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        save_hf.write_hf(out, iter(TENSORS.items()), METADATA, source=source)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert status in (0, signal.SIGKILL)
    return status == signal.SIGKILL


def test_a_kill_while_an_export_is_replaced_never_loses_both(tmp_path: Path, source: Path) -> None:
    def first_layer(directory: Path) -> float | None:
        whole = (directory / "config.json").is_file() and (directory / "model.safetensors").is_file()
        return float(load_file(directory / "model.safetensors")["layer.0"][0, 0]) if whole else None

    out, found, was_killed = tmp_path / "out", [], True
    older = {name: tensor + 7 for name, tensor in TENSORS.items()}
    while was_killed:
        for leftover in tmp_path.glob("out*"):
            shutil.rmtree(leftover)
        save_hf.write_hf(out, iter(older.items()), METADATA, source=source)
        was_killed = export_killed_at(len(found) + 1, out, source)
        found.append([first_layer(tmp_path / name) for name in ("out", "out.former", "out.partial")])
        save_hf.write_hf(out, iter(TENSORS.items()), METADATA, source=source)
        assert [path.name for path in tmp_path.glob("out*")] == ["out"]
        assert first_layer(out) == 0.0
    assert all(7.0 in values or values[0] == 0.0 for values in found)
    assert [7.0, None, None] in found  # before the first rename
    assert [None, 7.0, 0.0] in found  # between the two: both are there under other names
    assert found[-1] == [0.0, None, None]


def test_an_export_that_was_moved_away_by_a_killed_one_comes_back(tmp_path: Path, source: Path) -> None:
    save_hf.write_hf(tmp_path / "out.former", iter(TENSORS.items()), METADATA, source=source)
    with pytest.raises(CheckpointError, match="an earlier export of this name stays"):
        save_hf.write_hf(tmp_path / "out", iter(TENSORS.items()), METADATA, source=tmp_path / "nowhere")
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_a_full_disk_is_named(tmp_path: Path, source: Path) -> None:
    big = {"layer.0": torch.zeros(1 << 18)}  # 1 MiB
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))  # the kernel refuses what is beyond 64 KiB
    try:
        with pytest.raises(CheckpointError, match=r"--save-hf .*File too large"):
            save_hf.write_hf(
                tmp_path / "out", iter(big.items()), [TensorMeta.of("layer.0", big["layer.0"])], source=source
            )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


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
