"""Weights as files for jobs outside: what the trainer wrote is read back by somebody else before it is offered."""

import pytest
import torch

from tests.helpers.weight_files import write_weights
from vime.types import PublishError
from vime.weights import published
from vime.weights.hashing import content_hash, ordered_hash
from vime.weights.published import forget_before, metadata_of, read_back, tensors_of, version_directory, whole_versions

TENSORS = {
    "model.b": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "model.a": torch.full((4,), -0.0, dtype=torch.bfloat16),  # its bytes are hashed: 0.0 would differ
    "lm_head": torch.ones(2, 2, dtype=torch.float16),
}


def test_what_was_written_is_read_back_in_the_order_of_its_hash(tmp_path):
    told = write_weights(tmp_path / "version", TENSORS, 3)
    found = read_back(tmp_path / "version")
    assert (found.version, found.content_hash, found.num_tensors) == (3, content_hash(TENSORS), 3)
    assert found.ordered_hash == ordered_hash(TENSORS) == told.content_hash
    assert [(file.name, file.num_bytes, file.sha256) for file in found.files] == sorted(
        (file.name, file.num_bytes, file.sha256) for file in told.files
    )
    assert [meta.name for meta in metadata_of(tmp_path / "version")] == list(TENSORS)
    for meta, tensor in tensors_of(tmp_path / "version"):
        assert torch.equal(tensor, TENSORS[meta.name])


@pytest.mark.parametrize("name", ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"])
def test_a_flipped_bit_of_any_file_is_found(tmp_path, name):
    write_weights(tmp_path / "version", TENSORS, 3)
    path = tmp_path / "version" / name
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(PublishError, match="the tensors have the hash"):
        read_back(tmp_path / "version")


def test_a_missing_file_another_shape_and_no_list_of_tensors_are_found(tmp_path):
    directory = tmp_path / "version"
    write_weights(directory, TENSORS, 3)
    listed = (directory / "tensors.json").read_text()
    (directory / "tensors.json").write_text(listed.replace("[4]", "[2, 2]"))
    with pytest.raises(PublishError, match=r"tensor model\.a is torch\.bfloat16 \[4\]"):
        read_back(directory)
    (directory / "tensors.json").write_text(listed)
    (directory / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(PublishError, match="cannot be read"):
        read_back(directory)
    (directory / "tensors.json").unlink()
    with pytest.raises(PublishError, match=r"tensors\.json cannot be read"):
        read_back(directory)


def test_old_versions_are_deleted_and_one_that_is_not_whole_is_none(tmp_path):
    for version in (1, 2, 10):
        write_weights(version_directory(tmp_path, version), TENSORS, version)
    version_directory(tmp_path, 11).mkdir()  # a writer that was killed
    assert whole_versions(tmp_path) == [1, 2, 10]
    assert forget_before(tmp_path, 10) == [1, 2]
    assert whole_versions(tmp_path) == [10]


def test_files_whose_deletion_was_cut_short_are_no_version_and_go_with_the_next_call(tmp_path, monkeypatch):
    """A gateway that is killed in it starts again, and reads back every version that looks whole."""
    for version in (1, 2):
        write_weights(version_directory(tmp_path, version), TENSORS, version)

    def killed(directory):
        next(directory.glob("*.safetensors")).unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(published.shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            forget_before(tmp_path, 2)
    assert whole_versions(tmp_path) == [2]
    assert forget_before(tmp_path, 2) == []
    assert not version_directory(tmp_path, 1).exists()
