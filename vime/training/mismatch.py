"""The difference of log-probabilities between trainer and engine, measured every round before its first step.

A token counts when it is trainable and was sampled by the version that trains. The trainer's log-probabilities are
those that the round computes anyway: the forward pass of the old policy, or, in a round of one step, the step's own.
When they are too far from the engine's, `LogprobMismatch` is raised on every rank, with the worst rows. The weights
have not moved then, so the trainer can still compute with them (`ray/mismatch_probes.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from vime.batching.pack import PackedBatch
from vime.data.rows import TrainRow
from vime.protocols import PackLoss, TrainBackend
from vime.training.evidence import NUM_SUSPECTS, MeasuredMismatch, Suspect
from vime.types import StepPlan, Version, VimeError


class LogprobMismatch(VimeError):
    """The mean difference is above the threshold. Raised on every rank, before the weights move."""

    def __init__(self, measured: MeasuredMismatch) -> None:
        super().__init__(measured)
        self.measured = measured

    def __str__(self) -> str:
        found = self.measured
        return (
            f"trainer and engine disagree by {found.mean:.3g} nats a token (largest {found.largest:.3g}) over "
            f"{found.num_tokens} tokens of the version that trains."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    """The version to compare, and the largest difference allowed."""

    version: Version  # of the trainer's weights
    threshold: float | None = None  # nats a token; None: measure only


class Recording:
    """A loss that keeps the log-probabilities it gets, in the order of the packs."""

    def __init__(self, loss: PackLoss) -> None:
        self._loss = loss
        self._packs: list[list[Tensor]] = []

    def __call__(self, logp_T: Tensor, entropy_T: Tensor, batch: PackedBatch, /) -> tuple[Tensor, Tensor]:
        self._packs.append([logp_T.detach()[positions] for positions in batch.row_slices])
        return self._loss(logp_T, entropy_T, batch)

    def logps(self, numbers: Sequence[Sequence[int]]) -> dict[int, Tensor]:
        """Return [R] by row number; `numbers`: the rows of each pack. Empty on ranks without tokens."""
        rows = [row for batch in numbers for row in batch]
        return dict(zip(rows, [logp_R for logps in self._packs for logp_R in logps], strict=bool(self._packs)))


class MismatchCheck:
    """The comparison of one round on this rank, made once: with the old policy's column if there is one (`compare`),
    else with what passes through the loss of the first step (`watched`). Collective over all trainer ranks either
    way."""

    def __init__(
        self, rows: Mapping[int, TrainRow], judge: Judge, backend: TrainBackend, *, is_open: bool = True
    ) -> None:
        """`is_open`: the comparison is still to be made."""
        self.is_open = is_open
        self._found: MeasuredMismatch | None = None
        self._rows, self._judge, self._backend = rows, judge, backend

    def metrics(self) -> dict[str, float]:
        return {} if self._found is None else self._found.metrics()

    def watched(self, loss: PackLoss, step: StepPlan) -> tuple[PackLoss, Callable[[], None] | None]:
        """Return `loss`, and a function to call when the loss has had every pack of the step, before the weights move.
        While the comparison is open the loss keeps the log-probabilities, in the order of the packs."""
        if not self.is_open:
            return loss, None
        numbers = step.micro_batches[self._backend.place.dp_rank]
        recording = Recording(loss)
        return recording, lambda: self.compare(recording.logps(numbers))

    def compare(self, logps: Mapping[int, Tensor]) -> None:
        """Compare [R] by row number, empty on ranks without tokens. Above the threshold every rank raises
        LogprobMismatch."""
        if not self.is_open:
            return
        self.is_open = False
        numbers = list(logps) if self._backend.place.speaks else []
        masks = {row: torch.tensor(comparable(self._rows[row], self._judge.version)) for row in numbers}
        gaps = {row: _gaps(self._rows[row], logps[row])[masks[row]] for row in numbers if bool(masks[row].any())}
        spoken = torch.cat(list(gaps.values())) if gaps else torch.zeros(0, dtype=torch.float64)
        sums = torch.tensor([float(spoken.sum()), float(len(spoken))], dtype=torch.float64, device=self._backend.device)
        largest = spoken.max().reshape(1) if len(spoken) else torch.zeros(1, dtype=torch.float64)
        largest = largest.to(self._backend.device)
        dist.all_reduce(sums)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        total, count = sums.tolist()
        self._found = MeasuredMismatch(num_tokens=int(count), mean=total / max(1.0, count), largest=float(largest))
        threshold = self._judge.threshold
        if threshold is None or not self._found.mean > threshold:  # nan passes: the step's own check reports it better
            return
        chosen = sorted(gaps, key=lambda row: float(gaps[row].mean()), reverse=True)
        suspects = [
            Suspect(row=self._rows[row], logp_R=logps[row].double().tolist(), is_compared_R=masks[row].tolist())
            for row in chosen[:NUM_SUSPECTS]
        ]
        raise LogprobMismatch(replace(self._found, suspects=tuple(suspects)))


def comparable(row: TrainRow, version: Version) -> list[bool]:
    """Return [R]: trainable, and sampled by `version`."""
    is_compared = [False] * row.response_length
    for span in row.token_policy_versions:
        if span.version == version:
            is_compared[span.start : span.end] = [bool(mask) for mask in row.loss_mask[span.start : span.end]]
    return is_compared


def _gaps(row: TrainRow, logp_R: Tensor) -> Tensor:
    """Return [R] float64: |trainer - recorded|."""
    return (logp_R.double().cpu() - torch.as_tensor(row.rollout_log_probs, dtype=torch.float64)).abs()
