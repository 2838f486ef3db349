"""The plan of a round from the flags of a run, and how much work it is."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from vime.batching.flops import RoundWork, executed_flops, forward_flops, layer_flops, train_flops
from vime.batching.measure import plan_metrics
from vime.batching.plan import join_plans, plan_round
from vime.config.hf_config import ModelShape, read_model_shape
from vime.config.parse import Config
from vime.data.rows import sample_numbers, trained_tokens
from vime.ray.cluster import data_parallel_size
from vime.training.columns import needs_old_log_prob
from vime.training.roles import base_is_reference, needed_roles, policy_moves
from vime.types import Role, RoundPlan

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRound:
    """`plan` covers the given rows; `work` and `metrics` the whole round, including its early batches."""

    plan: RoundPlan
    rows: NDArray[np.void]  # FACTS of each row
    work: RoundWork
    metrics: dict[str, float]


class RoundPlanner:
    """Owned by the RolloutManager."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._has_warned = False

    @cached_property
    def _shape(self) -> ModelShape:
        return read_model_shape(self._config.model.hf_checkpoint)

    def plan(
        self,
        rollout_id: int,
        rows: NDArray[np.void],
        begun: Sequence[PlannedRound] = (),
        *,
        is_early_batch: bool = False,
    ) -> PlannedRound:
        """`rows`: of type FACTS, in the order in which the plan numbers them. `begun`: early batches of the round that
        were planned before, of which this is the rest. `is_early_batch`: a further one will follow."""
        batch, parallel = self._config.batch, self._config.parallel
        lengths, loads = self._loads(rows)
        balance_by = {"length": "tokens", "flops": "flops"}[batch.balance_data_by]
        max_tokens = (batch.max_tokens_per_gpu or 0) * parallel.context_parallel_size
        if batch.use_dynamic_batch_size:
            self._warn_if_long(rollout_id, lengths, max_tokens)
        numbers: list[int] = sample_numbers(rows).tolist()
        num_samples = numbers[-1] + 1 if numbers else 0
        plan = plan_round(
            rollout_id,
            lengths,
            trained_tokens(rows).tolist(),
            dp_size=data_parallel_size(self._config),
            samples_per_step=num_samples if is_early_batch or begun else batch.global_batch_size or num_samples,
            micro_batch_size=None if batch.use_dynamic_batch_size else batch.micro_batch_size,
            max_tokens_per_micro_batch=max_tokens if batch.use_dynamic_batch_size else None,
            loads=loads[balance_by] if batch.balance_data else None,
            micro_batch_multiple=parallel.micro_batch_multiple,
            sample_numbers=numbers,
        )
        every_row = np.concatenate([*(early_batch.rows for early_batch in begun), rows])
        whole = join_plans([*(early_batch.plan for early_batch in begun), plan]) if begun else plan
        lengths, loads = self._loads(every_row)
        metrics = plan_metrics(
            whole, lengths, loads, pack_multiple=parallel.pack_multiple, sequence_multiple=parallel.sequence_multiple
        )
        work = round_work(self._config, self._shape, whole, every_row)
        return PlannedRound(plan=plan, rows=rows, work=work, metrics=metrics)

    def _loads(self, rows: NDArray[np.void]) -> tuple[list[int], dict[str, list[int]]]:
        """Return the tokens of each row and its cost."""
        lengths: list[int] = rows["total_length"].tolist()
        sizes = zip(lengths, rows["response_length"].tolist(), strict=True)
        flops = [train_flops(self._shape, *size) for size in sizes]
        return lengths, {"tokens": lengths, "flops": flops}

    def _warn_if_long(self, rollout_id: int, lengths: Sequence[int], max_tokens: int) -> None:
        longest = max(range(len(lengths)), key=lambda row: lengths[row], default=None)
        if self._has_warned or longest is None or lengths[longest] <= max_tokens:
            return
        self._has_warned = True
        logger.warning(
            "round %d: row %d has %d tokens, over the %d of one micro-batch (--max-tokens-per-gpu x "
            "--context-parallel-size); it gets a micro-batch of its own, as will others, and that may need more memory "
            "than the limit was chosen for. Raise the flag, or lower --rollout-max-response-len.",
            rollout_id,
            longest,
            lengths[longest],
            max_tokens,
        )


def round_work(config: Config, shape: ModelShape, plan: RoundPlan, rows: NDArray[np.void]) -> RoundWork:
    """Return the passes of a round by role. The policy learns; in a round of the critic alone it is run forward once,
    to be compared with the engines. The old policy, the reference and a teacher are run forward where the algorithm
    needs them; a critic is run forward and learns. Models of other roles are counted as if they had the policy's
    shape."""
    roles, moves = needed_roles(config), policy_moves(plan, config)
    num_forward = int(needs_old_log_prob(plan, config.algo)) if moves else 1
    has_reference = Role.REFERENCE in roles or base_is_reference(config)
    num_forward += int(has_reference and (moves or config.algo.kl_coef > 0)) + int(Role.TEACHER in roles)
    recompute, passes = config.parallel.recompute_granularity, config.algo.num_ppo_epochs
    model = executed = 0
    for size in zip(rows["total_length"].tolist(), rows["response_length"].tolist(), strict=True):
        others = num_forward * forward_flops(shape, *size)
        if Role.CRITIC in roles:  # no vocabulary
            others += (1 + 3 * passes) * layer_flops(shape, size[0])
        unlearned = forward_flops(shape, *size) if config.lora.trains_adapter else 0
        model += others + (passes * (train_flops(shape, *size) - unlearned) if moves else 0)
        executed += others
        executed += passes * (executed_flops(shape, *size, recompute=recompute) - unlearned) if moves else 0
    return RoundWork(num_tokens=int(rows["total_length"].sum()), model_flops=model, executed_flops=executed)
