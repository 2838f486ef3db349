"""Checkpoints of a whole run: the trainer writes model state, this file run state; visible at once or not at all.

Layout: `<dir>/iter_0000012/{model/, run_state.json}` and `<dir>/latest_checkpointed_iteration.txt`, which names the
newest complete one. A checkpoint is written beside its final place and renamed when complete, so a kill at any byte
leaves the previous one in force.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vime.types import CheckpointError, Version

LATEST = "latest_checkpointed_iteration.txt"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """What a run needs besides the model to go on: the last trained round, the version and the data cursor."""

    rollout_id: int
    version: Version
    data_source: dict[str, Any]


def save_checkpoint(root: Path, state: RunState, save_model: Callable[[Path], None]) -> Path:
    """Write one checkpoint and make it the latest. `save_model` fills the `model` directory it is given."""
    final = root / f"iter_{state.rollout_id:07d}"
    partial = root / f".partial_{final.name}"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        (partial / "model").mkdir(parents=True)
        save_model(partial / "model")
        _write_durably(partial / "run_state.json", json.dumps(asdict(state)))
        if final.exists():
            shutil.rmtree(final)
        partial.rename(final)
        _write_durably(root / LATEST, f"{state.rollout_id}\n")
    except OSError as error:
        raise CheckpointError(
            f"checkpoint {final}: {error}. The previous checkpoint is intact; free space or fix permissions, then "
            "resume with --load."
        ) from error
    return final


def find_latest(root: Path) -> Path | None:
    """The newest complete checkpoint, or None for a missing or empty directory."""
    marker = root / LATEST
    if not marker.is_file():
        partial = sorted(entry.name for entry in root.glob("iter_*")) if root.is_dir() else []
        if partial:
            raise CheckpointError(f"{root} holds {partial} but no {LATEST}. Write the wanted number into that file.")
        return None
    text = marker.read_text().strip()
    found = root / f"iter_{int(text):07d}" if text.isdigit() else root / text
    if not (found / "run_state.json").is_file():
        raise CheckpointError(f"{marker} names {text!r}, but {found} is not a complete checkpoint. Name another one.")
    return found


def read_run_state(checkpoint: Path) -> RunState:
    path = checkpoint / "run_state.json"
    try:
        return RunState(**json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}. Resume from an older checkpoint.") from error


def _write_durably(path: Path, text: str) -> None:
    """Write, flush to disk, then rename over `path`."""
    partial = path.with_name(f".partial_{path.name}")
    with partial.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)
