"""Recorded rollouts: one sample a line, written completely or not at all, read back bit for bit.

JSON keeps Python floats exactly (shortest repr), so a replayed round trains like the recorded one.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Sequence
from pathlib import Path

from vime.types import DataError, Sample


def save_rollout(path: Path, groups: list[list[Sample]], *, partition_id: str, producer_ids: Sequence[str]) -> None:
    """Write groups in order, to be replayed. `producer_ids`: the worker that generated each group. `row` holds a row's
    values under the RFC's names; only people and scripts read it."""
    records = [
        (sample, {"position": position, "row": _row_record(sample, partition_id, producer), "sample": sample.to_dict()})
        for position, (group, producer) in enumerate(zip(groups, producer_ids, strict=True))
        for sample in group
    ]
    _write_lines(path, records)


def _row_record(sample: Sample, partition_id: str, producer_id: str) -> dict[str, object]:
    spans = sample.token_policy_versions
    return {
        "global_index": sample.index,
        "partition_id": partition_id,
        "producer_id": producer_id,
        "version_start": spans[0].version if spans else -1,
        "version_end": spans[-1].version if spans else -1,
    }


def save_samples(path: Path, samples: list[Sample]) -> None:
    """Write the completions of an evaluation for people and reports: each line is one `Sample.to_dict`."""
    _write_lines(path, [(sample, sample.to_dict()) for sample in samples])


def check_recorded(path: Path) -> None:
    """Refuse a round of which there is no file."""
    if not path.is_file():
        raise DataError(
            f"--load-debug-rollout-data {path}: no such file. Record rounds with --save-debug-rollout-data, and check "
            "that --num-rollout does not ask for more rounds than were recorded."
        )


def load_rollout(path: Path) -> list[list[Sample]]:
    """Return the groups of a recorded round, in order."""
    check_recorded(path)
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


def _write_lines(path: Path, records: list[tuple[Sample, dict[str, object]]]) -> None:
    """Write so that readers never see a half-written file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        for sample, record in records:
            file.write(_line(sample, record) + "\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _line(sample: Sample, record: dict[str, object]) -> str:
    try:
        return json.dumps(record, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"sample {sample.index} cannot be recorded: {error}. Metadata, label and reward must be JSON values."
        ) from error
