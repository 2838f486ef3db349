"""The parallel layout of the trainer: derive what was left empty, refuse what cannot divide the ranks or the model."""

from __future__ import annotations

import operator
from functools import partial

from vime.config.cluster import ClusterConfig, ParallelConfig
from vime.config.flags import flag_name, knobs
from vime.config.hf_config import ModelShape
from vime.config.parse import Config
from vime.config.problems import Problems
from vime.types import ConfigError

FSDP_KNOBS = ("bf16", "recompute_granularity", "use_distributed_optimizer")
"""The knobs of `ParallelConfig` that --train-backend fsdp reads; the last is always on there."""


def virtual_pipeline_size(parallel: ParallelConfig, num_layers: int) -> int | None:
    """Model chunks of one stage, from either of the two flags; None for a plain pipeline."""
    chunks, per_chunk = parallel.virtual_pipeline_model_parallel_size, parallel.num_layers_per_virtual_pipeline_stage
    if per_chunk is None:
        return chunks
    stages = parallel.pipeline_model_parallel_size
    derived, rest = divmod(num_layers, stages * per_chunk)
    if rest or derived < 2:
        raise ConfigError(
            f"--num-layers-per-virtual-pipeline-stage {per_chunk} on {stages} stages cannot cut the model's "
            f"{num_layers} layers into at least 2 equal chunks a stage. Choose another number of layers."
        )
    if chunks is not None and chunks != derived:
        raise ConfigError(
            f"--virtual-pipeline-model-parallel-size {chunks} contradicts --num-layers-per-virtual-pipeline-stage "
            f"{per_chunk}, which means {derived}. Give one of the two."
        )
    return derived


def check_layout(config: Config, shape: ModelShape) -> None:
    """Check the layout. Called after the empty knobs were derived."""
    parallel, batch = config.parallel, config.batch
    world = config.cluster.actor_num_nodes * (config.cluster.actor_num_gpus_per_node or 1)
    problems = Problems()
    if config.cluster.train_backend == "fsdp":
        _check_fsdp(parallel)
    else:
        _check_said(shape)
        for one in (
            partial(_check_ranks, parallel, shape, world),
            partial(_check_nodes, parallel, config.cluster),
            partial(check_model_layout, parallel, shape),
            partial(_check_switches, parallel),
        ):
            with problems.gathering():
                one()
        problems.raise_all()
    dp, samples = world // parallel.ranks_per_replica, batch.global_batch_size or 1
    if samples % dp:
        raise ConfigError(
            f"--global-batch-size {samples} cannot be divided over {dp} data-parallel ranks. Use a multiple of {dp}."
        )
    if batch.use_dynamic_batch_size and batch.max_tokens_per_gpu is None:
        raise ConfigError("--use-dynamic-batch-size needs --max-tokens-per-gpu TOKENS. Add it.")


def _check_fsdp(parallel: ParallelConfig) -> None:
    """Refuse layout flags with fsdp, which only cuts parameters, gradients and optimizer state over all ranks."""
    idle = idle_under_fsdp(parallel)
    if idle:
        raise ConfigError(
            f"{', '.join(idle)} with --train-backend fsdp: no effect. Every rank trains on rows of its own and holds a "
            f"part of each tensor. Remove {'it' if len(idle) == 1 else 'them'}, or use --train-backend megatron."
        )
    if parallel.recompute_granularity == "selective":
        raise ConfigError(
            "--recompute-granularity selective with --train-backend fsdp: only full is there, which recomputes each "
            "decoder layer. Use full, or --train-backend megatron."
        )


def idle_under_fsdp(parallel: ParallelConfig) -> list[str]:
    """Return the flags that were given and that --train-backend fsdp does not read, with their values."""
    defaults, idle = ParallelConfig(), []
    for _, spec in knobs(ParallelConfig):
        got, default = operator.attrgetter(spec.name)(parallel), operator.attrgetter(spec.name)(defaults)
        is_one = spec.name == "expert_tensor_parallel_size" and got == 1
        if spec.name not in FSDP_KNOBS and not is_one and (got or None) != (default or None):
            idle.append(f"{flag_name(spec)} {got}")
    return idle


def _check_said(shape: ModelShape) -> None:
    if shape.unsaid:
        raise ConfigError(
            f"--hf-checkpoint: config.json of model_type {shape.model_type} does not say {', '.join(shape.unsaid)}, by "
            "which --train-backend megatron cuts the model. Add them, or use --train-backend fsdp."
        )


def _check_ranks(parallel: ParallelConfig, shape: ModelShape, world: int) -> None:
    if world % parallel.ranks_per_replica:
        raise ConfigError(
            f"{world} trainer ranks (--actor-num-nodes x --actor-num-gpus-per-node) cannot be divided into "
            f"--tensor-model-parallel-size {parallel.tensor_model_parallel_size} x --pipeline-model-parallel-size "
            f"{parallel.pipeline_model_parallel_size} x --context-parallel-size {parallel.context_parallel_size}. "
            f"Use a multiple of {parallel.ranks_per_replica}."
        )
    etp = parallel.expert_tensor_parallel_size or parallel.tensor_model_parallel_size
    whole = etp * parallel.expert_model_parallel_size * parallel.pipeline_model_parallel_size
    if shape.num_experts and world % whole:
        raise ConfigError(
            f"{world} trainer ranks cannot be divided into --expert-tensor-parallel-size {etp} x "
            f"--expert-model-parallel-size {parallel.expert_model_parallel_size} x --pipeline-model-parallel-size "
            f"{parallel.pipeline_model_parallel_size}. Use a multiple of {whole}."
        )


def _check_nodes(parallel: ParallelConfig, cluster: ClusterConfig) -> None:
    """Refuse tensor parallelism of which one group would be cut by the end of a node. Groups of whole nodes are asked
    for by their size."""
    tp, per_node = parallel.tensor_model_parallel_size, cluster.actor_num_gpus_per_node or 1
    if cluster.actor_num_nodes > 1 and per_node % tp and tp % per_node:
        raise ConfigError(
            f"--tensor-model-parallel-size {tp} on nodes of {per_node} ranks (--actor-num-gpus-per-node): a group "
            "would lie on two nodes, between which everything is slower. Choose a divisor of the ranks of a node, or a "
            "multiple for groups of whole nodes."
        )


def check_model_layout(parallel: ParallelConfig, shape: ModelShape) -> None:
    """Check that Megatron can cut this model so: the policy before a run begins, and every model again when it is
    built."""
    problems = Problems()
    for one in (_check_divisors, _check_experts):
        with problems.gathering():
            one(parallel, shape)
    problems.raise_all()


def _check_divisors(parallel: ParallelConfig, shape: ModelShape) -> None:
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    for name, value in (
        ("num_attention_heads", shape.num_attention_heads),
        ("intermediate_size", shape.intermediate_size),
    ):
        if value % tp:
            raise ConfigError(
                f"--tensor-model-parallel-size {tp} does not divide the model's {name} {value}. Choose a divisor."
            )
    if max(tp, shape.num_key_value_heads) % min(tp, shape.num_key_value_heads):
        raise ConfigError(
            f"--tensor-model-parallel-size {tp} and the model's num_key_value_heads {shape.num_key_value_heads}: one "
            "must divide the other."
        )
    if shape.num_layers % pp:
        raise ConfigError(
            f"--pipeline-model-parallel-size {pp} does not divide the model's {shape.num_layers} layers. Choose "
            "a divisor."
        )
    chunks = parallel.virtual_pipeline_model_parallel_size
    if chunks is not None and pp == 1:
        raise ConfigError(
            "an interleaved pipeline needs --pipeline-model-parallel-size > 1. Raise it, or remove "
            "--virtual-pipeline-model-parallel-size."
        )
    if chunks is not None and shape.num_layers % (pp * chunks):
        raise ConfigError(
            f"--pipeline-model-parallel-size {pp} x --virtual-pipeline-model-parallel-size {chunks} does not divide "
            f"the model's {shape.num_layers} layers. Choose a divisor."
        )


def _check_experts(parallel: ParallelConfig, shape: ModelShape) -> None:
    ep, tp = parallel.expert_model_parallel_size, parallel.tensor_model_parallel_size
    if not shape.num_experts:
        if ep > 1 or (parallel.expert_tensor_parallel_size or 1) > 1:
            raise ConfigError(
                "--expert-model-parallel-size and --expert-tensor-parallel-size are for a model with experts; "
                f"model_type {shape.model_type} has none. Remove them."
            )
        return
    etp = parallel.expert_tensor_parallel_size or tp
    if shape.num_experts % ep:
        raise ConfigError(
            f"--expert-model-parallel-size {ep} does not divide the model's {shape.num_experts} experts. "
            "Choose a divisor."
        )
    if shape.moe_intermediate_size % etp:
        raise ConfigError(
            f"--expert-tensor-parallel-size {etp} does not divide the model's moe_intermediate_size "
            f"{shape.moe_intermediate_size}. Choose a divisor."
        )
    if ep == 1 and etp != tp:
        raise ConfigError(
            f"--expert-tensor-parallel-size {etp} with --tensor-model-parallel-size {tp} and without expert "
            "parallelism: megatron-core sums the gradients of experts over the wrong ranks then. Use equal sizes, or "
            "--expert-model-parallel-size above 1."
        )
    if tp > 1 and not parallel.sequence_parallel:
        raise ConfigError(
            "a model with experts and --tensor-model-parallel-size > 1 needs --sequence-parallel, or each "
            "tensor-parallel rank would route the same tokens. Add the flag."
        )


def _check_switches(parallel: ParallelConfig) -> None:
    if parallel.recompute_granularity == "full" and not (parallel.recompute_method and parallel.recompute_num_layers):
        raise ConfigError("--recompute-granularity full needs --recompute-method and --recompute-num-layers. Add them.")
    if parallel.overlap_param_gather and not (parallel.use_distributed_optimizer and parallel.overlap_grad_reduce):
        raise ConfigError(
            "--overlap-param-gather needs --use-distributed-optimizer and --overlap-grad-reduce. Add them or remove it."
        )
