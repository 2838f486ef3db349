"""An audit reads every visible checkpoint to its last byte."""

from __future__ import annotations

from pathlib import Path

import pytest

from vime.handoff import audit_checkpoints as module
from vime.handoff.audit_checkpoints import audit_checkpoints
from vime.utils.manifest import MANIFEST, write_manifest


def checkpoint(root: Path, name: str, *, with_manifest: bool = True) -> Path:
    (root / name / "model").mkdir(parents=True)
    (root / name / "run_state.json").write_text("{}")
    (root / name / "model" / "__0_0.distcp").write_bytes(bytes(1000))
    if with_manifest:
        write_manifest(root / name, {})
    return root / name


def test_damage_is_found_in_every_visible_checkpoint_and_named(tmp_path: Path) -> None:
    for name in ("iter_0000001", "iter_0000002", "iter_0000002.2", "mine", ".partial_iter_0000003"):
        damaged = checkpoint(tmp_path, name)
        (damaged / "model" / "__0_0.distcp").write_bytes(bytes(999) + b"\x01")
    checkpoint(tmp_path, "iter_0000004")
    (checkpoint(tmp_path, "iter_0000005") / "run_state.json").unlink()
    found = audit_checkpoints(tmp_path)
    assert [(finding.subject, finding.message.split(":")[0]) for finding in found.findings] == [
        ("iter_0000001", "model/__0_0.distcp"),
        ("iter_0000002", "model/__0_0.distcp"),
        ("iter_0000002.2", "model/__0_0.distcp"),
        ("iter_0000005", "run_state.json"),
    ]
    assert found.read == ("iter_0000001", "iter_0000002", "iter_0000002.2", "iter_0000004", "iter_0000005")


def test_checkpoints_from_before_manifests_are_said_apart(tmp_path: Path) -> None:
    checkpoint(tmp_path, "iter_0000001", with_manifest=False)
    found = audit_checkpoints(tmp_path)
    assert (found.findings, found.read, found.unknown) == ((), (), ("iter_0000001",))
    assert audit_checkpoints(tmp_path / "absent").findings == ()


def test_a_checkpoint_that_a_live_run_removes_meanwhile_is_no_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    going = checkpoint(tmp_path, "iter_0000001")
    (going / "model" / "__0_0.distcp").unlink()

    def removed(directory: Path) -> list[str]:
        found = find_damage(directory)
        directory.rename(tmp_path / ".partial_iter_0000001")  # as `ray/checkpoint.py` begins to remove one
        return found

    find_damage = module.find_damage
    monkeypatch.setattr(module, "find_damage", removed)
    assert audit_checkpoints(tmp_path).findings == ()
    assert (tmp_path / ".partial_iter_0000001" / MANIFEST).is_file()
