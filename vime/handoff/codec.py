"""Training rows to packed columns and back, exactly; plans to bytes and back.

Rows travel as one dict of 1-D numpy arrays: laid end to end, with their lengths beside them. Every carrier uses this
codec, so that a row arrives with the same bits whichever way it came.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vime.handoff.columns import BY_NAME, COLUMNS, Column, Shape
from vime.types import HandoffError, RoundPlan, SampleStatus, StepPlan, TrainGroup, TrainRow, VersionSpan, tiling_fault

Columns = dict[str, NDArray[Any]]
STATUS_CODES = tuple(str(status) for status in SampleStatus)


def encode_rows(rows: Sequence[TrainRow], extra: Sequence[str] = ()) -> Columns:
    """Rows of any groups as columns. Log-probabilities are rounded to float32, everything else is exact."""
    for row in rows:
        check_row(row)
    wanted = [column for column in COLUMNS if not column.is_optional] + [_optional_column(name) for name in extra]
    return {column.name: _encode_column(column, rows) for column in wanted}


def decode_rows(columns: Mapping[str, NDArray[Any]]) -> tuple[TrainRow, ...]:
    """Inverse of `encode_rows`: sequences come back as tuples of Python numbers."""
    unknown = sorted(set(columns) - set(BY_NAME))
    missing = [column.name for column in COLUMNS if column.required and column.name not in columns]
    if unknown or missing:
        raise HandoffError(f"columns: missing {missing}, unknown {unknown}. The writer is of another version.")
    num_rows = len(columns["total_lengths"])
    lengths = {
        Shape.ROW: [1] * num_rows,
        Shape.TOKEN: columns["total_lengths"].tolist(),
        Shape.WIDE: columns["total_lengths"].tolist(),
        Shape.RESPONSE: columns["response_lengths"].tolist(),
        Shape.SPAN: (columns["span_counts"] * 3).tolist(),
    }
    cells = {name: _split(BY_NAME[name], array, lengths[BY_NAME[name].shape]) for name, array in columns.items()}
    rows = tuple(_decode_row(index, {name: cell[index] for name, cell in cells.items()}) for index in range(num_rows))
    for row in rows:
        check_row(row)
    return rows


def check_row(row: TrainRow) -> None:
    """Refuse a row whose parts do not line up or whose numbers cannot be trained on."""
    name = f"sample {row.sample_index} of group {row.group_index}"
    length = row.response_length
    if not 0 <= length < row.total_length:
        raise HandoffError(f"{name}: {row.total_length} tokens, {length} of them response; expected a prompt too.")
    if len(row.loss_mask) != length or len(row.rollout_log_probs) != length:
        raise HandoffError(
            f"{name}: {length} response tokens, {len(row.loss_mask)} mask entries and {len(row.rollout_log_probs)} "
            "log-probabilities; expected equally many. Grow samples with append_response_tokens only."
        )
    if min(row.tokens) < 0 or not set(row.loss_mask) <= {0, 1}:
        raise HandoffError(f"{name}: token ids must be >= 0 and mask entries 0 or 1.")
    if not np.isfinite(np.asarray(row.rollout_log_probs, dtype=np.float64)).all():
        raise HandoffError(f"{name}: a log-probability is not finite. The engine answered nonsense; see its log.")
    if not np.isfinite([row.reward, row.raw_reward]).all():
        raise HandoffError(f"{name}: reward {row.reward}, raw reward {row.raw_reward}; expected finite numbers.")
    if str(row.status) not in STATUS_CODES:
        raise HandoffError(f"{name}: status {row.status!r}; expected one of {', '.join(STATUS_CODES)}.")
    fault = tiling_fault(row.token_policy_versions, length)
    if fault is not None:
        raise HandoffError(f"{name}: {fault}.")


def _optional_column(name: str) -> Column:
    column = BY_NAME.get(name)
    if column is None or not column.is_optional:
        raise HandoffError(f"column {name!r} is not an optional column; see --transfer-queue-extra-data-fields.")
    return column


def _encode_column(column: Column, rows: Sequence[TrainRow]) -> NDArray[Any]:
    if column.shape is Shape.WIDE:
        return _encode_wide(column, rows)
    flat: list[Any] = []
    add: Callable[[Any], None] = flat.append if column.shape is Shape.ROW else flat.extend
    for row in rows:
        add(_cell(column, row))
    try:
        return np.asarray(flat, dtype=column.dtype)
    except (OverflowError, ValueError, TypeError) as error:
        raise HandoffError(f"column {column.name}: a value does not fit {column.dtype}: {error}") from error


def _encode_wide(column: Column, rows: Sequence[TrainRow]) -> NDArray[Any]:
    cells = [np.asarray(_cell(column, row)) for row in rows]
    shapes = {cell.shape[1:] for cell in cells}
    if len(shapes) > 1 or any(cell.ndim != 2 for cell in cells):
        raise HandoffError(
            f"column {column.name}: cells of shapes {[cell.shape for cell in cells[:4]]}; expected one "
            "width, [tokens, number]."
        )
    return np.concatenate([np.empty(0, column.dtype), *(cell.astype(column.dtype).reshape(-1) for cell in cells)])


def _cell(column: Column, row: TrainRow) -> Any:
    if column.is_optional:
        if column.name not in row.extra:
            raise HandoffError(
                f"sample {row.sample_index}: column {column.name!r} was requested (--transfer-queue-extra-data-fields) "
                "but the rollout did not write it. Write it for every sample, or do not request it."
            )
        value = row.extra[column.name]
        expected = {
            Shape.TOKEN: row.total_length,
            Shape.WIDE: row.total_length,
            Shape.RESPONSE: row.response_length,
        }.get(column.shape)
        if expected is not None and len(value) != expected:
            raise HandoffError(
                f"sample {row.sample_index}: column {column.name!r} has {len(value)} entries, expected {expected}."
            )
        return value
    if column.name == "status":
        return STATUS_CODES.index(str(row.status))
    if column.name == "span_counts":
        return len(row.token_policy_versions)
    if column.shape is Shape.SPAN:
        return [number for span in row.token_policy_versions for number in (span.version, span.start, span.end)]
    assert column.attribute is not None
    return getattr(row, column.attribute)


def _split(column: Column, array: NDArray[Any], lengths: Sequence[int]) -> list[Any]:
    """Cut a column into one cell per row: a number, a tuple of numbers, or the rows of a wide array."""
    if column.shape is Shape.WIDE:
        width, rest = divmod(len(array), sum(lengths) or 1)
        if array.ndim != 1 or array.dtype != np.dtype(column.dtype) or rest:
            raise HandoffError(
                f"column {column.name}: got {array.dtype} of shape {array.shape}, expected {column.dtype} and a "
                f"multiple of {sum(lengths)} tokens. The payload is torn."
            )
        ends = np.cumsum(lengths)[:-1]
        return list(np.split(array.reshape(-1, width), ends)) if lengths else []
    if array.ndim != 1 or array.dtype != np.dtype(column.dtype) or len(array) != sum(lengths):
        raise HandoffError(
            f"column {column.name}: got {array.dtype} of shape {array.shape}, expected {column.dtype} of shape "
            f"({sum(lengths)},). The payload is torn."
        )
    flat: list[Any] = array.tolist()
    if column.shape is Shape.ROW:
        return flat
    cells, start = [], 0
    for length in lengths:
        cells.append(tuple(flat[start : start + length]))
        start += length
    return cells


def _decode_row(index: int, cells: Mapping[str, Any]) -> TrainRow:
    code = cells["status"]
    if code >= len(STATUS_CODES):
        raise HandoffError(f"column status: code {code} is unknown. The writer is of another version.")
    status, spans = STATUS_CODES[code], cells["token_policy_versions"]
    return TrainRow(
        sample_index=cells.get("sample_indices", index),
        group_index=cells["group_indices"],
        rollout_id=cells["rollout_ids"],
        tokens=cells["tokens"],
        response_length=cells["response_lengths"],
        loss_mask=cells["loss_masks"],
        rollout_log_probs=cells["rollout_log_probs"],
        token_policy_versions=tuple(VersionSpan(*spans[at : at + 3]) for at in range(0, len(spans), 3)),
        reward=cells["rewards"],
        raw_reward=cells.get("raw_reward", cells["rewards"]),
        status=status,
        truncated=bool(cells.get("truncated", status == SampleStatus.TRUNCATED)),
        extra={name: cell for name, cell in cells.items() if BY_NAME[name].is_optional},
        attempt=cells.get("attempts", 0),
    )


def encode_plan(plan: RoundPlan) -> bytes:
    return json.dumps(_plan_record(plan), separators=(",", ":")).encode()


def decode_plan(data: bytes) -> RoundPlan:
    """Inverse of `encode_plan`."""
    try:
        return _plan(json.loads(data))
    except (KeyError, TypeError) as error:
        raise HandoffError(f"plan: lacks {error}. The writer is of another version.") from error
    except ValueError as error:
        raise HandoffError(f"plan: {len(data)} bytes are not a plan: {error}. The payload is torn.") from error


def _plan_record(plan: RoundPlan) -> dict[str, Any]:
    steps = [[step.num_samples, step.num_tokens, step.micro_batches] for step in plan.steps]
    return {"rollout_id": plan.rollout_id, "steps": steps}


def _plan(record: Mapping[str, Any]) -> RoundPlan:
    return RoundPlan(
        rollout_id=record["rollout_id"],
        steps=tuple(
            StepPlan(
                micro_batches=tuple(tuple(tuple(batch) for batch in rank) for rank in micro_batches),
                num_samples=num_samples,
                num_tokens=num_tokens,
            )
            for num_samples, num_tokens, micro_batches in record["steps"]
        ),
    )


def check_round(plan: RoundPlan, groups: Sequence[TrainGroup]) -> None:
    """Refuse groups that are none, rows of another round, and a plan that does not name every row exactly once."""
    for group in groups:
        _check_group(plan.rollout_id, group)
    num_rows = sum(len(group.rows) for group in groups)
    planned = sorted(row for step in plan.steps for rank in step.micro_batches for batch in rank for row in batch)
    if planned != list(range(num_rows)):
        raise HandoffError(
            f"round {plan.rollout_id}: the plan names {len(planned)} rows, the round has {num_rows}; expected each "
            "row exactly once. Plan the round from the same groups that are put."
        )


def deal_rows(plan: RoundPlan, groups: Sequence[TrainGroup]) -> list[list[TrainRow]]:
    """The rows of each data-parallel rank in the order of `RoundPlan.rows_of`, after `check_round`."""
    check_round(plan, groups)
    rows = [row for group in groups for row in group.rows]
    return [[rows[number] for number in plan.rows_of(dp_rank)] for dp_rank in range(plan.dp_size)]


def _check_group(rollout_id: int, group: TrainGroup) -> None:
    name = f"group {group.group_index}"
    if not group.rows:
        raise HandoffError(f"{name}: has no rows; a rollout function must return whole groups.")
    for row in group.rows:
        if row.group_index != group.group_index or row.rollout_id != rollout_id:
            raise HandoffError(
                f"{name}: sample {row.sample_index} belongs to group {row.group_index} of round {row.rollout_id}; "
                f"expected one group of round {rollout_id}. The rollout function mixed groups or rounds."
            )
    indices = [row.sample_index for row in group.rows]
    if len(set(indices)) != len(indices):
        raise HandoffError(f"{name}: sample indices {indices} repeat; each sample needs its own.")


Layout = list[tuple[str, str, int]]
"""(column, dtype, entries) in the order in which the columns lie in a buffer."""


def to_buffer(columns: Mapping[str, NDArray[Any]]) -> tuple[Layout, NDArray[np.uint8]]:
    """All columns as one run of bytes, so that one broadcast carries them."""
    layout = [(name, str(array.dtype), len(array)) for name, array in columns.items()]
    return layout, np.frombuffer(b"".join(array.tobytes() for array in columns.values()), dtype=np.uint8)


def from_buffer(layout: Layout, buffer: NDArray[np.uint8]) -> Columns:
    """Inverse of `to_buffer`."""
    columns, offset, data = {}, 0, buffer.tobytes()
    for name, dtype, count in layout:
        columns[name] = np.frombuffer(data, dtype=dtype, count=count, offset=offset)
        offset += columns[name].nbytes
    return columns
