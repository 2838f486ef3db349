"""`TrainWorker`: the roles that run on one trainer rank, and a round of training with them: forward columns, optimizer
steps, and their metrics."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from vime.config.parse import Config
from vime.config.training import AlgoConfig, BatchConfig
from vime.data.rows import TrainRow
from vime.observability.events import span
from vime.protocols import (
    LOSS_PARAMETERS,
    AdapterEngine,
    LossFunction,
    PackLoss,
    PendingSave,
    TrainBackend,
    TrainEngine,
    load_plugin,
)
from vime.training.columns import (
    OLD_LOGP,
    REF_LOGP,
    RETURN,
    TEACHER_LOGP,
    VALUE,
    Columns,
    advantage_columns,
    needs_old_log_prob,
    sample_token_columns,
    staleness_columns,
)
from vime.training.loss_statistics import STATISTICS, to_metrics
from vime.training.mismatch import Judge, MismatchCheck
from vime.training.policy_loss import CustomLoss, PolicyLoss
from vime.training.roles import LEARNING, base_is_reference, engine_spec, policy_moves, role_folder, shared_roles
from vime.training.value_loss import VALUE_STATISTICS, ValueLoss, value_metrics
from vime.types import CheckpointError, HandoffError, Role, RoundPlan, SamplingRule, StepPlan, VimeError
from vime.utils.failpoints import Point, failpoint


class TrainWorker:
    """One rank's engines, one per role, and the calls that use them together.

    Every method is collective over all trainer ranks unless it says otherwise. The order in which engines are built and
    called is fixed here, so no two ranks can disagree on it. `rows` are by row number: at least those that the plan
    gives to this data-parallel index.
    """

    actor: TrainEngine  # the policy: trained, published and exported; absent on ranks of other roles

    def __init__(
        self, config: Config, backend: TrainBackend, *, total_steps: int, roles: Sequence[Role] | None = None
    ) -> None:
        """`total_steps`: optimizer steps of the whole run. `roles`: those that run here, empty for all that share the
        policy's ranks; columns of the others are given to `compute_columns`."""
        self._config = config
        self.backend, self.place = backend, backend.place
        played = shared_roles(config) if roles is None else roles
        self.custom_loss = _load_custom_loss(config)
        self.engines: dict[Role, TrainEngine] = {
            role: backend.build(engine_spec(role, config, total_steps=total_steps)) for role in Role if role in played
        }
        if Role.ACTOR in self.engines:
            self.actor = self.engines[Role.ACTOR]

    def train_round(
        self, plan: RoundPlan, rows: Mapping[int, TrainRow], judge: Judge | None = None
    ) -> dict[str, float]:
        """Train a round of which every role runs here: columns, then every optimizer step of the plan."""
        return self.update(plan, rows, self.compute_columns(plan, rows), judge)

    def update(
        self, plan: RoundPlan, rows: Mapping[int, TrainRow], columns: Columns, judge: Judge | None = None
    ) -> dict[str, float]:
        """Run every optimizer step of the models that learn here; metrics are the same on every rank. `judge`: how far
        trainer and engine may differ (empty: measured, never refused)."""
        check_delivered(plan, rows, dp_rank=self.place.dp_rank)
        metrics = {
            "train/num_tokens": float(sum(step.num_tokens for step in plan.steps)),
            "train/num_samples": float(sum(step.num_samples for step in plan.steps)),
            "train/num_rows": float(sum(step.num_rows for step in plan.steps)),
        }
        # the policy first: LogprobMismatch refuses its first step, and then no weight has moved at all
        if Role.ACTOR in self.engines:
            metrics |= self.update_actor(plan, rows, columns, judge)
        if Role.CRITIC in self.engines:
            metrics |= self.update_critic(plan, rows, columns)
        return metrics

    def compute_columns(self, plan: RoundPlan, rows: Mapping[int, TrainRow], given: Columns | None = None) -> Columns:
        """Return every column that the losses read besides those of the rows: forward passes of the roles that run here
        over the whole round, what other workers computed (`given`), and what is derived from them. Called where the
        policy runs."""
        algo, place = self._config.algo, self.place
        computed = self.forward_columns(plan, rows)
        mine = plan.rows_of(place.dp_rank) if place.holds_tokens else ()
        others = {name: {row: column[row] for row in mine} for name, column in (given or {}).items()}
        columns = {**others, **computed}
        if needs_old_log_prob(plan, algo, policy_moves=policy_moves(plan, self._config)):
            columns[OLD_LOGP] = self.compute_log_prob(plan, rows)
        advantages = advantage_columns(plan, rows, columns, algo=algo, place=place, device=self.backend.device)
        return {**columns, **advantages, **staleness_columns(plan.rollout_id, rows, plan.rows_of(place.dp_rank))}

    def forward_columns(self, plan: RoundPlan, rows: Mapping[int, TrainRow]) -> Columns:
        """Return the column of each role that runs here beside the policy, for the worker that has the policy. While
        the policy does not move only --kl-coef reads the reference."""
        check_delivered(plan, rows, dp_rank=self.place.dp_rank)
        is_read = policy_moves(plan, self._config) or self._config.algo.kl_coef > 0
        columns: Columns = {}
        if Role.ACTOR in self.engines and base_is_reference(self._config) and is_read:
            with cast("AdapterEngine", self.actor).base_only():
                columns[REF_LOGP] = self.compute_log_prob(plan, rows)
        if Role.REFERENCE in self.engines and is_read:
            columns[REF_LOGP] = self.compute_ref_log_prob(plan, rows)
        if Role.CRITIC in self.engines:
            columns[VALUE] = self.compute_values(plan, rows)
        if Role.TEACHER in self.engines:
            columns[TEACHER_LOGP] = forward_column(self.engines[Role.TEACHER], plan, rows, dp_rank=self.place.dp_rank)
        return columns

    def compute_log_prob(self, plan: RoundPlan, rows: Mapping[int, TrainRow]) -> dict[int, Tensor]:
        """Return log p of the present policy, [R] by row number; empty on ranks without tokens. Collective like
        `forward`."""
        return forward_column(self.actor, plan, rows, dp_rank=self.place.dp_rank)

    def compute_ref_log_prob(self, plan: RoundPlan, rows: Mapping[int, TrainRow]) -> dict[int, Tensor]:
        """Return the same of the reference model."""
        return forward_column(self.engines[Role.REFERENCE], plan, rows, dp_rank=self.place.dp_rank)

    def compute_values(self, plan: RoundPlan, rows: Mapping[int, TrainRow]) -> dict[int, Tensor]:
        """Return the critic's prediction of the return before each response token."""
        return forward_column(self.engines[Role.CRITIC], plan, rows, dp_rank=self.place.dp_rank)

    def update_critic(self, plan: RoundPlan, rows: Mapping[int, TrainRow], columns: Columns) -> dict[str, float]:
        """Run every optimizer step of the critic, towards the column RETURN; means over the steps, the last step's
        rate."""
        engine, per_token = self.engines[Role.CRITIC], self._config.algo.calculate_per_token_loss
        metrics: list[dict[str, float]] = []
        for number, step in enumerate(_passes(plan, self._config.algo)):
            done = optimizer_step(
                engine,
                self.backend,
                step,
                rows,
                {name: columns[name] for name in (VALUE, RETURN)},
                loss=ValueLoss(step, value_clip=self._config.critic.value_clip, per_token=per_token),
                statistics=VALUE_STATISTICS,
                name=f"round {plan.rollout_id}, optimizer step {number} of the critic",
                rate_flag="--critic-lr",
            )
            metrics.append({**value_metrics(done.totals), "train/critic_grad_norm": done.grad_norm})
        engine.finish_round()
        return {**mean_over_steps(metrics), "train/critic_lr": done.learning_rate}

    def update_actor(
        self, plan: RoundPlan, rows: Mapping[int, TrainRow], columns: Columns, judge: Judge | None = None
    ) -> dict[str, float]:
        """Run every optimizer step of the policy; none in a round of the critic alone. LogprobMismatch before a move.

        Metrics are means over the steps of the round that have them (a bucket of staleness may be empty); the rate is
        the last step's.
        """
        algo, moves = self._config.algo, policy_moves(plan, self._config)
        is_sampled = algo.loss_type != "sft_loss"  # otherwise the completions carry no log-probabilities of an engine
        check = MismatchCheck(rows, judge or Judge(version=plan.rollout_id), self.backend, is_open=is_sampled)
        if OLD_LOGP in columns:
            check.compare(columns[OLD_LOGP])
        elif check.is_open and not moves:
            check.compare(self.compute_log_prob(plan, rows))
        if not moves:
            return check.metrics()
        metrics: list[dict[str, float]] = []
        for number, step in enumerate(_passes(plan, self._config.algo)):
            loss, before_move = check.watched(PolicyLoss(algo, step, self.custom_loss), step)
            done = optimizer_step(
                self.actor,
                self.backend,
                step,
                rows,
                columns,
                loss=loss,
                statistics=STATISTICS,
                name=f"round {plan.rollout_id}, optimizer step {number}",
                before_move=before_move,
            )
            metrics.append(
                {
                    **to_metrics(done.totals, with_mismatch=algo.get_mismatch_metrics, is_sampled=is_sampled),
                    "train/grad_norm": done.grad_norm,
                    "train/lr": done.learning_rate,
                }
            )
        self.actor.finish_round()
        return {**mean_over_steps(metrics), "train/lr": metrics[-1]["train/lr"], **check.metrics()}

    def log_probs(self, rows: Sequence[TrainRow], rule: SamplingRule | None = None) -> list[Tensor]:
        """Return log p of each row's response tokens under the policy, [R] fp32 on the CPU, at the sampling temperature
        or under `rule`, valid on every rank.

        Collective over the replica; its ranks pass the same rows. With expert parallelism or shards over all trainer
        ranks, and all pass the same rows, because they compute each other's parts.
        """
        return row_log_probs(self.actor, self.backend, rows, batch=self._config.batch, rule=rule)

    def save(self, directory: Path, *, in_background: bool = False) -> list[PendingSave]:
        """Save every model that learns, with optimizer, schedule and random states, into a new DIRECTORY. Return one
        handle for each model whose bytes are still being written."""
        return [
            engine.save(role_folder(directory, role), in_background=in_background)
            for role, engine in _learning(self.engines)
        ]

    def load(self, directory: Path) -> None:
        """Load what `save` wrote, also from another parallel layout."""
        for role, engine in _learning(self.engines):
            folder = role_folder(directory, role)
            if directory.is_dir() and not folder.is_dir():
                raise CheckpointError(
                    f"--load {directory}: holds no {role}: it was written with another --advantage-estimator. Load one "
                    "of this, or start a new run from its --save-hf export (--hf-checkpoint)."
                )
            engine.load(folder)

    def sleep(self) -> None:
        """Free the device memory of every engine; values and random states stay."""
        for engine in self.engines.values():
            engine.sleep()

    def rest(self) -> None:
        """Keep the weights of the policy alone on the device, which an update sends."""
        for role, engine in self.engines.items():
            if role is Role.ACTOR:
                engine.rest()
            else:
                engine.sleep()

    def wake_up(self) -> None:
        """Undo `sleep` and `rest`."""
        for engine in self.engines.values():
            engine.wake_up()


def _passes(plan: RoundPlan, algo: AlgoConfig) -> Sequence[StepPlan]:
    """Return the steps of the round in their order, --num-ppo-epochs times. They are not shuffled: rows would move to
    other steps, and the denominators are the plan's."""
    return plan.steps * algo.num_ppo_epochs


def _learning(engines: Mapping[Role, TrainEngine]) -> list[tuple[Role, TrainEngine]]:
    return [(role, engine) for role, engine in engines.items() if role in LEARNING]


def _load_custom_loss(config: Config) -> CustomLoss | None:
    """Load --custom-loss-path, bound to the configuration; its signature is checked again in this process."""
    path = config.algo.custom_loss_path
    if path is None:
        return None
    return partial(cast("LossFunction", load_plugin(path, "--custom-loss-path", LOSS_PARAMETERS)), config.flat)


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
