"""Training state on disk through megatron's distributed checkpoint (torch_dist): model, optimizer, schedule, RNG.

The file layout does not depend on TP, PP, CP or DP: a checkpoint may be loaded in another layout or on another kind of
device (random states are then left as seeded, because they belong to ranks and their generators). Only the cut of
experts (EP, expert-TP) must stay, because of the optimizer. Data cursor, versions and the atomic rename belong to the
caller.

Repairs of megatron-core 0.16.1 with torch's AdamW (no Transformer Engine, no Apex) are marked REPAIR below. Each is
needed wherever these packages are missing, and harmless elsewhere.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypedDict, cast

import numpy
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from vime.backends.adapters import refuse_other_adapter, refuse_other_kind
from vime.backends.megatron_utils.checkpoint_writer import PendingSave, PlannedStrategy
from vime.backends.megatron_utils.lora import Adapter
from vime.backends.megatron_utils.optimizer import PolicyOptimizer
from vime.types import CheckpointError, describe, is_machine_fault

logger = logging.getLogger(__name__)
FORMAT = 1
EXPECTED = "a complete checkpoint of this model by --train-backend megatron"
State = dict[str | int, object]
"""Of an optimizer, or of several by number or name, as megatron nests them."""
TORCH_ADAM = (torch.optim.AdamW, torch.optim.Adam)  # "step" beside the moments of each parameter, not in its group


class RandomState(TypedDict):
    """Of one rank's generators."""

    python: tuple[object, ...]
    numpy: dict[str, object] | tuple[str, NDArray[numpy.uint32], int, int, float]
    torch: Tensor
    device: Tensor
    tracker: dict[str, Tensor]


def save(
    directory: Path,
    core: list[GPTModel],
    optimizer: PolicyOptimizer,
    *,
    adapter: Adapter | None = None,
    with_optimizer: bool,
    group: dist.ProcessGroup,
    in_background: bool,
) -> PendingSave:
    """Write DIRECTORY, which must be new or empty. Collective over all trainer ranks; `group` holds them all too. Of a
    model with an `adapter` only that is written.

    In the background: this returns when the state is copied, so later training does not change it, and
    `PendingSave.wait` waits until it is written. Otherwise it is written when this returns.
    """
    strategy = PlannedStrategy()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        # REPAIR: the queue of megatron's writer processes, which are not started here; without it megatron would start
        # a multiprocessing.Manager, which imports the main module again.
        if filesystem_async._results_queue is None:  # noqa: SLF001  megatron has no other way to give it one
            filesystem_async._results_queue = queue.Queue()  # noqa: SLF001
        state = _state(
            core, optimizer, adapter, with_optimizer=with_optimizer, with_rng=with_optimizer, is_loading=False
        )
        dist_checkpointing.save(state, str(directory), strategy, async_sharded_save=True, content_metadata=_metadata())
    except (torch.OutOfMemoryError, dist.DistError):
        raise  # of this machine or a lost peer: they say nothing about the checkpoint
    except (OSError, CheckpointingException, CheckpointException, KeyError, RuntimeError) as error:  # torch: disk full
        if is_machine_fault(error):
            raise
        raise CheckpointError.unwritable(directory, describe(error)) from error
    pending = PendingSave(directory, strategy, group)
    if in_background:
        pending.copy()
        pending.start()
    else:
        pending.run()
        pending.wait(0)
    return pending


@torch.no_grad()
def load(directory: Path, core: list[GPTModel], optimizer: PolicyOptimizer, *, adapter: Adapter | None = None) -> None:
    """Read DIRECTORY into model, optimizer, schedule and random states. Collective over all trainer ranks.

    A checkpoint written with --no-save-optim restores the weights only: moments start at zero, the schedule at step 0.
    """
    try:
        common = dist_checkpointing.load_common_state_dict(str(directory))
        if common.get("format") != FORMAT:
            raise CheckpointError(
                f"--load {directory}: format {common.get('format')!r}, expected {FORMAT}: another program wrote it. "
                "Point --load to a checkpoint of this one."
            )
        written = common.get("adapter")
        refuse_other_kind(directory, is_written=written is not None, is_trained=adapter is not None)
        if adapter is not None:
            refuse_other_adapter(directory, written, adapter.identity())
        with_optimizer = common["with_optimizer"]
        same_layout = common["layout"] == _layout()
        if adapter is None:  # which has no state of experts
            _refuse_other_experts(common["layout"], directory, with_optimizer=with_optimizer)
        if with_optimizer:
            _refuse_other_optimizer(directory, optimizer)
        state = _state(
            core,
            optimizer,
            adapter,
            with_optimizer=with_optimizer,
            with_rng=with_optimizer and same_layout,
            is_loading=True,
        )
        loaded = dist_checkpointing.load(state, str(directory))
    except (torch.OutOfMemoryError, dist.DistError):
        raise  # of this machine or a lost peer: they say nothing about the checkpoint
    except (OSError, CheckpointingException, CheckpointException, KeyError, ValueError, RuntimeError) as error:
        raise CheckpointError.unreadable(directory, error, expected=EXPECTED) from error
    if adapter is not None:
        adapter.load_state(loaded["model0"])
    else:
        for index, chunk in enumerate(core):
            chunk.load_state_dict(loaded[f"model{index}"], strict=True)
    if not with_optimizer:
        logger.warning("%s holds no optimizer state (--no-save-optim): moments and schedule start anew", directory)
        optimizer.megatron.reload_model_params()
        return
    _load_optimizer(optimizer, loaded["optimizer"])
    optimizer.scheduler.load_state_dict(loaded["scheduler"])
    optimizer.adopt_flags()
    if same_layout:
        _set_rng_state(loaded["rng"])
    else:
        logger.warning(
            "%s was written as %s, this run is %s: random states stay as seeded", directory, common["layout"], _layout()
        )


def _metadata() -> dict[str, object]:
    """REPAIR: a new dict for each call, because megatron stores a live process group in it.

    `fully_reshardable`: the only format of the distributed optimizer that resumes exactly without Transformer Engine.
    """
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }


def _layout() -> dict[str, object]:
    """Return what random states depend on: the layout of the ranks, and the kind of device."""
    return {
        "device": "cuda" if torch.cuda.is_available() else "cpu",
        "tensor": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline": parallel_state.get_pipeline_model_parallel_world_size(),
        "virtual_pipeline": parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1,
        "context": parallel_state.get_context_parallel_world_size(),
        **_expert_layout(),
        "data": parallel_state.get_data_parallel_world_size(),
    }


def _expert_layout() -> dict[str, int]:
    return {
        "expert": parallel_state.get_expert_model_parallel_world_size(),
        "expert_tensor": parallel_state.get_expert_tensor_parallel_world_size() or 1,
    }


def _refuse_other_experts(layout: Mapping[str, object], directory: Path, *, with_optimizer: bool) -> None:
    """Refuse another expert layout: megatron-core 0.16.1 keys optimizer state by expert rank."""
    mine = _expert_layout()
    saved = {name: layout.get(name, 1) for name in mine}
    for name, flag in (("expert", "--expert-model-parallel-size"), ("expert_tensor", "--expert-tensor-parallel-size")):
        if with_optimizer and (mine["expert"], saved["expert"]) != (1, 1) and saved[name] != mine[name]:
            raise CheckpointError(
                f"--load {directory}: was written with {flag} {saved[name]}, this run has {mine[name]}: the state "
                "of experts in the optimizer cannot be cut anew. Use the flag it was written with, or start from its "
                "--save-hf export."
            )


def _refuse_other_optimizer(directory: Path, optimizer: PolicyOptimizer) -> None:
    """Refuse the state of megatron-core's other optimizer, recognised by its tensors: neither reads the other's, and a
    failure in the middle of loading would leave weights of neither run."""
    names = dist_checkpointing.load_tensors_metadata(str(directory)).keys()
    was_distributed = any(name.startswith("optimizer.state.param.") for name in names)
    was_bf16 = any(name.startswith("optimizer.state.fp32_param.") for name in names)
    settings = optimizer.parts[0].config
    for flag, was, now in (
        ("--use-distributed-optimizer", was_distributed, settings.use_distributed_optimizer),
        ("--bf16", was_bf16, settings.bf16 and not settings.use_distributed_optimizer),
    ):
        if was != now:
            raise CheckpointError(
                f"--load {directory}: its optimizer state was written {'with' if was else 'without'} {flag}, this run "
                f"is {'with' if now else 'without'} it. Nothing was loaded. Give the flag as it was, or start from its "
                "--save-hf export (--hf-checkpoint)."
            )


def _state(
    core: list[GPTModel],
    optimizer: PolicyOptimizer,
    adapter: Adapter | None,
    *,
    with_optimizer: bool,
    with_rng: bool,
    is_loading: bool,
) -> dict[str, object]:
    """Return what is written, or the template that is filled when loading."""
    if adapter is None:
        models = {f"model{index}": chunk.sharded_state_dict(metadata=_metadata()) for index, chunk in enumerate(core)}
    else:
        models = {"model0": adapter.sharded_state(), "adapter": adapter.identity()}
    state: dict[str, object] = {**models, "format": FORMAT, "with_optimizer": with_optimizer, "layout": _layout()}
    if with_optimizer:
        prepare_states(optimizer)
        # for one chunk megatron wants its state itself, for several a dict of them
        mould = models["model0"] if len(core) == 1 or adapter is not None else models
        with _without_padding(optimizer):
            state["optimizer"] = optimizer.megatron.sharded_state_dict(
                dict(mould), is_loading=is_loading, metadata=_metadata()
            )
        state["scheduler"] = optimizer.scheduler.state_dict()
    if with_rng:
        rank, world = dist.get_rank(), dist.get_world_size()
        state["rng"] = ShardedObject("rng", _rng_state(), (world,), (rank,), replica_id=0)
    return state


@contextlib.contextmanager
def _without_padding(optimizer: PolicyOptimizer) -> Iterator[None]:
    """REPAIR: megatron-core cuts the gathered state of the distributed optimizer by places that count the padding
    between buckets, and what it gathers has none: behind a padded bucket every main weight and moment would be saved
    shifted."""
    buffers = [buffer for part in optimizer.parts if isinstance(part, DistributedOptimizer) for buffer in part.buffers]
    padded = [buffer.param_index_map for buffer in buffers]
    for buffer in buffers:
        gaps, gap = [], 0
        for bucket in buffer.buckets:
            gaps.append(gap)
            gap += bucket.grad_data.numel() - bucket.numel_unpadded
        buffer.param_index_map = {
            parameter: (start - gaps[number], end - gaps[number], number)
            for parameter, (start, end, number) in buffer.param_index_map.items()
        }
    try:
        yield
    finally:
        for buffer, places in zip(buffers, padded, strict=True):
            buffer.param_index_map = places


def _load_optimizer(optimizer: PolicyOptimizer, state: State) -> None:
    for part in optimizer.parts:
        if isinstance(part, DistributedOptimizer):
            part._set_main_param_and_optimizer_states = _keeping_step(part)  # noqa: SLF001  see there
    several = len(optimizer.parts) > 1
    states = [cast("State", state[index]) for index in range(len(optimizer.parts))] if several else [state]
    for part, loaded in zip(optimizer.parts, states, strict=True):
        if isinstance(part.optimizer, TORCH_ADAM):
            _name_step_zero(loaded)
    optimizer.megatron.load_state_dict(state)
    for part in optimizer.parts:
        if isinstance(part.optimizer, TORCH_ADAM):
            for group in part.optimizer.param_groups:
                for parameter in filter(part.optimizer.state.__contains__, group["params"]):
                    # REPAIR: after loading all parameters share ONE step tensor; AdamW would advance it once for each.
                    entry = part.optimizer.state[parameter]
                    entry["step"] = _step_of(parameter, group, entry.get("step", torch.tensor(0.0)))


def _step_of(parameter: Tensor, group: Mapping[str, object], step: Tensor) -> Tensor:
    """Give each parameter its own step count, where torch looks for it: beside the parameter for a fused kernel, else
    on the host."""
    return step.detach().clone().to(parameter.device if group.get("fused") else "cpu")


def _name_step_zero(state: State) -> None:
    """REPAIR: megatron does not save a step of 0 and torch's AdamW then fails to find one. A policy whose critic warms
    up alone is at step 0 in the first checkpoints. Others have no such entry, and Transformer Engine's fails on one."""
    if isinstance(moments := state.get("state"), dict) and "param_groups" in state:
        moments.setdefault("common_step", torch.tensor(0.0))
        return
    for part in state.values():
        if isinstance(part, dict):
            _name_step_zero(part)


def _keeping_step(part: DistributedOptimizer) -> Callable[[torch.nn.Parameter, dict[str, Tensor]], None]:
    """REPAIR: megatron drops "step" from what it loads for a parameter and then looks it up. It was restored before:
    pass it through. Replaces the method of this one optimizer object."""
    original = type(part)._set_main_param_and_optimizer_states  # noqa: SLF001  megatron's fault is in there

    def set_states(parameter: torch.nn.Parameter, tensors: dict[str, Tensor]) -> None:
        group, order = part.model_param_group_index_map[parameter]
        state = part.optimizer.state[part.optimizer.param_groups[group]["params"][order]]
        if "step" in state and "step" not in tensors:
            tensors = {**tensors, "step": state["step"]}
        original(part, parameter, tensors)

    return set_states


def prepare_states(optimizer: PolicyOptimizer) -> None:
    """REPAIR: before the first step Adam has no moments. megatron then saves none and cannot load what it saved, and
    its distributed optimizer asserts that they are there. Zero moments at step 0 are what Adam would start from.

    megatron's own function for this forgets the step of torch's AdamW, so that is made here."""
    for part in optimizer.parts:
        if part.optimizer is None:  # no parameter of this kind on this rank
            continue
        if not isinstance(part.optimizer, TORCH_ADAM):
            part.init_state_fn(part.optimizer, part.config)
            continue
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                if not part.optimizer.state.get(parameter):
                    part.optimizer.state[parameter] = {
                        "step": _step_of(parameter, group, torch.tensor(0.0)),
                        "exp_avg": torch.zeros_like(parameter.data),
                        "exp_avg_sq": torch.zeros_like(parameter.data),
                    }


def _rng_state() -> RandomState:
    return {
        "python": random.getstate(),
        "numpy": numpy.random.get_state(),
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(),
        "tracker": get_cuda_rng_tracker().get_states(),
    }


def _set_rng_state(state: RandomState) -> None:
    random.setstate(state["python"])
    numpy.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(state["device"])
    get_cuda_rng_tracker().set_states(state["tracker"])
