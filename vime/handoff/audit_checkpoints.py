"""The part of an audit that reads checkpoints: is each byte of them still the one that was written?"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from vime.handoff.audit_history import Finding
from vime.utils.manifest import MANIFEST, find_damage

VISIBLE = re.compile(r"iter_\d{7,}(\.\d+)?")


@dataclass(frozen=True, slots=True)
class CheckpointsAudit:
    """The findings; the checkpoints that were read, and those without a manifest to check them by."""

    findings: tuple[Finding, ...]
    read: tuple[str, ...]
    unknown: tuple[str, ...]


def audit_checkpoints(root: Path) -> CheckpointsAudit:
    """Read every visible checkpoint of a directory, which may be missing. One that a live run removes meanwhile is left
    out."""
    findings: list[Finding] = []
    read, unknown = [], []
    paths = sorted(root.iterdir()) if root.is_dir() else []
    for path in paths:
        if not VISIBLE.fullmatch(path.name) or not path.is_dir():
            continue
        try:
            damage = find_damage(path)
        except OSError as error:
            damage = [] if isinstance(error, FileNotFoundError) else [f"cannot be read: {error}"]
        if not path.is_dir():
            continue
        if not (path / MANIFEST).is_file():
            unknown.append(path.name)
            continue
        read.append(path.name)
        findings += [Finding("checkpoint", path.name, text) for text in damage]
    return CheckpointsAudit(tuple(findings), tuple(read), tuple(unknown))
