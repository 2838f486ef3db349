"""The measured difference between trainer and engine over a round, and its worst rows. No torch: the driver imports it.

R: response tokens of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from vime.data.rows import TrainRow

NUM_SUSPECTS = 4
DIFFERENCE, LARGEST = "train/train_rollout_logprob_abs_diff", "train/train_rollout_logprob_abs_diff_max"
COMPARED = "train/train_rollout_compared_tokens"
RESCORED = "rollout/rescored_logprob_abs_diff"


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """A row with a large difference. `logp_R`: the trainer's, by the rule of the run, with the weights of the round."""

    row: TrainRow
    logp_R: Sequence[float]
    is_compared_R: Sequence[bool]  # trainable, and sampled by the version that trains

    def gaps(self) -> list[float]:
        """Return |recorded - trainer| of each compared token."""
        pairs = zip(self.row.rollout_log_probs.tolist(), self.logp_R, self.is_compared_R, strict=True)
        return [abs(recorded - own) for recorded, own, is_compared in pairs if is_compared]

    @property
    def difference(self) -> float:
        """Mean of the gaps, nats a token."""
        gaps = self.gaps()
        return sum(gaps) / max(1, len(gaps))


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredMismatch:
    """The difference over all comparable tokens of the round, the same on every rank; `suspects` are this rank's."""

    num_tokens: int
    mean: float  # nats a token
    largest: float
    suspects: tuple[Suspect, ...] = ()

    def metrics(self) -> dict[str, float]:
        """Return the metrics; without a token to compare there are none."""
        found = {DIFFERENCE: self.mean, LARGEST: self.largest} if self.num_tokens else {}
        return {**found, COMPARED: float(self.num_tokens)}


def of_rows(rows: Sequence[TrainRow], logps: Sequence[Sequence[float]]) -> MeasuredMismatch:
    """Measure a few rows, without a collective: recorded against [R] log-probabilities, at every trainable token."""
    suspects = [
        Suspect(row=row, logp_R=logp_R, is_compared_R=[bool(mask) for mask in row.loss_mask])
        for row, logp_R in zip(rows, logps, strict=True)
    ]
    gaps = [gap for suspect in suspects for gap in suspect.gaps()]
    mean, largest = sum(gaps) / max(1, len(gaps)), max(gaps, default=0.0)
    return MeasuredMismatch(num_tokens=len(gaps), mean=mean, largest=largest, suspects=tuple(suspects))


def merge(parts: Sequence[MeasuredMismatch]) -> MeasuredMismatch:
    """Merge all ranks' results of one round: the numbers are equal, the suspects are joined."""
    suspects = [suspect for part in parts for suspect in part.suspects]
    worst = sorted(suspects, key=lambda suspect: suspect.difference, reverse=True)[:NUM_SUSPECTS]
    return replace(parts[0], suspects=tuple(worst))
