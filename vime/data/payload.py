"""The format in which rows and samples are sent and stored. No pickle: reading runs no code of the writer.

    chunk  = b"VIMG" | u32 rows | u32 length of the header | header | columns | u32 CRC-32 of all before
    rest   = b"VIMS" | JSON, one record a sample: what a training row has no column for (text, label, metadata ...)
    record = b"VIMP" | u32 parts | u64 length of each part | parts: the chunks of a group, then its rest

A chunk holds whole rows, the fewest that reach CHUNK_BYTES. It is stored under one key of the queue, so that a rank
reads its own rows and few others. The columns follow each other in the order of `columns.COLUMNS`, little-endian; the
header (JSON) names partition, producer and the optional columns. The spool stores records.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from vime.data.columns import COLUMNS, Shape
from vime.data.json_values import json_fault
from vime.data.rows import STATUS_CODES, Column, Kind, TrainRow, as_array
from vime.types import HandoffError, PendingText, Sample, VersionSpan

CHUNK_BYTES = 256 << 10
"""Of a chunk: a key of TransferQueue costs 0.4 ms each way whatever it holds; copying this much costs far less."""
_CHUNK = struct.Struct("<4sII")
_RECORD = struct.Struct("<4sI")
_CRC = struct.Struct("<I")
_ROW_COLUMNS = [column for column in COLUMNS if column.shape is Shape.ROW]
_HEADS = np.dtype(
    {
        "names": [*(column.name for column in _ROW_COLUMNS), "spans"],
        "formats": [*(column.dtype for column in _ROW_COLUMNS), "<i4"],
        "itemsize": 56,  # a multiple of 8, so that what follows is aligned
    }
)
IN_ROWS = ("tokens", "loss_mask", "rollout_log_probs")
"""Fields of a sample that are in its row, so the rest leaves them out."""
DERIVED = ("multimodal_train_inputs",)
"""Fields that are made anew when a row is: of the sample's `multimodal_inputs`."""
BYTES = "bytes"
Decode = Callable[[Sequence[int]], str]
Layout = tuple[str, str, Sequence[int | tuple[int, ...]]]
"""Name and type of an optional column, and the shape of each row's cell; of BYTES its length."""


def pack_rows(rows: Sequence[TrainRow]) -> bytes:
    """Return the rows as one chunk. Checks nothing: `rows.check_row` did, where the rows were made."""
    heads = np.array(
        [
            (
                row.sample_index,
                row.group_index,
                row.reward,
                row.raw_reward,
                row.attempt,
                row.total_length,
                row.response_length,
                STATUS_CODES.index(row.status),
                row.truncated,
                len(row.token_policy_versions),
            )
            for row in rows
        ],
        dtype=_HEADS,
    )
    spans = [(span.version, span.start, span.end) for row in rows for span in row.token_policy_versions]
    extra, buffers = _pack_extra(rows)
    header = json.dumps(
        {
            "partition": rows[0].partition_id if rows else "",
            "producer": rows[0].producer_id if rows else "",
            "extra": extra,
        },
        separators=(",", ":"),
    ).encode()
    header += b" " * (-(_CHUNK.size + len(header)) % 8)
    body = b"".join(
        (
            _CHUNK.pack(b"VIMG", len(rows), len(header)),
            header,
            heads.tobytes(),
            np.asarray(spans, dtype="<i8").tobytes(),
            *(row.tokens.astype("<i4", copy=False).tobytes() for row in rows),
            *(row.rollout_log_probs.astype("<f4", copy=False).tobytes() for row in rows),
            *(row.loss_mask.tobytes() for row in rows),
            *buffers,
        )
    )
    return body + _CRC.pack(zlib.crc32(body))


def unpack_rows(data: bytes | bytearray, *, rollout_id: int = -1) -> list[TrainRow]:
    """Read what `pack_rows` wrote: the arrays are views of one copy of `data`. HandoffError when a byte changed."""
    if len(data) < _CHUNK.size + _CRC.size or data[:4] != b"VIMG":
        raise HandoffError(f"{len(data)} bytes are no chunk of rows. The payload is torn, or of another version.")
    end = len(data) - _CRC.size
    if zlib.crc32(memoryview(data)[:end]) != _CRC.unpack_from(data, end)[0]:
        raise HandoffError(f"a chunk of rows came back changed ({len(data)} bytes, its checksum does not fit).")
    _, num_rows, header_bytes = _CHUNK.unpack_from(data)
    reader = _Reader(bytearray(data), _CHUNK.size + header_bytes)  # a copy that torch may write to
    header = json.loads(data[_CHUNK.size : _CHUNK.size + header_bytes])
    heads = reader.take(_HEADS, num_rows).tolist()
    totals = [head[5] for head in heads]
    responses = [head[6] for head in heads]
    spans = reader.take(np.dtype("<i8"), 3 * sum(head[9] for head in heads)).reshape(-1, 3).tolist()
    tokens = reader.take_each(np.dtype("<i4"), totals)
    log_probs = reader.take_each(np.dtype("<f4"), responses)
    masks = reader.take_each(np.dtype("u1"), responses)
    extras = _unpack_extra(header["extra"], reader, num_rows)
    rows, at = [], 0
    for number, head in enumerate(heads):
        index, group, reward, raw_reward, attempt, _, response, status, truncated, num_spans = head
        rows.append(
            TrainRow(
                sample_index=index,
                group_index=group,
                rollout_id=rollout_id,
                tokens=tokens[number],
                response_length=response,
                loss_mask=masks[number],
                rollout_log_probs=log_probs[number],
                token_policy_versions=tuple(VersionSpan(*span) for span in spans[at : at + num_spans]),
                reward=reward,
                raw_reward=raw_reward,
                status=STATUS_CODES[status],
                truncated=bool(truncated),
                extra=extras[number],
                attempt=attempt,
                partition_id=header["partition"],
                producer_id=header["producer"],
            )
        )
        at += num_spans
    return rows


class _Reader:
    """Takes arrays from a buffer, one after the other."""

    def __init__(self, data: bytearray, offset: int) -> None:
        self._data, self._offset = data, offset

    def take(self, dtype: np.dtype[Kind], count: int) -> NDArray[Kind]:
        found: NDArray[Kind] = np.frombuffer(self._data, dtype=dtype, count=count, offset=self._offset)
        self._offset += found.nbytes
        return found

    def take_each(self, dtype: np.dtype[Kind], counts: Sequence[int]) -> list[NDArray[Kind]]:
        return [self.take(dtype, count) for count in counts]


def _pack_extra(rows: Sequence[TrainRow]) -> tuple[list[Layout], list[bytes]]:
    """Return the layout of each optional column, and the bytes of the cells."""
    names = sorted({name for row in rows for name in row.extra})
    layout: list[Layout] = []
    buffers: list[bytes] = []
    for name in names:
        missing = [row.sample_index for row in rows if name not in row.extra]
        if missing:
            raise HandoffError(f"samples {missing}: column {name!r} is missing, which others of the group have.")
        cells = [row.extra[name] for row in rows]
        if any(isinstance(cell, bytes) for cell in cells):
            texts = [cell if isinstance(cell, bytes) else json.dumps(cell.tolist()).encode() for cell in cells]
            layout.append((name, BYTES, [len(text) for text in texts]))
            buffers += texts
            continue
        arrays = [np.asarray(cell) for cell in cells]
        dtype = np.result_type(*arrays).newbyteorder("<")
        layout.append((name, dtype.str, [array.shape for array in arrays]))
        buffers += [array.astype(dtype).tobytes() for array in arrays]
    return layout, buffers


def _unpack_extra(layout: list[Layout], reader: _Reader, num_rows: int) -> list[dict[str, Column]]:
    extras: list[dict[str, Column]] = [{} for _ in range(num_rows)]
    for name, dtype, shapes in layout:
        for extra, shape in zip(extras, shapes, strict=True):
            if isinstance(shape, int):  # of BYTES
                extra[name] = reader.take(np.dtype("u1"), shape).tobytes()
            else:
                count = int(np.prod(shape, dtype=np.int64))
                extra[name] = reader.take(np.dtype(dtype), count).reshape(shape)
    return extras


def cut(rows: Sequence[TrainRow]) -> Iterator[list[TrainRow]]:
    """Yield the rows of each chunk."""
    chunk: list[TrainRow] = []
    size = 0
    for row in rows:
        chunk.append(row)
        size += 4 * row.total_length + 5 * row.response_length + sum(map(_cell_bytes, row.extra.values()))
        if size >= CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _cell_bytes(cell: Column) -> int:
    return len(cell) if isinstance(cell, bytes) else cell.nbytes


def pack_rest(samples: Sequence[Sample]) -> bytes:
    """Return the rest of the samples: what their rows have no column for. It must be JSON that reads back unchanged.
    Text that was not decoded yet is left out: `join_samples` decodes it from the tokens."""
    records = []
    for sample in samples:
        without = (*DERIVED, *(IN_ROWS if _is_lined_up(sample) else ()))
        records.append(sample.to_dict(without=(*without, "response") if _is_text_of_row(sample) else without))
    try:
        text = json.dumps(records, separators=(",", ":"), allow_nan=False)
        is_same = json.loads(text) == records and _has_text_keys(records)
    except (TypeError, ValueError):
        is_same = False
    if not is_same:
        bad = sorted({key for record in records for key, value in record.items() if json_fault(key, value)})
        raise HandoffError(
            f"group {samples[0].group_index}: {', '.join(bad)} cannot be stored. Fields of a sample must be finite "
            "numbers, strings, lists, or dicts with string keys."
        )
    return b"VIMS" + text.encode()


def samples_to_bytes(samples: Sequence[Sample]) -> bytes:
    """Return the samples of one prompt as a record, finished or not. Log-probabilities are rounded to float32,
    everything else is exact."""
    groups = sorted({sample.group_index for sample in samples})
    if len(groups) != 1:
        raise HandoffError(f"payload: samples of groups {groups}; expected the samples of one group.")
    chunks = [pack_rows(rows) for rows in cut([numbers_of(sample) for sample in samples])]
    return join_record(chunks, pack_rest(samples))


def bytes_to_samples(data: bytes, decode: Decode | None = None) -> list[Sample]:
    """Return the samples of a record, of `samples_to_bytes` or of a finished group; `decode` as in `join_samples`."""
    chunks, rest = split_record(data)
    return join_samples([row for chunk in chunks for row in unpack_rows(chunk)], rest, decode)


def join_samples(rows: Sequence[TrainRow], rest: bytes, decode: Decode | None = None) -> list[Sample]:
    """Return the samples whose numbers are in `rows`. `decode` makes text of tokens, for responses that were not
    decoded when they were stored; without it those are empty."""
    try:
        if rest[:4] != b"VIMS":
            raise ValueError("it holds only rows")
        records = json.loads(rest[4:])
        samples = []
        for row, record in zip(rows, records, strict=True):
            for name in IN_ROWS:
                if name not in record:
                    record[name] = getattr(row, name).tolist()
            is_pending = "response" not in record
            sample = Sample.from_dict(record)
            if is_pending and decode is not None:
                sample.set_pending_text(PendingText(sample.tokens[sample.prompt_length :], decode))
            samples.append(sample)
    except (KeyError, TypeError, ValueError) as error:
        raise HandoffError(f"payload: not a group of samples: {error!r}. The writer is of another version.") from error
    return samples


def numbers_of(sample: Sample) -> TrainRow:
    """Return a row that holds a sample's numbers; it is not for training."""
    is_lined_up = _is_lined_up(sample)
    return TrainRow(
        sample_index=sample.index,
        group_index=sample.group_index,
        rollout_id=-1,
        tokens=as_array(sample.tokens, np.int32, f"sample {sample.index}: tokens"),
        response_length=len(sample.rollout_log_probs) if is_lined_up else 0,
        loss_mask=as_array(sample.loss_mask if is_lined_up else (), np.uint8, f"sample {sample.index}: loss_mask"),
        rollout_log_probs=np.asarray(sample.rollout_log_probs if is_lined_up else (), dtype=np.float32),
        token_policy_versions=(),
        reward=0.0,
        raw_reward=0.0,
        status=str(sample.status),
        truncated=False,
    )


def _is_text_of_row(sample: Sample) -> bool:
    """Return whether the response is the text of the row's response tokens, and was not decoded yet."""
    pending = vars(sample).get("response")
    return (
        isinstance(pending, PendingText)
        and len(pending.tokens) == sample.response_length
        and list(pending.tokens) == list(sample.tokens[sample.prompt_length :])
    )


def _is_lined_up(sample: Sample) -> bool:
    """Return whether a row can hold its numbers; a plug-in may leave lists of other lengths, or none, in what it gave
    up."""
    mask, log_probs = sample.loss_mask, sample.rollout_log_probs
    return mask is not None and log_probs is not None and len(mask) == len(log_probs)


def join_record(chunks: Sequence[bytes], rest: bytes) -> bytes:
    parts = [*chunks, rest]
    sizes = struct.pack(f"<{len(parts)}Q", *map(len, parts))
    return b"".join((_RECORD.pack(b"VIMP", len(parts)), sizes, *parts))


def joined_bytes(chunks: Sequence[bytes], rest: bytes) -> int:
    """Return the length of what `join_record` returns."""
    return _RECORD.size + 8 * (len(chunks) + 1) + sum(map(len, chunks)) + len(rest)


def split_record(data: bytes) -> tuple[list[bytes], bytes]:
    """Return the chunks and the rest of a record."""
    try:
        magic, count = _RECORD.unpack_from(data)
        sizes = struct.unpack_from(f"<{count}Q", data, _RECORD.size)
        if magic != b"VIMP" or not sizes or _RECORD.size + 8 * count + sum(sizes) != len(data):
            raise ValueError("its parts do not add up")
    except (struct.error, ValueError) as error:
        raise HandoffError(f"payload: {len(data)} bytes are no record: {error}. It is torn.") from error
    parts, start = [], _RECORD.size + 8 * count
    for size in sizes:
        parts.append(data[start : start + size])
        start += size
    return parts[:-1], parts[-1]


def record_size(data: bytes) -> tuple[int, int]:
    """Return (rows, tokens) of a record, without decoding a token."""
    num_rows = num_tokens = 0
    for chunk in split_record(data)[0]:
        try:
            magic, count, header_bytes = _CHUNK.unpack_from(chunk)
            heads = np.frombuffer(chunk, dtype=_HEADS, count=count, offset=_CHUNK.size + header_bytes)
            if magic != b"VIMG":
                raise ValueError("another mark")
        except (struct.error, ValueError) as error:
            raise HandoffError(f"payload: {len(chunk)} bytes are no chunk of rows: {error}. It is torn.") from error
        num_rows += count
        num_tokens += int(heads["total_lengths"].sum())
    return num_rows, num_tokens


def _has_text_keys(value: object) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _has_text_keys(item) for key, item in value.items())
    return all(_has_text_keys(item) for item in value) if isinstance(value, list) else not isinstance(value, tuple)
