"""The parts of a round of training on this rank: forward columns, optimizer steps, and their metrics."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from vime.config.training import BatchConfig
from vime.data.rows import TrainRow
from vime.observability.events import span
from vime.protocols import PackLoss, TrainBackend, TrainEngine
from vime.training.columns import Columns, sample_token_columns
from vime.types import HandoffError, RoundPlan, SamplingRule, StepPlan, VimeError
from vime.utils.failpoints import Point, failpoint


def check_delivered(plan: RoundPlan, rows: Mapping[int, TrainRow], *, dp_rank: int) -> None:
    """Check that every row that the plan gives to this data-parallel index is there."""
    missing = set(plan.rows_of(dp_rank)) - set(rows)
    if missing:
        raise HandoffError(
            f"round {plan.rollout_id}: the plan gives rows {sorted(missing)[:10]} to data-parallel index {dp_rank}, "
            f"but they did not arrive (got {sorted(rows)[:10]}, ...). The queue lost groups."
        )


def forward_column(
    engine: TrainEngine, plan: RoundPlan, rows: Mapping[int, TrainRow], *, dp_rank: int
) -> dict[int, Tensor]:
    """Return [R] of `TrainEngine.forward` by row number, over the micro-batches of the whole round; empty on ranks that
    hold no tokens. Collective like `forward`."""
    numbers = [batch for step in plan.steps for batch in step.micro_batches[dp_rank]]
    with span("forward_column", rollout_id=plan.rollout_id):
        outputs = engine.forward([[rows[row] for row in batch] for batch in numbers])
    return {
        row: value_R
        for batch, values in zip(numbers, outputs, strict=bool(outputs))
        for row, value_R in zip(batch, values, strict=True)
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The result of one optimizer step, the same on every rank."""

    totals: list[float]  # [S] statistics summed over all packs and replicas
    grad_norm: float
    learning_rate: float


def optimizer_step(
    engine: TrainEngine,
    backend: TrainBackend,
    step: StepPlan,
    rows: Mapping[int, TrainRow],
    columns: Columns,
    *,
    loss: PackLoss,
    statistics: Sequence[str],
    name: str,
    rate_flag: str = "--lr",
    before_move: Callable[[], None] | None = None,
) -> StepResult:
    """Accumulate and apply the gradients. `statistics` names the entries that `loss` returns, `rate_flag` is for
    messages. Collective over all trainer ranks.

    `before_move` is called when the gradients are complete and the weights have not moved; it may raise, on every rank
    alike.

    A loss or gradient norm that is not finite raises on every rank, before the weights move.
    """
    shares = accumulate(engine, backend, step, rows, columns, loss=loss, name=name)
    return apply_step(
        engine,
        backend,
        step,
        rows,
        shares,
        scale=[1.0] * len(statistics),
        statistics=statistics,
        name=name,
        rate_flag=rate_flag,
        before_move=before_move,
    )


def accumulate(
    engine: TrainEngine,
    backend: TrainBackend,
    step: StepPlan,
    rows: Mapping[int, TrainRow],
    columns: Columns,
    *,
    loss: PackLoss,
    name: str,
    is_first: bool = True,
    is_last: bool = True,
) -> list[Tensor]:
    """Run forward and backward of a step, or of an early batch of one. Return this rank's statistics, one [S] a pack.
    Collective over all trainer ranks."""
    numbers = step.micro_batches[backend.place.dp_rank]
    holds_tokens = backend.place.holds_tokens
    columns = {**columns, **sample_token_columns(step, rows, [row for batch in numbers for row in batch])}
    with span("forward_backward", step=name):
        return engine.accumulate(
            [[rows[row] for row in batch] for batch in numbers],
            [
                {key: [column[row] for row in batch] for key, column in columns.items()} if holds_tokens else {}
                for batch in numbers
            ],
            loss,
            is_first=is_first,
            is_last=is_last,
        )


def apply_step(
    engine: TrainEngine,
    backend: TrainBackend,
    step: StepPlan,
    rows: Mapping[int, TrainRow],
    shares: Sequence[Tensor],
    *,
    scale: Sequence[float],
    of_gradients: float = 1.0,
    statistics: Sequence[str],
    name: str,
    rate_flag: str = "--lr",
    before_move: Callable[[], None] | None = None,
) -> StepResult:
    """Apply the accumulated gradients. `shares`: statistics of this rank's packs; `scale`: a factor for the sum of
    each, `of_gradients`: one for the gradients. The rest as in `optimizer_step`."""
    numbers = step.micro_batches[backend.place.dp_rank]
    sums = _sum_over_replicas(shares, len(statistics), backend)
    totals = [value * factor for value, factor in zip(sums, scale, strict=True)]
    learning_rate = engine.learning_rate
    if not all(math.isfinite(value) for value in totals):
        raise VimeError(
            f"{name}: the loss is not finite ({dict(zip(statistics, totals, strict=True))}). Rows: "
            f"{_rows_not_finite(numbers, rows, shares)}. Look at these samples' rewards and log-probabilities; "
            f"if they are sound, lower {rate_flag}."
        )
    if before_move is not None:
        before_move()
    failpoint(Point.OPTIMIZER)
    with span("optimizer_step", step=name):
        grad_norm = engine.apply_gradients(of_gradients)
    failpoint(Point.STEPPED)
    if not math.isfinite(grad_norm):
        every_row = sorted({row for batches in step.micro_batches for batch in batches for row in batch})
        raise VimeError(
            f"{name}: the gradient norm is {grad_norm}, expected a finite number; the weights were not changed. Rows: "
            f"{every_row}. Lower {rate_flag} or --clip-grad, or train in fp32."
        )
    return StepResult(totals=totals, grad_norm=grad_norm, learning_rate=learning_rate)


def mean_over_steps(metrics: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each metric over the steps that have it, names in order of appearance."""
    names = dict.fromkeys(name for entry in metrics for name in entry)
    held = {name: [entry[name] for entry in metrics if name in entry] for name in names}
    return {name: sum(values) / len(values) for name, values in held.items()}


def _sum_over_replicas(shares: Sequence[Tensor], count: int, backend: TrainBackend) -> list[float]:
    """Return [S] statistics of all packs of all replicas; one rank of each replica contributes. Collective over all
    trainer ranks."""
    total_S = torch.zeros(count, dtype=torch.float64, device=backend.device)
    if shares and backend.place.speaks:
        total_S = torch.stack(list(shares)).sum(0)
    dist.all_reduce(total_S)
    return [float(value) for value in total_S.tolist()]


def _rows_not_finite(
    numbers: Sequence[Sequence[int]], rows: Mapping[int, TrainRow], shares: Sequence[Tensor]
) -> list[str]:
    """Return samples of the micro-batches whose statistics are not finite, over all ranks. Collective; called only
    after a failure."""
    mine = [
        f"row {row} (sample {rows[row].sample_index})"
        for batch, statistics in zip(numbers, shares, strict=bool(shares))
        if not bool(torch.isfinite(statistics).all())
        for row in batch
    ]
    everyone: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, mine)
    return sorted({entry for entries in everyone for entry in entries})


def row_log_probs(
    engine: TrainEngine,
    backend: TrainBackend,
    rows: Sequence[TrainRow],
    *,
    batch: BatchConfig,
    rule: SamplingRule | None = None,
) -> list[Tensor]:
    """Return [R] fp32 on the CPU per row, valid on every rank. Collective like `TrainEngine.forward`; all ranks pass
    the same rows."""
    if not rows:
        return []
    found = [logp_R for logps in engine.forward(_cut(rows, batch), rule) for logp_R in logps]
    if dist.get_world_size(backend.replica_group) == 1:
        return found
    lengths = [row.response_length for row in rows]
    flat = torch.cat(found) if backend.place.speaks else torch.zeros(sum(lengths))
    flat = flat.to(backend.device)
    dist.all_reduce(flat, group=backend.replica_group)  # the others add zeros: exact
    return list(torch.split(flat.cpu(), lengths))


def _cut(rows: Sequence[TrainRow], batch: BatchConfig) -> list[list[TrainRow]]:
    """Split into micro-batches of consecutive rows, of the size that training uses: by tokens when that is set, else by
    rows."""
    limit = batch.max_tokens_per_gpu if batch.use_dynamic_batch_size else None
    batches: list[list[TrainRow]] = [[]]
    for row in rows:
        held = batches[-1]
        is_full = (
            len(held) >= batch.micro_batch_size
            if limit is None
            else sum(other.total_length for other in held) + row.total_length > limit
        )
        if held and is_full:
            batches.append([])
        batches[-1].append(row)
    return batches
