"""A manifest tells whether each byte of a directory is still the one that was written, and the others by name."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from vime.utils.hashing import PIECE_BYTES, hash_file, new_hash
from vime.utils.manifest import MANIFEST, find_damage, read_manifest, share_of, write_manifest

CONTENT = {"run_state.json": b'{"a": 1}', "model/__0_0.distcp": bytes(range(256)) * 20, "model/critic/common.pt": b"c"}


def written(directory: Path) -> Path:
    for name, content in CONTENT.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(content)
    write_manifest(directory, {})
    return directory


def test_the_hash_is_xxh3_of_128_bits_on_every_machine(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"")
    # XXH3_128bits of nothing with seed 0, from the reference implementation's specification
    assert hash_file(tmp_path / "a") == (0, "99aa06d3014798d86001c324468d497f")
    content = random.Random(1).randbytes(2 * PIECE_BYTES + 17)
    (tmp_path / "b").write_bytes(content)
    whole = new_hash()
    whole.update(content)
    assert hash_file(tmp_path / "b") == (len(content), whole.hexdigest())


def test_what_was_written_is_whole(tmp_path: Path) -> None:
    assert find_damage(written(tmp_path)) == []
    assert read_manifest(tmp_path).keys() == CONTENT.keys()


def test_missing_extra_shorter_and_changed_files_are_all_named(tmp_path: Path) -> None:
    written(tmp_path)
    (tmp_path / "run_state.json").unlink()
    (tmp_path / "model" / "note").write_text("n")
    (tmp_path / "model" / "__0_0.distcp").write_bytes(CONTENT["model/__0_0.distcp"][:-1])
    (tmp_path / "model" / "critic" / "common.pt").write_bytes(b"C")
    assert [finding[: len(finding.split(": hash")[0])] for finding in find_damage(tmp_path)] == [
        "model/__0_0.distcp: has 5119 bytes, expected 5120",
        "model/note: is there, but was not written with the others",
        "run_state.json: is missing, expected 8 bytes",
        "model/critic/common.pt: its bytes changed",
    ]


def test_every_flipped_bit_is_found_in_the_file_that_has_it_or_is_without_effect(tmp_path: Path) -> None:
    written(tmp_path)
    entries, seeded = read_manifest(tmp_path), random.Random(7)
    for _ in range(400):
        name = seeded.choice([*CONTENT, MANIFEST])
        content = bytearray((tmp_path / name).read_bytes())
        before, bit = bytes(content), seeded.randrange(8 * len(content))
        content[bit // 8] ^= 1 << bit % 8
        (tmp_path / name).write_bytes(content)
        findings = find_damage(tmp_path)
        if name == MANIFEST and not findings:  # a blank between two entries may become another
            assert read_manifest(tmp_path) == entries
            assert before[bit // 8 : bit // 8 + 1].isspace()
        else:
            assert [finding.split(":")[0] for finding in findings] == [name]
        (tmp_path / name).write_bytes(before)


def test_within_a_bound_the_smallest_files_are_read_and_sizes_of_all_are_compared(tmp_path: Path) -> None:
    written(tmp_path)
    shard = tmp_path / "model" / "__0_0.distcp"
    shard.write_bytes(bytes(5120))
    assert find_damage(tmp_path, max_bytes=5120) == []
    assert len(find_damage(tmp_path, max_bytes=5129)) == 1
    shard.write_bytes(bytes(5121))
    assert find_damage(tmp_path, max_bytes=5120) == ["model/__0_0.distcp: has 5121 bytes, expected 5120"]


def test_what_a_writer_says_is_taken_and_its_size_held_against_the_file(tmp_path: Path) -> None:
    written(tmp_path)
    write_manifest(tmp_path, {"run_state.json": (8, "said")})
    assert read_manifest(tmp_path)["run_state.json"] == (8, "said")
    with pytest.raises(OSError, match=r"run_state.json has 8 bytes, but 9 were written"):
        write_manifest(tmp_path, {"run_state.json": (9, "said")})
    with pytest.raises(OSError, match="gone has no bytes, but 1 were written"):
        write_manifest(tmp_path, {"gone": (1, "said")})


@pytest.mark.parametrize("text", ["", "{", "[]", '{"files": {}}', '{"files": {"a": 1}, "hash": ""}', "\xff"])
def test_a_manifest_that_is_none_is_damage_and_one_that_is_missing_an_error(text: str, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        find_damage(tmp_path)
    (tmp_path / MANIFEST).write_bytes(text.encode("latin-1"))
    assert [finding.split(":")[0] for finding in find_damage(tmp_path)] == [MANIFEST]


def test_an_entry_that_another_tool_changed_with_its_file_is_seen(tmp_path: Path) -> None:
    written(tmp_path)
    record = json.loads((tmp_path / MANIFEST).read_text())
    record["files"]["model/critic/common.pt"][1] = "0" * 32
    (tmp_path / MANIFEST).write_text(json.dumps(record))
    assert [finding.split(":")[0] for finding in find_damage(tmp_path)] == [MANIFEST]


def test_readers_share_the_files_among_them() -> None:
    names = [f"f{number}" for number in range(7)]
    shares = [share_of(names, rank, 3) for rank in range(3)]
    assert sorted(name for share in shares for name in share) == names
    assert {len(share) for share in shares} == {2, 3}
