"""`vime produce` reports the hash that the gateway asks for, of what its engines have confirmed by another one."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from tests.helpers.weight_files import write_weights
from vime.backends.vllm_utils.fake import FakeEngine
from vime.config.parse import Config
from vime.ray import produce
from vime.types import PublishError

TENSORS = {"b": torch.arange(50.0), "a": torch.ones(7, 3, dtype=torch.bfloat16)}


def test_the_reported_hash_is_the_manifests_and_the_engines_hold_the_files_tensors(tmp_path):
    manifest = write_weights(tmp_path / "version", TENSORS, 3)
    with FakeEngine(name="e0") as first, FakeEngine(name="e1") as second:
        weights = job(tmp_path, first, second)
        assert weights._load(tmp_path / "version", manifest) == {
            "e0": manifest.content_hash,
            "e1": manifest.content_hash,
        }
        assert all(torch.equal(second.weights[name], tensor) for name, tensor in TENSORS.items())
        other = write_weights(tmp_path / "other", {**TENSORS, "b": -TENSORS["b"]}, 4)
        assert set(weights._load(tmp_path / "other", other).values()) == {other.content_hash} != {manifest.content_hash}
        weights.close()


def test_other_files_than_the_manifests_are_not_reported_under_its_hash(tmp_path):
    """As after a download that went wrong: the gateway then refuses the report."""
    manifest = write_weights(tmp_path / "version", TENSORS, 3)
    write_weights(tmp_path / "wrong", {**TENSORS, "b": TENSORS["b"] + 1}, 3)
    with FakeEngine(name="e0") as engine:
        weights = job(tmp_path, engine)
        assert manifest.content_hash not in weights._load(tmp_path / "wrong", manifest).values()
        weights.close()


def test_an_engine_that_confirms_something_else_is_not_reported_at_all(tmp_path):
    manifest = write_weights(tmp_path / "version", TENSORS, 3)
    with FakeEngine(name="e0") as engine:
        engine.faults.wrong_hash = True
        weights = job(tmp_path, engine)
        with pytest.raises(PublishError, match="e0 serves version 3 with hash 0000"):
            weights._load(tmp_path / "version", manifest)
        weights.close()


def job(directory: Any, *engines: FakeEngine) -> Any:
    config = Config().replace(update_weight_transport="shm", hf_checkpoint=str(directory))
    fleet = SimpleNamespace(addresses=[engine.address for engine in engines])
    screen = SimpleNamespace(note=lambda _text: None)
    return produce.Weights(config, directory / "held", cast("Any", None), cast("Any", fleet), cast("Any", screen))
