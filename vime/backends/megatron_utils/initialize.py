"""Make this process a trainer rank: device, process groups, seeds. `MegatronBackend` calls these in order.

1. `prepare_process`  device layer and fusion switches; before any megatron model module is imported
2. `initialize_distributed`  torch.distributed, then megatron's parallel groups; collective over all ranks
3. `shut_down`  the reverse
"""

from __future__ import annotations

import datetime
import os
import random
import warnings

import numpy
import torch
import torch.distributed as dist

from vime.backends.megatron_utils import cpu_device
from vime.config.cluster import ClusterConfig, ParallelConfig
from vime.types import ConfigError, RankInfo, RankPlace
from vime.utils.imports import without, without_collector
from vime.weights.rendezvous import meet_trainer_ranks

NOT_USED = ("wandb", "tensorboard")
"""Megatron imports them where they are installed, for loops of its own: 0.9 of a CPU rank's 2.4 CPU s of imports."""


def prepare_process(device: str) -> list[str]:
    """Choose the device of this process. Returns the names that the CPU device layer redirected (none on CUDA).

    `device` is the resolved --device. A CPU run on a machine that shows a GPU is refused here: megatron-core would put
    its tensors on the GPU whatever we say.
    """
    if device == "cuda":
        # With one queue of kernels, collectives that megatron starts first run first, beside what they are meant to.
        # In the ranks alone: engines of the same job would lose by it. CUDA reads it once, so before CUDA is asked.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    has_cuda = torch.cuda.is_available()
    if device == "cuda" and not has_cuda:
        raise ConfigError("--device cuda: torch sees no CUDA device in the trainer process. Use --device cpu.")
    if device == "cpu" and has_cuda:
        raise ConfigError(
            "--device cpu: torch sees a CUDA device in the trainer process, and megatron-core would use it. "
            'Hide it: CUDA_VISIBLE_DEVICES="" in the environment of the trainer ranks.'
        )
    if not has_cuda:
        # megatron says at each import that it falls back to torch: on the CPU that is what we want
        warnings.filterwarnings(
            "ignore", message=r"(?s).*(Transformer Engine|Apex).*not installed", category=UserWarning
        )
        with without(*NOT_USED), without_collector():
            from megatron.core import jit

        # megatron's fused element-wise functions go through torch.compile, which needs a C++ compiler on the CPU and
        # gains nothing there; `model.transformer_config` turns off the callers that were decorated at import.
        jit.disable_jit_fuser()
    return cpu_device.install()


def cut_world(
    parallel: ParallelConfig, *, create_gloo_process_groups: bool, distributed_timeout_minutes: float = 30
) -> None:
    """Make megatron's process groups of the world that this process is in: a rank of a run, or of a dry run."""
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        parallel.tensor_model_parallel_size,
        parallel.pipeline_model_parallel_size,
        parallel.virtual_pipeline_model_parallel_size,
        context_parallel_size=parallel.context_parallel_size,
        expert_model_parallel_size=parallel.expert_model_parallel_size,
        expert_tensor_parallel_size=parallel.expert_tensor_parallel_size,
        distributed_timeout_minutes=distributed_timeout_minutes,
        create_gloo_process_groups=create_gloo_process_groups,
    )


def initialize_distributed(rank: RankInfo, *, cluster: ClusterConfig, parallel: ParallelConfig, seed: int) -> None:
    """Process groups with deadlines, and seeds. Collective: every trainer rank calls it once."""
    from megatron.core import parallel_state, tensor_parallel

    on_cuda = torch.cuda.is_available()
    if on_cuda:
        torch.cuda.set_device(rank.local_rank)
    meet_trainer_ranks(rank, cluster)
    cut_world(
        parallel,
        distributed_timeout_minutes=cluster.distributed_timeout_minutes,  # a timedelta is made of it
        create_gloo_process_groups=on_cuda,  # extra groups for checkpoints; on the CPU every group is gloo already
    )
    # Pipeline stages draw different numbers, as in Megatron-LM; the tracker distinguishes tensor-parallel ranks.
    stage_seed = seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(stage_seed)
    numpy.random.seed(stage_seed % 2**32)
    torch.manual_seed(stage_seed)
    tensor_parallel.model_parallel_cuda_manual_seed(stage_seed)


def replica_group(timeout_minutes: float) -> dist.ProcessGroup:
    """The TP x PP x CP ranks that work on the same rows as this one. Collective over all trainer ranks.

    megatron's own model-parallel group leaves the context-parallel peers out.
    """
    from megatron.core import parallel_state

    if parallel_state.get_context_parallel_world_size() == 1:
        whole: dist.ProcessGroup = parallel_state.get_model_parallel_group()
        return whole
    indices: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(indices, parallel_state.get_data_parallel_rank())
    group: dist.ProcessGroup
    group, _ = dist.new_subgroups_by_enumeration(
        [[rank for rank, index in enumerate(indices) if index == replica] for replica in sorted(set(indices))],
        timeout=datetime.timedelta(minutes=timeout_minutes),
    )
    return group


def rank_place(replica: dist.ProcessGroup) -> RankPlace:
    """Where this rank stands. The first rank of a replica (its first tensor and context rank of the first stage) is its
    source; of the last stage, whose ranks hold the same whole log-probabilities, the first speaks."""
    from megatron.core import parallel_state

    is_last_stage = parallel_state.is_pipeline_last_stage()
    is_first_of_stage = (
        parallel_state.get_tensor_model_parallel_rank() == parallel_state.get_context_parallel_rank() == 0
    )
    return RankPlace(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        dp_rank=parallel_state.get_data_parallel_rank(),
        dp_size=parallel_state.get_data_parallel_world_size(),
        source_rank=dist.get_process_group_ranks(replica)[0],
        holds_tokens=is_last_stage,
        speaks=is_last_stage and is_first_of_stage,
    )


def checkpoint_group(timeout_minutes: float) -> dist.ProcessGroup:
    """All trainer ranks once more, for the threads that write checkpoints beside the training. Collective over them."""
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=datetime.timedelta(minutes=timeout_minutes))
    return group


def shut_down() -> None:
    """Leave the process groups. Not a collective: a rank may leave after a peer died."""
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
