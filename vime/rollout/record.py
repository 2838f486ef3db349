"""Recorded rollouts: one sample a line, written whole or not at all, read back bit for bit.

JSON keeps Python floats exactly (shortest repr), so a replayed round trains like the recorded one.
"""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path

from vime.types import DataError, Sample


def save_rollout(path: Path, groups: list[list[Sample]]) -> None:
    """Write groups in order; readers never see a half-written file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        for position, group in enumerate(groups):
            for sample in group:
                file.write(_line(position, sample) + "\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def load_rollout(path: Path) -> list[list[Sample]]:
    """The groups of a recorded round, in order."""
    if not path.is_file():
        raise DataError(
            f"--load-debug-rollout-data {path}: no such file. Record rounds with --save-debug-rollout-data, and check "
            "that --num-rollout does not ask for more rounds than were recorded."
        )
    records = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                record = json.loads(line)
                records.append((record["position"], Sample.from_dict(record["sample"])))
            except (ValueError, KeyError, TypeError) as error:
                raise DataError(
                    f"{path}:{number}: not a recorded sample: {type(error).__name__} {error}. Expected a file "
                    "written by --save-debug-rollout-data of this version."
                ) from error
    if not records:
        raise DataError(f"{path}: no samples there. Record the round again.")
    return [[sample for _, sample in part] for _, part in itertools.groupby(records, key=lambda record: record[0])]


def _line(position: int, sample: Sample) -> str:
    try:
        return json.dumps({"position": position, "sample": sample.to_dict()}, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"sample {sample.index} cannot be recorded: {error}. Metadata, label and reward must be JSON values."
        ) from error
