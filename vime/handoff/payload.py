"""Rows and groups as bytes, for queue and spool: packed columns behind a JSON header. No pickle: reading runs no code
of the writer.

    payload = b"VIMP" + u32 length of the header + header (JSON, UTF-8) + the columns, end to end, little-endian

The header has `kind`, `num_rows`, `num_tokens` (prompt and response), `columns` as [name, dtype, entries] in their
order, and, for samples, `samples`: what is not a number, as JSON. `kind` is `rows` for training rows (the codec's
columns, docs in columns.py) or `samples` for answers as plug-ins see them, finished or aborted.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from vime.handoff.codec import Columns, decode_rows, encode_rows, from_buffer, to_buffer
from vime.types import HandoffError, Sample, TrainRow

MAGIC = b"VIMP"
_PREFIX = struct.Struct("<4sI")
SAMPLE_COLUMNS = {"tokens": "<i8", "loss_mask": "<i8", "rollout_log_probs": "<f8", "teacher_log_probs": "<f8"}
"""Long fields of a sample that travel as numbers; each has one entry in `lengths` per sample, -1 for None."""


def rows_to_bytes(rows: Sequence[TrainRow], extra: Sequence[str] = ()) -> bytes:
    """Training rows, of any groups; `extra` names the optional columns to carry."""
    return _pack("rows", len(rows), sum(row.total_length for row in rows), encode_rows(rows, extra), {})


def bytes_to_rows(data: bytes) -> tuple[TrainRow, ...]:
    """Inverse of `rows_to_bytes`."""
    header, columns = _unpack(data, "rows")
    rows = decode_rows(columns)
    if len(rows) != header["num_rows"]:
        raise HandoffError(f"payload: {len(rows)} rows, its header says {header['num_rows']}. It is damaged.")
    return rows


def samples_to_bytes(samples: Sequence[Sample]) -> bytes:
    """Answers of one prompt, exactly; whatever is not a number must be what JSON can say."""
    groups = [sample.group_index for sample in samples]
    if len(set(groups)) != 1:
        raise HandoffError(f"payload: samples of groups {groups}; expected the samples of one group.")
    records = [sample.to_dict() for sample in samples]
    columns: Columns = {}
    for name, dtype in SAMPLE_COLUMNS.items():
        cells = [record.pop(name) for record in records]
        try:
            columns[name] = np.asarray([number for cell in cells for number in cell or ()], dtype=dtype)
        except (OverflowError, ValueError, TypeError) as error:
            raise HandoffError(f"group {groups[0]}: {name} holds no plain numbers: {error}") from error
        columns[f"{name}_lengths"] = np.asarray([-1 if cell is None else len(cell) for cell in cells], dtype="<i8")
    bad = sorted({key for record in records for key, value in record.items() if not _is_json(value)})
    if bad:
        raise HandoffError(
            f"group {groups[0]}: {', '.join(bad)} cannot be stored. Fields of a sample must be finite numbers, "
            "strings, lists, or dicts with string keys."
        )
    num_tokens = sum(len(sample.tokens) for sample in samples)
    return _pack("samples", len(samples), num_tokens, columns, {"samples": records})


def bytes_to_samples(data: bytes) -> list[Sample]:
    """Inverse of `samples_to_bytes`."""
    header, columns = _unpack(data, "samples")
    records = header["samples"]
    try:
        for name in SAMPLE_COLUMNS:
            flat, start = columns[name].tolist(), 0
            for record, length in zip(records, columns[f"{name}_lengths"].tolist(), strict=True):
                record[name] = None if length < 0 else flat[start : start + length]
                start += max(length, 0)
        return [Sample.from_dict(record) for record in records]
    except (KeyError, TypeError, ValueError) as error:
        raise HandoffError(f"payload: not a group of samples: {error!r}. The writer is of another version.") from error


def payload_size(data: bytes) -> tuple[int, int]:
    """(rows, tokens) as the header says, without decoding the rest."""
    header, _ = _header(data)
    return header["num_rows"], header["num_tokens"]


def _pack(kind: str, num_rows: int, num_tokens: int, columns: Columns, more: dict[str, Any]) -> bytes:
    layout, buffer = to_buffer(columns)
    header = {"kind": kind, "num_rows": num_rows, "num_tokens": num_tokens, "columns": layout, **more}
    text = json.dumps(header, separators=(",", ":"), allow_nan=False).encode()
    return _PREFIX.pack(MAGIC, len(text)) + text + buffer.tobytes()


def _header(data: bytes) -> tuple[dict[str, Any], int]:
    """The header, and where the columns begin."""
    try:
        magic, length = _PREFIX.unpack_from(data)
        header = json.loads(data[_PREFIX.size : _PREFIX.size + length])
        if magic != MAGIC or not {"kind", "num_rows", "num_tokens", "columns"} <= set(header):
            raise ValueError(f"begins with {magic!r}")
    except (struct.error, ValueError, TypeError) as error:
        raise HandoffError(f"payload: {len(data)} bytes are not a payload: {error}. It is damaged.") from error
    return header, _PREFIX.size + length


def _unpack(data: bytes, kind: str) -> tuple[dict[str, Any], Columns]:
    header, start = _header(data)
    if header["kind"] != kind:
        raise HandoffError(f"payload: holds {header['kind']}, expected {kind}.")
    try:
        layout = [(str(name), str(dtype), int(count)) for name, dtype, count in header["columns"]]
        size = sum(np.dtype(dtype).itemsize * count for _, dtype, count in layout)
        if (
            any(np.dtype(dtype).kind not in "iuf" or count < 0 for _, dtype, count in layout)
            or size != len(data) - start
        ):
            raise ValueError(f"columns of {size} bytes, {len(data) - start} are there")
        columns = from_buffer(layout, np.frombuffer(data, dtype=np.uint8, offset=start))
    except (ValueError, TypeError) as error:
        raise HandoffError(f"payload: its columns do not line up: {error}. It is damaged.") from error
    return header, columns


def _is_json(value: Any) -> bool:
    """Whether JSON gives the value back unchanged."""
    try:
        return bool(json.loads(json.dumps(value, allow_nan=False)) == value) and _has_text_keys(value)
    except (TypeError, ValueError):
        return False


def _has_text_keys(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _has_text_keys(item) for key, item in value.items())
    return all(_has_text_keys(item) for item in value) if isinstance(value, list) else not isinstance(value, tuple)
