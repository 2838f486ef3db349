"""Training state on disk through torch.distributed.checkpoint: model, optimizer, schedule, random states.

Of a model with an adapter only the adapter is stored, with what it belongs to (`lora.identity`). Tensors are stored
whole by name, so another number of ranks, or another kind of device, may load what one saved (random states are then
left as seeded, because they belong to ranks and their generators). Data cursor, versions and the atomic rename belong
to the caller.
"""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import NotRequired, TypedDict, cast

import numpy
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from vime.backends.adapters import refuse_other_adapter, refuse_other_kind
from vime.backends.fsdp_utils.hf_weights import adapter_tensors, distinct_tensors
from vime.backends.fsdp_utils.optimizer import ShardOptimizer
from vime.types import CheckpointError, describe, is_machine_fault

logger = logging.getLogger(__name__)
FORMAT = "fsdp 2"
ADAPTER_FORMAT = "fsdp adapter 1"
ADAPTER_OF = {FORMAT: False, ADAPTER_FORMAT: True}
"""Whether a checkpoint of this format holds an adapter."""
EXPECTED = "a complete checkpoint of this model by --train-backend fsdp"
FAILURES = (OSError, CheckpointException, KeyError, ValueError, RuntimeError, EOFError)


class RandomState(TypedDict):
    """Of one rank's generators."""

    python: tuple[object, ...]
    numpy: dict[str, object] | tuple[str, NDArray[numpy.uint32], int, int, float]
    torch: Tensor
    cuda: NotRequired[Tensor]


class State(TypedDict):
    """The contents of one checkpoint."""

    common: NotRequired[dict[str, object]]
    model: dict[str, Tensor]
    optimizer: NotRequired[dict[str, Tensor | int]]
    random: NotRequired[dict[str, RandomState]]  # by rank


def save(
    directory: Path,
    model: nn.Module,
    optimizer: ShardOptimizer,
    *,
    with_optimizer: bool,
    adapter: dict[str, str] | None = None,
) -> None:
    """Write DIRECTORY, which must be new or empty; complete on return. `adapter`: the identity of the adapter, which is
    then all that is written of the model. Collective over all ranks."""
    common = {"format": FORMAT if adapter is None else ADAPTER_FORMAT, "with_optimizer": with_optimizer, **_layout()}
    state: State = {"common": {**common, **(adapter or {})}, "model": _stored(model)}
    if with_optimizer:
        state["optimizer"] = optimizer.state_dict()
        state["random"] = {str(dist.get_rank()): _random_state()}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        dcp.save(cast("dict[str, object]", state), checkpoint_id=directory)
    except (torch.OutOfMemoryError, dist.DistError):
        raise  # of this machine or a lost peer: they say nothing about the checkpoint
    except FAILURES as error:
        if is_machine_fault(error):
            raise
        raise CheckpointError.unwritable(directory, describe(error)) from error


def load(
    directory: Path, model: nn.Module, optimizer: ShardOptimizer, *, adapter: dict[str, str] | None = None
) -> None:
    """Read DIRECTORY into model, optimizer, schedule and random states. Collective over all ranks.

    A checkpoint written with --no-save-optim restores the weights only: moments start at zero, the schedule at step 0.
    """
    rank, layout = str(dist.get_rank()), _layout()
    try:
        written = _read_common(directory, "format")["format"]
        if written in ADAPTER_OF:
            refuse_other_kind(directory, is_written=ADAPTER_OF[str(written)], is_trained=adapter is not None)
        else:
            raise CheckpointError(
                f"--load {directory}: format {written!r}, expected {FORMAT!r}: another program wrote it. Point --load "
                "to a checkpoint of this one."
            )
        common = _read_common(directory, "with_optimizer", *layout, *(adapter or {}))
        refuse_other_adapter(directory, common, adapter or {})
        state: State = {"model": _stored(model)}
        same_layout = all(common[name] == value for name, value in layout.items())
        has_random = common["with_optimizer"] and same_layout
        if common["with_optimizer"]:
            state["optimizer"] = optimizer.state_dict()
        if has_random:
            state["random"] = {rank: _random_state()}
        dcp.load(cast("dict[str, object]", state), checkpoint_id=directory)
    except (torch.OutOfMemoryError, dist.DistError):
        raise  # of this machine or a lost peer: they say nothing about the checkpoint
    except FAILURES as error:
        raise CheckpointError.unreadable(directory, error, expected=EXPECTED) from error
    if not common["with_optimizer"]:
        logger.warning("%s holds no optimizer state (--no-save-optim): moments and schedule start anew", directory)
        return
    optimizer.adopt(int(state["optimizer"]["num_steps"]))
    if has_random:
        _set_random_state(state["random"][rank])
    else:
        found = {name: common[name] for name in layout}
        logger.warning("%s was written by %s, this run is %s: random states stay as seeded", directory, found, layout)


def _stored(model: nn.Module) -> dict[str, Tensor]:
    return adapter_tensors(model) or distinct_tensors(model)


def _layout() -> dict[str, object]:
    """Return what random states depend on: the ranks and the kind of device."""
    return {"ranks": dist.get_world_size(), "device": "cuda" if torch.cuda.is_available() else "cpu"}


def _read_common(directory: Path, *names: str) -> dict[str, object]:
    """Return those entries of `common`. Collective over all ranks."""
    head: dict[str, dict[str, object]] = {"common": dict.fromkeys(names)}
    dcp.load(head, checkpoint_id=directory)
    return head["common"]


def _random_state() -> RandomState:
    state: RandomState = {
        "python": random.getstate(),
        "numpy": numpy.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    return {**state, "cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else state


def _set_random_state(state: RandomState) -> None:
    random.setstate(state["python"])
    numpy.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
