"""One round of training on this rank: log-probabilities of old and reference policy, then every optimizer step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from vime.backends.megatron_utils.policy_loss import OLD_LOGP, REF_LOGP, STATISTICS, PolicyLoss
from vime.backends.megatron_utils.replica import Replica
from vime.backends.megatron_utils.step import forward_backward, pack_rows
from vime.config.training import AlgoConfig, BatchConfig
from vime.types import HandoffError, RoundPlan, StepPlan, TrainRow, VimeError

Columns = dict[str, dict[int, Tensor]]
"""Column name -> row number -> [R] values. Filled on the last pipeline stage, empty dicts elsewhere."""


def train_round(
    replica: Replica, plan: RoundPlan, rows: Mapping[int, TrainRow], *, algo: AlgoConfig, dp_rank: int
) -> dict[str, float]:
    """Run every optimizer step of the plan; answers metrics that are the same on every rank.

    Collective over all trainer ranks. Loss-like metrics are means over the steps of the round; counts are sums; the
    rate is the last step's; the difference to the engine's log-probabilities is the first step's, before a move.
    """
    missing = set(plan.rows_of(dp_rank)) - set(rows)
    if missing:
        raise HandoffError(
            f"round {plan.rollout_id}: the plan gives rows {sorted(missing)[:10]} to data-parallel index {dp_rank}, "
            f"but they were not handed over (got {sorted(rows)[:10]}, ...). The carrier lost groups of the round."
        )
    columns = _log_prob_columns(replica, plan, rows, algo=algo, dp_rank=dp_rank)
    metrics: list[dict[str, float]] = []
    for number, step in enumerate(plan.steps):
        name = f"round {plan.rollout_id}, optimizer step {number}"
        metrics.append(_train_step(replica, step, rows, columns, algo=algo, dp_rank=dp_rank, name=name))
    combined = {key: sum(entry[key] for entry in metrics) / len(metrics) for key in metrics[0]}
    for key in ("train/num_tokens", "train/num_samples"):
        combined[key] = sum(entry[key] for entry in metrics)
    combined["train/lr"] = metrics[-1]["train/lr"]
    difference = "train/train_rollout_logprob_abs_diff"
    combined[difference] = metrics[0][difference]
    return combined


def _log_prob_columns(
    replica: Replica, plan: RoundPlan, rows: Mapping[int, TrainRow], *, algo: AlgoConfig, dp_rank: int
) -> Columns:
    """Forward-only passes over the whole round, before its first step.

    The old policy of a one-step round is the policy itself, so no pass is needed for it.
    """
    sources = {}
    if len(plan.steps) > 1:
        sources[OLD_LOGP] = replica.chunks
    if algo.use_kl_loss:
        assert replica.reference is not None, "build_replica makes the reference under --use-kl-loss"
        sources[REF_LOGP] = replica.reference
    numbers = [batch for step in plan.steps for batch in step.micro_batches[dp_rank]]
    columns: Columns = {}
    for name, chunks in sources.items():
        answers = replica.log_probs(chunks, [[rows[row] for row in batch] for batch in numbers])
        columns[name] = {
            row: logp_R
            for batch, logps in zip(numbers, answers, strict=bool(answers))
            for row, logp_R in zip(batch, logps, strict=True)
        }
    return columns


def _train_step(
    replica: Replica,
    step: StepPlan,
    rows: Mapping[int, TrainRow],
    columns: Columns,
    *,
    algo: AlgoConfig,
    dp_rank: int,
    name: str,
) -> dict[str, float]:
    """One optimizer step. A loss or gradient norm that is not finite raises on every rank, before the weights move."""
    numbers = step.micro_batches[dp_rank]
    is_last_stage = parallel_state.is_pipeline_last_stage()
    packs = [
        pack_rows(
            [rows[row] for row in batch],
            multiple=replica.pad_multiple,
            extra={key: [column[row] for row in batch] for key, column in columns.items()} if is_last_stage else None,
        )
        for batch in numbers
    ]
    replica.optimizer.zero_grad()
    shares = forward_backward(replica.chunks, packs, replica.sampling, PolicyLoss(algo, step))
    totals = _sum_over_ranks(shares)
    learning_rate = replica.optimizer.learning_rate
    if not all(math.isfinite(value) for value in totals):
        raise VimeError(
            f"{name}: the loss is not finite ({dict(zip(STATISTICS, totals, strict=True))}). Rows: "
            f"{_rows_not_finite(numbers, rows, shares)}. Look at these samples' rewards and log-probabilities; "
            "if they are sound, lower --lr."
        )
    grad_norm = replica.optimizer.step()
    if not math.isfinite(grad_norm):
        every_row = sorted({row for batches in step.micro_batches for batch in batches for row in batch})
        raise VimeError(
            f"{name}: the gradient norm is {grad_norm}, expected a finite number; the weights were not changed. Rows: "
            f"{every_row}. Lower --lr or --clip-grad, or train in fp32."
        )
    named = {f"train/{key}": value for key, value in zip(STATISTICS, totals, strict=True)}
    return {
        **named,
        "train/grad_norm": grad_norm,
        "train/lr": learning_rate,
        "train/num_tokens": float(step.num_tokens),
        "train/num_samples": float(step.num_samples),
    }


def _sum_over_ranks(shares: Sequence[Tensor]) -> list[float]:
    """Sum the statistics of all packs of all replicas. Collective over all trainer ranks.

    The ranks of one replica's last stage hold the same numbers, so one of them speaks for the replica.
    """
    total_S = torch.zeros(len(STATISTICS), dtype=torch.float64, device=torch.cuda.current_device())
    speaks = parallel_state.get_tensor_model_parallel_rank() == parallel_state.get_context_parallel_rank() == 0
    if shares and speaks:
        total_S = torch.stack(list(shares)).sum(0)
    dist.all_reduce(total_S)
    return [float(value) for value in total_S.tolist()]


def _rows_not_finite(
    numbers: Sequence[Sequence[int]], rows: Mapping[int, TrainRow], shares: Sequence[Tensor]
) -> list[str]:
    """Samples of the micro-batches whose statistics are not finite, over all ranks. Collective; failure path only."""
    mine = [
        f"row {row} (sample {rows[row].sample_index})"
        for batch, statistics in zip(numbers, shares, strict=bool(shares))
        if not bool(torch.isfinite(statistics).all())
        for row in batch
    ]
    everyone: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, mine)
    return sorted({entry for entries in everyone for entry in entries})


def row_log_probs(replica: Replica, rows: Sequence[TrainRow], *, batch: BatchConfig) -> list[Tensor]:
    """[R] fp32 on the CPU per row, valid on every rank. Collective over the model-parallel group."""
    if not rows:
        return []
    answers = [logp_R for logps in replica.log_probs(replica.chunks, _cut(rows, batch)) for logp_R in logps]
    group = parallel_state.get_pipeline_model_parallel_group()
    if group.size() == 1:
        return answers
    device = torch.cuda.current_device()
    lengths = [row.response_length for row in rows]
    flat = torch.cat(answers).to(device) if answers else torch.empty(sum(lengths), device=device)
    dist.broadcast(flat, parallel_state.get_pipeline_model_parallel_last_rank(), group=group)
    return list(flat.cpu().split(lengths))


def _cut(rows: Sequence[TrainRow], batch: BatchConfig) -> list[list[TrainRow]]:
    """Consecutive rows, as many to a micro-batch as training takes: by tokens when that is set, else by rows."""
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
