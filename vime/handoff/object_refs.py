"""Mode `off`: rounds travel as objects of whoever owns memory (Ray), one object per data-parallel rank.

Ray itself is not imported here: the caller passes `put` and `get`. An object lives as long as its ticket.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vime.handoff.codec import deal_rows, decode_plan, decode_rows, encode_plan, encode_rows
from vime.types import HandoffError, HandoffLostError, RoundPlan, TrainGroup, TrainRow
from vime.utils.waits import waiting


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectRefTicket:
    """Where a round lies: `references[dp_rank]` is the object that holds that rank's rows."""

    rollout_id: int
    plan: bytes
    references: tuple[Any, ...]


class ObjectRefCarrier:
    """A Carrier over object references.

    `put(value) -> reference` and `get(reference) -> value` move one object; `get` must have a deadline of its own.
    `free(reference)` is called by `clear`; without it the object goes when its ticket goes. `extra` names the optional
    columns to carry.
    """

    def __init__(
        self,
        *,
        put: Callable[[Any], Any],
        get: Callable[[Any], Any],
        free: Callable[[Any], None] | None = None,
        extra: Sequence[str] = (),
    ) -> None:
        self._put, self._get, self._free, self._extra = put, get, free, tuple(extra)

    def put(
        self,
        plan: RoundPlan,
        groups: Sequence[TrainGroup],
        *,
        portion: int = 0,  # noqa: ARG002  objects have no names that could meet
    ) -> ObjectRefTicket:
        references = []
        for dp_rank, rows in enumerate(deal_rows(plan, groups)):
            columns = encode_rows(rows, self._extra)
            references.append(self._put((plan.rollout_id, dp_rank, plan.rows_of(dp_rank), columns)))
        return ObjectRefTicket(rollout_id=plan.rollout_id, plan=encode_plan(plan), references=tuple(references))

    def fetch(self, ticket: ObjectRefTicket, dp_rank: int) -> tuple[RoundPlan, dict[int, TrainRow]]:
        """The plan, and the rows of `dp_rank` by row number."""
        name = f"round {ticket.rollout_id}, data-parallel rank {dp_rank}"
        try:
            with waiting("the rows of a round", "rollout-manager", deadline_s=None):
                rollout_id, holder, numbers, columns = self._get(ticket.references[dp_rank])
        except Exception as error:
            raise HandoffLostError(
                f"{name}: its object cannot be read ({type(error).__name__}: {error}). It was cleared, or the process "
                "that owned it died."
            ) from error
        if (rollout_id, holder) != (ticket.rollout_id, dp_rank):
            raise HandoffError(f"{name}: the object holds round {rollout_id}, rank {holder}.")
        return decode_plan(ticket.plan), dict(zip(numbers, decode_rows(columns), strict=True))

    def clear(self, ticket: ObjectRefTicket) -> None:
        if self._free is not None:
            for reference in ticket.references:
                self._free(reference)

    def close(self) -> None:
        """Nothing is held here."""
