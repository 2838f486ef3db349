"""A round of one optimizer step that starts on finished groups while other groups of it are still generated.

This is possible because a group's advantages need the group only, the weights do not move before the round is complete,
and every loss is a sum over rows divided by counts of the step. The counts are known last. So early batches are divided
by the counts of the first one, and gradients and statistics are multiplied by the ratio before the weights move. That,
and the order of summation, is the only difference from training the round at once: the last bits (docs/decisions/0010).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from vime.batching.plan import join_plans
from vime.config.parse import Config
from vime.data.rows import TrainRow
from vime.training.columns import OLD_LOGP, Columns
from vime.training.loss_statistics import STATISTICS, rescale, to_metrics
from vime.training.mismatch import Judge, MismatchCheck, Recording
from vime.training.policy_loss import PolicyLoss
from vime.training.worker import TrainWorker, accumulate, apply_step
from vime.types import RoundPlan

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyBatch:
    """Some groups of the round on this rank, with row numbers of their own."""

    plan: RoundPlan  # of one step
    rows: Mapping[int, TrainRow]


class BegunRound:
    """The early batches of one rank. Every call is collective over all trainer ranks, which pass the same early batches
    in the same order."""

    def __init__(self, config: Config, worker: TrainWorker, rollout_id: int) -> None:
        self._algo, self._worker, self.rollout_id = config.algo, worker, rollout_id
        self._early_batches: list[EarlyBatch] = []
        self._columns: list[Columns] = []
        self._shares: list[Tensor] = []
        self._logps: list[dict[int, Tensor]] = []
        self.is_spent = False  # the gradients no longer belong to the early batches

    def __len__(self) -> int:
        return len(self._early_batches)

    def begin(self, plan: RoundPlan, rows: Mapping[int, TrainRow]) -> None:
        """Run columns, forward and backward of an early batch; another one will follow."""
        self._add(plan, rows, is_last=False)

    def finish(self, plan: RoundPlan, rows: Mapping[int, TrainRow], judge: Judge) -> dict[str, float]:
        """Run the last early batch, and the optimizer step of the whole round. Metrics as of `TrainWorker.update`.
        Raises LogprobMismatch before a weight moves; then the caller trains the round at once, from `joined`."""
        self.is_spent = True
        unit = (self._early_batches[0].plan if self._early_batches else plan).steps[0]
        self._add(plan, rows, is_last=True)
        plan, rows = self.joined()
        step, backend = plan.steps[0], self._worker.backend
        of_tokens = max(1, unit.num_tokens) / max(1, step.num_tokens)
        of_loss = of_tokens if self._algo.calculate_per_token_loss else unit.num_samples / step.num_samples
        is_sampled = self._algo.loss_type != "sft_loss"
        check = MismatchCheck(rows, judge, backend, is_open=is_sampled)
        logps = self._shifted([columns.get(OLD_LOGP, {}) for columns in self._columns]) or self._shifted(self._logps)
        done = apply_step(
            self._worker.actor,
            backend,
            step,
            rows,
            self._shares,
            scale=rescale(of_loss=of_loss, of_tokens=of_tokens),
            of_gradients=of_loss,
            statistics=STATISTICS,
            name=f"round {plan.rollout_id}, optimizer step 0",
            before_move=lambda: check.compare(logps),
        )
        self._worker.actor.finish_round()
        return {
            "train/num_tokens": float(step.num_tokens),
            "train/num_samples": float(step.num_samples),
            "train/num_rows": float(step.num_rows),
            **to_metrics(done.totals, with_mismatch=self._algo.get_mismatch_metrics, is_sampled=is_sampled),
            "train/grad_norm": done.grad_norm,
            "train/lr": done.learning_rate,
            **check.metrics(),
        }

    def rows_with(self, rows: Mapping[int, TrainRow]) -> list[TrainRow]:
        """Return the rows of this rank so far, and `rows`."""
        return [*(row for early_batch in self._early_batches for row in early_batch.rows.values()), *rows.values()]

    def joined(self) -> tuple[RoundPlan, dict[int, TrainRow]]:
        """Return the early batches so far as one round."""
        plan = join_plans([early_batch.plan for early_batch in self._early_batches])
        return plan, self._shifted([early_batch.rows for early_batch in self._early_batches])

    def _add(self, plan: RoundPlan, rows: Mapping[int, TrainRow], *, is_last: bool) -> None:
        worker, number = self._worker, len(self._early_batches)
        self._early_batches.append(EarlyBatch(plan=plan, rows=rows))
        columns = worker.compute_columns(plan, rows)
        unit = self._early_batches[0].plan.steps[0]
        recording = Recording(PolicyLoss(self._algo, unit, worker.custom_loss))
        step = plan.steps[0]
        self._shares += accumulate(
            worker.actor,
            worker.backend,
            step,
            rows,
            columns,
            loss=recording,
            name=f"round {plan.rollout_id}, early batch {number}",
            is_first=number == 0,
            is_last=is_last,
        )
        self._columns.append(columns)
        self._logps.append(recording.logps(step.micro_batches[worker.place.dp_rank]))

    def _shifted(self, early_batches: Sequence[Mapping[int, Value]]) -> dict[int, Value]:
        """Return the values by row number of the whole round."""
        found: dict[int, Value] = {}
        first = 0
        for early_batch, values in zip(self._early_batches, early_batches, strict=True):
            found |= {first + row: value for row, value in values.items()}
            first += early_batch.plan.steps[0].num_rows
        return found
