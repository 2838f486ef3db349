"""The one table of columns: what a training row is made of while it travels.

The codec, the carriers and the check of --transfer-queue-extra-data-fields all read `COLUMNS`; adding a column is one
line here, plus the code that writes it into `TrainRow.extra`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from vime.types import ConfigError


class Shape(StrEnum):
    """How many entries a column has. Rows of one group are laid end to end."""

    ROW = "one per row"
    TOKEN = "one per token, prompt and response"
    RESPONSE = "one per response token"
    SPAN = "three per version span: version, start, end"
    WIDE = "a fixed number per token, prompt and response; a cell is an array [tokens, number]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column. `attribute` names the TrainRow attribute; without one the value lives in `TrainRow.extra[name]`."""

    name: str
    dtype: str  # numpy
    shape: Shape
    attribute: str | None
    writer: str | None  # the room that fills it; None: declared, but nothing writes it yet
    readers: tuple[str, ...]
    required: bool = True

    @property
    def is_optional(self) -> bool:
        """Carried only when it is requested by name."""
        return self.attribute is None


def _row(
    name: str, dtype: str, shape: Shape, attribute: str, readers: tuple[str, ...], *, required: bool = True
) -> Column:
    return Column(
        name=name,
        dtype=dtype,
        shape=shape,
        attribute=attribute,
        writer="rollout",
        readers=readers,
        required=required,
    )


def _optional(name: str, dtype: str, shape: Shape, *, writer: str | None, readers: tuple[str, ...]) -> Column:
    return Column(name=name, dtype=dtype, shape=shape, attribute=None, writer=writer, readers=readers, required=False)


COLUMNS: tuple[Column, ...] = (
    _row("tokens", "int32", Shape.TOKEN, "tokens", ("batching",)),
    _row("total_lengths", "int32", Shape.ROW, "total_length", ("handoff", "batching")),
    _row("response_lengths", "int32", Shape.ROW, "response_length", ("handoff", "batching")),
    _row("loss_masks", "uint8", Shape.RESPONSE, "loss_mask", ("batching",)),
    _row("rollout_log_probs", "float32", Shape.RESPONSE, "rollout_log_probs", ("batching",)),
    _row("rewards", "float64", Shape.ROW, "reward", ("batching",)),
    _row("status", "uint8", Shape.ROW, "status", ("observability",)),
    _row("group_indices", "int64", Shape.ROW, "group_index", ("handoff",)),
    _row("rollout_ids", "int64", Shape.ROW, "rollout_id", ("handoff",)),
    _row("span_counts", "int32", Shape.ROW, "num_spans", ("handoff",)),
    _row("token_policy_versions", "int64", Shape.SPAN, "token_policy_versions", ("handoff",)),
    # Filled by the codec when absent: the row's place in its group, the reward, what the status says, and 0.
    _row("sample_indices", "int64", Shape.ROW, "sample_index", ("handoff",), required=False),
    _row("raw_reward", "float64", Shape.ROW, "raw_reward", ("observability",), required=False),
    _row("truncated", "uint8", Shape.ROW, "truncated", ("observability",), required=False),
    _row("attempts", "int64", Shape.ROW, "attempt", ("handoff",), required=False),
    # Carried only when --transfer-queue-extra-data-fields names them.
    _optional("teacher_log_probs", "float32", Shape.RESPONSE, writer="rollout", readers=("training",)),
    # layers x top-k expert numbers; -1 where the engine did not say
    _optional("rollout_routed_experts", "int16", Shape.WIDE, writer="rollout", readers=("batching",)),
    _optional("multimodal_train_inputs", "uint8", Shape.ROW, writer=None, readers=()),
)
BY_NAME = {column.name: column for column in COLUMNS}


def check_requested(extra_names: Iterable[str]) -> None:
    """Refuse, before any process starts, a requested column that nobody writes: its reader would wait for ever."""
    writable = [column.name for column in COLUMNS if column.is_optional and column.writer is not None]
    for name in extra_names:
        column = BY_NAME.get(name)
        if name not in writable:
            state = "is not a known column"
            if column is not None:
                state = "is known, but no part of Vime writes it" if column.is_optional else "is always carried"
            raise ConfigError(
                f"--transfer-queue-extra-data-fields {name}: {state}. Columns that can be requested: "
                f"{', '.join(writable) or 'none yet'}. Remove it, or give it a writer and a line in the table."
            )
