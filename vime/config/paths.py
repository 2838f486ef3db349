"""Paths of the command line made absolute: workers, and their nodes, have working directories of their own."""

from __future__ import annotations

import os
import re
from pathlib import Path

from vime.config.flags import PathKind, flag_name, knobs
from vime.config.parse import SECTIONS, Config


def absolute_paths(config: Config) -> Config:
    """Resolve every flag that names a file or directory, relative to where the run was started."""
    changes: dict[str, object] = {}
    for section, kind in SECTIONS.items():
        for _, spec in knobs(kind):
            value, path_kind = getattr(getattr(config, section), spec.name), spec.metadata["path"]
            if value and path_kind is not None:
                is_pairs = path_kind is PathKind.PAIRS
                changes[spec.name] = _absolute_pairs(value) if is_pairs else _absolute(value, path_kind)
    return config.replace(**changes)


PART_BEHIND = re.compile(r"@\[.*$|(?<=\.py):\w+$")
"""What may stand behind a path: a slice of records, or a name in a plug-in's file."""
EXPECTED_PROMPTS = (
    "Expected jsonl or parquet, a pattern of such files, or a directory that `datasets` saved; check the path."
)


def prompt_files(value: str) -> list[Path]:
    """Return what a path of prompts names, without its slice: a file, the files of a pattern in order, or a
    directory."""
    path = Path(value).expanduser()
    if path.exists():
        return [path]
    return sorted(path.parent.glob(path.name)) if "*" in path.name else []


def existing_paths(config: Config) -> list[tuple[str, str]]:
    """Return (flag, path) of each file or directory that a flag names and that is there now: on a cluster every node
    must see these."""
    found = list[tuple[str, str]]()
    for section, kind in SECTIONS.items():
        for _, spec in knobs(kind):
            value, path_kind = getattr(getattr(config, section), spec.name), spec.metadata["path"]
            if not value or path_kind is None:
                continue
            texts = value[1::2] if path_kind is PathKind.PAIRS else [value]
            paths = [PART_BEHIND.sub("", text) for text in texts]
            found += [(flag_name(spec), path) for path in paths if os.path.exists(path)]
    return found


def _absolute(value: str, kind: PathKind) -> str:
    if kind is PathKind.PLUGIN and ".py:" not in value:
        return value  # package.module.name
    return os.path.abspath(os.path.expanduser(value))


def _absolute_pairs(words: tuple[str, ...]) -> tuple[str, ...]:
    """Every second word is a file."""
    return tuple(_absolute(text, PathKind.FILE) if place % 2 else text for place, text in enumerate(words))
