"""`vime produce` reports the hash that the gateway asks for, of what its engines have confirmed by another one."""

import asyncio
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from tests.helpers.gateway_run import GatewayRun
from tests.helpers.lossy_proxy import LossyProxy
from tests.helpers.weight_files import write_weights
from vime.backends.vllm_utils.fake import FakeEngine
from vime.config.parse import Config
from vime.gateway.client import GatewayClient
from vime.gateway.tokens import Scope
from vime.gateway.weights import Weights
from vime.ray import produce
from vime.types import PublishError, VimeError

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


def job(directory: Any, *engines: FakeEngine, client: GatewayClient | None = None) -> Any:
    config = Config().replace(update_weight_transport="shm", hf_checkpoint=str(directory))
    fleet = SimpleNamespace(addresses=[engine.address for engine in engines])
    screen = SimpleNamespace(note=lambda _text: None)
    return produce.Weights(config, directory / "held", cast("Any", client), cast("Any", fleet), cast("Any", screen))


OTHER = {"b": TENSORS["b"] + 1, "a": TENSORS["a"] + 1}
SHORTER = {"b": TENSORS["b"][:3] + 1, "a": TENSORS["a"][:1]}


class Resumed:
    """A gateway whose run goes back, once, when a job makes its call number `when` to a path that ends in `at`: it
    then serves version 0 with the tensors `other`. The gateway was started again, so it has forgotten who confirmed
    what. `when` 0: it never goes back."""

    def __init__(self, directory: Path, at: str, when: int, other: dict[str, torch.Tensor]) -> None:
        self.published = directory / "published" / "0"
        self.run = GatewayRun(directory / "run", manifest=write_weights(self.published, TENSORS, 0))
        self._at, self._when, self._other = at, when, other
        self._seen = 0
        self.proxy = LossyProxy(self.run.server.url, self._goes_back)

    def _goes_back(self, path: str, _number: int) -> bool:
        """Called after the gateway has responded. The response arrives."""
        self._seen += path.endswith(self._at)
        if path.endswith(self._at) and self._seen == self._when:
            shutil.rmtree(self.published)
            manifest = write_weights(self.published, self._other, 0, num_files=1)
            self.run.gateway.weights = Weights(self.published.parent, manifest)
        return False

    def bring(self, directory: Path, engine: FakeEngine) -> None:
        """Let a job load version 0 and report it."""

        async def brought() -> None:
            token = self.run.tokens.make("job-a", (Scope.TRAIN,), seconds=600)
            client = GatewayClient(self.proxy.url, token, patience_s=20.0)
            weights = job(directory, engine, client=client)
            try:
                await weights.bring(0)
            finally:
                weights.close()
                await client.close()

        asyncio.run(brought())

    def manifests(self) -> int:
        """How often the job has asked for the manifest."""
        return [path for path, _ in self.proxy.calls].count("/v1/weights/0")

    def close(self) -> None:
        self.proxy.close()
        self.run.close()


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Path]:
    """A directory where no file of the trainer can be linked, as on another machine."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        assert Path(directory).stat().st_dev != tmp_path.stat().st_dev
        yield Path(directory)


@pytest.mark.parametrize(
    ("at", "when", "other"),
    [
        ("/v1/weights/0", 1, OTHER),  # after the manifest: the second file is not there any more
        ("model-00001-of-00002.safetensors", 2, OTHER),  # between two parts of a file
        ("model-00001-of-00002.safetensors", 2, SHORTER),  # the file ends before the third part
        ("tokenizer.json", 1, OTHER),  # after the last file: the gateway refuses the hash that was right before
    ],
)
def test_a_version_that_is_published_anew_while_a_job_downloads_it_is_begun_anew(
    tmp_path: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch, at: str, when: int, other: dict[str, torch.Tensor]
) -> None:
    monkeypatch.setattr("vime.gateway.client.PART_BYTES", 128)
    resumed = Resumed(tmp_path, at, when, other)
    try:
        with FakeEngine(name="e0") as engine:
            resumed.bring(elsewhere, engine)
            assert resumed.run.gateway.weights.has_confirmed("job-a", 0)
            assert all(torch.equal(engine.weights[name], tensor) for name, tensor in other.items())
    finally:
        resumed.close()
    assert resumed.manifests() == 2


def test_a_job_whose_gateway_never_sends_what_its_manifest_says_ends_after_three_tries(
    tmp_path: Path, elsewhere: Path
) -> None:
    resumed = Resumed(tmp_path, "", 0, OTHER)
    tokenizer = resumed.published / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace("1.0", "1.1"))
    try:
        with FakeEngine(name="e0") as engine, pytest.raises(VimeError, match="SHA-256"):
            resumed.bring(elsewhere, engine)
        assert not resumed.run.gateway.weights.has_confirmed("job-a", 0)
    finally:
        resumed.close()
    assert resumed.manifests() == 3
