"""The figures of `vime plan`: whether every rank fits, an estimate of the speed, and the table of both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vime.backends.memory import RankBytes
from vime.batching.flops import executed_flops, forward_flops
from vime.config.deadlines import (
    checkpoint_bytes,
    request_deadline_s,
    rollout_deadline_s,
    start_deadline_s,
    update_deadline_s,
)
from vime.config.hf_config import read_model_shape, read_record
from vime.config.parse import Config
from vime.observability.forecast import Forecast
from vime.ray.dry_run import Part, longest_row, ranks_per_node, world_size
from vime.training.roles import base_is_reference, needed_roles
from vime.types import Role

GIB = 2**30
RESERVE_GIB = 4.0
"""Of a GPU, for what is not counted: its context, buffers of NCCL, gaps of the allocator. Assumed, never measured."""
TFLOPS = 140.0
"""Of one GPU that trains, when not said: an H100 did 143 with a model of 0.5 B and `local` layers (docs/log.md,
2026-11-27). Larger models and Transformer Engine should do more; neither was measured."""
UPDATE_GB_PER_S = 1.0
"""Of the weights to the engines, when not said. Assumed, never measured."""
COLUMNS = ("models", "stage", "ranks", "parameters", "weights", "gradients", "optimizer", "activations", "peak")
SHORT = {"parameters": "params", "activations": "passes"}
COLUMNS_WITH_HOST = (*(SHORT.get(name, name) for name in COLUMNS), "host")  # 80 columns hold them too


def verdict(config: Config, parts: Sequence[Part]) -> tuple[bool, float | None]:
    """Return whether every rank's peak and the reserve fit, and the limit, GiB; on the CPU (True, None)."""
    if config.cluster.device != "cuda":
        return True, None
    limit = config.cluster.gpu_memory_gib
    return all(part.heaviest.peak / GIB + RESERVE_GIB <= limit for part in parts), limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What the user says of the machine; None: assumed, or not known."""

    trainer_tflops: float | None = None
    engine_tokens_per_sec: float | None = None
    update_gb_per_sec: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Throughput by arithmetic and rates alone: what waits for what is not modelled."""

    trainer_tokens_per_sec: float  # of responses, all ranks together
    is_trainer_assumed: bool
    update_gb: float
    update_secs: float
    is_update_assumed: bool
    engine_tokens_per_sec: float | None  # of all engines
    engines_for_balance: float | None  # that generate as fast as the trainers train


def estimate(config: Config, rates: Rates) -> Estimate:
    """Count rows of the greatest length: forward, backward, what is recomputed, and one pass of each frozen model
    (taken to be of the policy's shape)."""
    shape = read_model_shape(config.model.hf_checkpoint)
    length = longest_row(config)
    response = min(config.rollout.rollout_max_response_len, length - 1)
    flops = executed_flops(shape, length, response, recompute=config.parallel.recompute_granularity)
    num_forward = sum(role in (Role.REFERENCE, Role.TEACHER) for role in needed_roles(config))
    num_forward += base_is_reference(config)
    num_forward -= config.lora.trains_adapter  # backward goes towards the inputs alone, not the weights
    flops += num_forward * forward_flops(shape, length, response)
    trained = response * (rates.trainer_tflops or TFLOPS) * 1e12 * world_size(config) / flops
    num_bytes = (2 if config.parallel.bf16 else 4) * _num_parameters(config)
    if config.lora.trains_adapter:
        num_bytes = _adapter_bytes(config)
    per_engine = rates.engine_tokens_per_sec
    return Estimate(
        trainer_tokens_per_sec=trained,
        is_trainer_assumed=rates.trainer_tflops is None,
        update_gb=num_bytes / 1e9,
        update_secs=num_bytes / 1e9 / (rates.update_gb_per_sec or UPDATE_GB_PER_S),
        is_update_assumed=rates.update_gb_per_sec is None,
        engine_tokens_per_sec=per_engine and per_engine * config.cluster.num_engines,
        engines_for_balance=per_engine and trained / per_engine,
    )


@dataclass(frozen=True, slots=True)
class Deadline:
    """A wait of the run: what ends in it, the flag that it comes from, seconds, and what is estimated for it."""

    wait: str
    flag: str
    secs: float
    estimated_secs: float | None = None

    @property
    def is_too_short(self) -> bool:
        return self.estimated_secs is not None and self.estimated_secs > self.secs


def deadlines(config: Config, figures: Estimate) -> list[Deadline]:
    """Return the deadlines that grow with the model and its answers, and that of training. An update is estimated for
    all of its bytes, training for a round of answers of the greatest length. Weight files that are not here are taken
    as bf16, which most models come in."""
    rollout, num_bytes = config.rollout, checkpoint_bytes(config) or 2 * _num_parameters(config)
    tokens = rollout.rollout_batch_size * rollout.n_samples_per_prompt * rollout.rollout_max_response_len
    return [
        Deadline("start of a part that reads weights", "--start-timeout-secs", start_deadline_s(config, num_bytes)),
        Deadline("one request to an engine", "--generate-timeout-secs", request_deadline_s(config)),
        Deadline("one round of generation", "--rollout-timeout-secs", rollout_deadline_s(config)),
        Deadline(
            "one round of training",
            "--train-timeout-secs",
            config.cluster.train_timeout_secs,
            tokens / figures.trainer_tokens_per_sec,
        ),
        Deadline(
            "one weight update",
            "--update-weight-timeout-secs",
            update_deadline_s(config, num_bytes),
            figures.update_secs,
        ),
    ]


def doubts(config: Config, waits: Sequence[Deadline]) -> list[str]:
    """Say which deadlines an estimate passes, and what is missing to know them."""
    lines = [
        f"{one.wait}: about {one.estimated_secs:.0f} s by the estimates, its deadline is {one.secs:.0f} s: raise "
        f"{one.flag}, or it fails then."
        for one in waits
        if one.is_too_short
    ]
    if not checkpoint_bytes(config):
        size = 2 * _num_parameters(config) / 1e9
        lines.append(f"the weights are not here: deadlines of starts and updates are for files of {size:.1f} GB, bf16.")
    return lines


def _num_parameters(config: Config) -> int:
    """Return the parameters that an update sends, without norms and biases (below 0.1 %)."""
    shape, record = read_model_shape(config.model.hf_checkpoint), read_record(config.model.hf_checkpoint)
    attention = shape.attention_weights
    if not attention:
        attention = 2 * shape.hidden_size * (shape.num_attention_heads + shape.num_key_value_heads) * shape.head_dim
    mlp, num_dense = 3 * shape.hidden_size * shape.intermediate_size, shape.num_layers
    experts = (
        shape.num_experts * (3 * shape.moe_intermediate_size + 1) + 3 * shape.shared_expert_size
    ) * shape.hidden_size
    if shape.num_experts:
        num_dense = shape.num_dense_layers
    layers = shape.num_layers * attention + num_dense * mlp + (shape.num_layers - num_dense) * experts
    is_tied = record.get(
        "tie_word_embeddings", shape.model_type == "gemma3_text"
    )  # whose class ties unless told not to
    vocabulary = shape.vocab_size * shape.hidden_size * (1 if is_tied else 2)
    return layers + vocabulary


def _adapter_bytes(config: Config) -> int:
    """Return the bytes of an adapter, which is sent in fp32; experts have none."""
    shape, targets = read_model_shape(config.model.hf_checkpoint), config.lora.lora_target_modules
    hidden, queries = shape.hidden_size, shape.num_attention_heads * shape.head_dim
    keys, num_dense = shape.num_key_value_heads * shape.head_dim, shape.num_layers
    if shape.num_experts:
        num_dense = shape.num_dense_layers
    by_layer = {"q_proj": queries, "k_proj": keys, "v_proj": keys, "o_proj": queries}
    widths = shape.num_layers * sum(hidden + by_layer.get(name, -hidden) for name in targets)
    widths += num_dense * sum(hidden + shape.intermediate_size for name in targets if name not in by_layer)
    return 4 * config.lora.lora_rank * widths


def show(
    config: Config,
    parts: Sequence[Part],
    figures: Estimate,
    played: Mapping[int, Forecast],
    *,
    waits: Sequence[Deadline],
    notes: Sequence[str],
    advice: Sequence[str],
) -> None:
    console = Console(highlight=False, soft_wrap=True)
    console.print(_table(parts))
    speed = [*_speed(config, parts, figures, is_played=bool(played)), *_played(config, played)]
    ends = [f"  {one.wait}: {one.secs:,.0f} s ({one.flag})" for one in waits]
    for line in [*_locked(config, parts), *speed, "Deadlines:", *ends, *(f"note: {note}" for note in notes)]:
        console.print(Text(line))
    _, limit = verdict(config, parts)
    peak = max(part.heaviest.peak for part in parts) / GIB
    if limit is None:
        whole = sum((rank.peak + rank.host) * rank.count for part in parts for rank in part.ranks) / GIB
        console.print(f"On the CPU all ranks share this machine's memory: {whole:.2f} GiB of tensors.")
        return
    said = "Does not fit" if advice else "Fits"
    console.print(f"{said}: peak {peak:.1f} + reserve {RESERVE_GIB:g} GiB of --gpu-memory-gib {limit:g}.")
    for line in advice:
        console.print(Text(f"  {line}"))


def _table(parts: Sequence[Part]) -> Table:
    table = Table(box=None, title="GiB of one rank", title_justify="left", padding=(0, 1, 0, 0))  # 80 columns hold it
    has_host = any(rank.host for part in parts for rank in part.ranks)
    for name in COLUMNS_WITH_HOST if has_host else COLUMNS:
        table.add_column(name, justify="left" if name == "models" else "right", no_wrap=True)
    for part in parts:
        for rank in part.ranks:
            table.add_row(*_cells(part, rank), *([f"{rank.host / GIB:.2f}"] if has_host else []))
    return table


def _cells(part: Part, rank: RankBytes) -> list[str]:
    models = rank.models.values()
    sums = [
        sum(model.parameters for model in models),
        sum(model.gradients for model in models),
        sum(model.optimizer for model in models),
        rank.activations,
        rank.peak,
    ]
    first, last = rank.stages[0], rank.stages[-1]
    stages = str(first) if first == last else f"{first}-{last}"
    count = sum(model.num_parameters for model in models) / 1e9
    return ["\n".join(part.roles), stages, str(rank.count), f"{count:.3f} B", *(f"{value / GIB:.2f}" for value in sums)]


def _locked(config: Config, parts: Sequence[Part]) -> list[str]:
    """Say what lies page-locked in host memory: optimizer state always, what sleeps while it sleeps."""
    count = ranks_per_node(config)
    awake = sum(part.heaviest.host for part in parts) * count
    models = [model for part in parts for model in part.heaviest.models.values()]
    asleep = sum(model.parameters + model.optimizer for model in models) * count if config.cluster.offload_train else 0
    if config.cluster.device != "cuda" or not (awake or asleep):
        return []
    said = [f"{awake / GIB:.1f} GiB of optimizer state"] if awake else []
    said += [f"{asleep / GIB:.1f} GiB of what sleeps"] if asleep else []
    each = f"{count} rank{'s' if count > 1 else ''}" + (" of each part" if len(parts) > 1 else "")
    return [f"Host memory, page-locked, of the {each} of a node: {' and '.join(said)}"]


def _played(config: Config, played: Mapping[int, Forecast]) -> list[str]:
    """Say what the schedule comes to with the costs of recorded runs, by the number of engines."""
    if not played:
        return []
    lines = ["Forecast, from what the runs of --like recorded:"]
    for engines, one in played.items():
        named = f"{engines} engine{'s' if engines > 1 else ''}"
        named += "" if engines == config.cluster.num_engines else " instead"
        lines.append(
            f"  {named}: {one.tokens_per_sec:,.0f} tokens/s, "
            f"{one.round_s:.2f} s a round, {one.staleness:.2f} versions stale; at work: trainers "
            f"{one.trainers_busy:.0%}, engines {one.engines_busy:.0%}"
        )
    return lines


def _speed(config: Config, parts: Sequence[Part], figures: Estimate, *, is_played: bool) -> list[str]:
    cluster, num_trainers = config.cluster, sum(rank.count for part in parts for rank in part.ranks)
    assumed = f"{TFLOPS:g} TFLOP/s a rank assumed" if figures.is_trainer_assumed else "--trainer-tflops"
    rate = f"{UPDATE_GB_PER_S:g} GB/s assumed" if figures.is_update_assumed else "--update-gb-per-sec"
    gpus = cluster.rollout_num_gpus_per_engine
    shared = ", which are those of the policy's ranks" if cluster.colocate else ""
    lines = [f"{num_trainers} trainer ranks, {cluster.num_engines} engine(s) of {gpus} GPU(s){shared}"]
    estimates = []
    if not (is_played and figures.is_trainer_assumed):  # a forecast has what was measured
        estimates.append(f"  trainer: {figures.trainer_tokens_per_sec:,.0f} response tokens/s ({assumed})")
    if not (is_played and figures.is_update_assumed):
        moved = (
            f"{figures.update_secs:.1f} s for {figures.update_gb:.1f} GB by {config.weights.update_weight_transport}"
        )
        estimates.append(f"  weight update: {moved} ({rate})")
    if figures.engine_tokens_per_sec is not None:
        estimates.append(
            f"  engines: {figures.engine_tokens_per_sec:,.0f} tokens/s; {figures.engines_for_balance:.1f} engine(s) "
            "feed these trainers"
        )
    elif not is_played:
        estimates.append("  engines: say --engine-tokens-per-sec, or --like RUN, for their balance with the trainers")
    return [*lines, "Estimates:", *estimates] if estimates else lines
