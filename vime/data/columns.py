"""The table of columns: which values of a training row are stored, and which of them are metadata.

`payload.py` writes the columns in this order; the check of --transfer-queue-extra-data-fields reads the table too. A
column that is always stored is one line here and one in `rows.TrainRow`. A further field of a run needs neither: every
name in --transfer-queue-extra-data-fields is stored in `TrainRow.extra`.
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
    ANY = "whatever the sample holds: numbers as an array, everything else as bytes (JSON)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column. `attribute` names the TrainRow attribute; without one the value is in `TrainRow.extra[name]` and is
    stored only when it is requested by name."""

    name: str
    dtype: str  # numpy
    shape: Shape
    attribute: str | None

    @property
    def is_optional(self) -> bool:
        return self.attribute is None


def _row(name: str, dtype: str, shape: Shape, attribute: str) -> Column:
    return Column(name=name, dtype=dtype, shape=shape, attribute=attribute)


def _optional(name: str, dtype: str, shape: Shape) -> Column:
    return Column(name=name, dtype=dtype, shape=shape, attribute=None)


COLUMNS: tuple[Column, ...] = (
    _row("sample_indices", "<i8", Shape.ROW, "sample_index"),  # the RFC's global_index
    _row("group_indices", "<i8", Shape.ROW, "group_index"),
    _row("rewards", "<f8", Shape.ROW, "reward"),
    _row("raw_reward", "<f8", Shape.ROW, "raw_reward"),
    _row("attempts", "<i4", Shape.ROW, "attempt"),
    _row("total_lengths", "<i4", Shape.ROW, "total_length"),
    _row("response_lengths", "<i4", Shape.ROW, "response_length"),
    _row("status", "u1", Shape.ROW, "status"),
    _row("truncated", "u1", Shape.ROW, "truncated"),
    _row("token_policy_versions", "<i8", Shape.SPAN, "token_policy_versions"),  # holds version_start and version_end
    _row("tokens", "<i4", Shape.TOKEN, "tokens"),
    _row("rollout_log_probs", "<f4", Shape.RESPONSE, "rollout_log_probs"),
    _row("loss_masks", "u1", Shape.RESPONSE, "loss_mask"),
    # Stored only when --transfer-queue-extra-data-fields names them; so is any other name.
    _optional("teacher_log_probs", "<f4", Shape.RESPONSE),
    # layers x top-k expert numbers; -1 where the engine did not report them
    _optional("rollout_routed_experts", "<i2", Shape.WIDE),
    # of --multimodal-keys: pixels as a safetensors file; empty for a row without images
    _optional("multimodal_train_inputs", "u1", Shape.ANY),
)
BY_NAME = {column.name: column for column in COLUMNS}


def check_requested(extra_names: Iterable[str]) -> None:
    """Refuse, before any process starts, a requested field that is always stored: a second one would overwrite it."""
    for name in extra_names:
        column = BY_NAME.get(name)
        if column is not None and not column.is_optional:
            raise ConfigError(f"--transfer-queue-extra-data-fields {name}: is always stored. Remove it.")
        if not name.isidentifier():
            raise ConfigError(
                f"--transfer-queue-extra-data-fields {name!r}: is no name of a field. Expected an attribute of the "
                "sample or a key of its metadata."
            )
