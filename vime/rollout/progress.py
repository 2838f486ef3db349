"""Progress of the current round: written by the rollout loop, read from any thread that shows it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundProgress:
    """A snapshot; replaced as a whole, so a reader never sees half of an update."""

    name: str  # "round 3" or "evaluation after round 3"
    kept_groups: int
    wanted_groups: int
    in_flight_groups: int
    dropped_groups: int
    response_tokens: int
    elapsed_s: float

    def __str__(self) -> str:
        dropped = f", {self.dropped_groups} dropped" if self.dropped_groups else ""
        speed = self.response_tokens / self.elapsed_s if self.elapsed_s > 0 else 0.0
        return (
            f"{self.name}: {self.kept_groups}/{self.wanted_groups} groups, {self.in_flight_groups} in flight{dropped}, "
            f"{self.response_tokens} tokens, {speed:.0f} tokens/s"
        )


class ProgressBoard:
    """One slot. Assignment of a frozen object is atomic, so no lock is needed."""

    def __init__(self) -> None:
        self._latest: RoundProgress | None = None

    def post(self, progress: RoundProgress) -> None:
        self._latest = progress

    @property
    def latest(self) -> RoundProgress | None:
        return self._latest


BOARD = ProgressBoard()
