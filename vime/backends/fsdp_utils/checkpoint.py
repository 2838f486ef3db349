"""Training state on disk through torch.distributed.checkpoint: model, optimizer, schedule, random states.

Tensors are stored whole by name, so another number of ranks may load what one number saved (random states are then left
as seeded, because they belong to ranks). Data cursor, versions and the atomic rename belong to the caller.
"""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from vime.backends.fsdp_utils.hf_weights import distinct_tensors
from vime.backends.fsdp_utils.optimizer import ShardOptimizer
from vime.types import CheckpointError

logger = logging.getLogger(__name__)
FORMAT = "fsdp 1"
FAILURES = (OSError, CheckpointException, KeyError, ValueError, RuntimeError, EOFError)


def save(directory: Path, model: nn.Module, optimizer: ShardOptimizer, *, with_optimizer: bool) -> None:
    """Write DIRECTORY, which must be new or empty; complete on return. Collective over all ranks."""
    common = {"format": FORMAT, "with_optimizer": with_optimizer, "ranks": dist.get_world_size()}
    state: dict[str, Any] = {"common": common, "model": distinct_tensors(model)}
    if with_optimizer:
        state["optimizer"] = optimizer.state_dict()
        state["random"] = {str(dist.get_rank()): _random_state()}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        dcp.save(state, checkpoint_id=directory)
    except FAILURES as error:
        raise CheckpointError(
            f"the checkpoint {directory} could not be written: {_reason(error)}. Check free space and permissions; the "
            "previous checkpoint is untouched."
        ) from error


def load(directory: Path, model: nn.Module, optimizer: ShardOptimizer) -> None:
    """Read DIRECTORY into model, optimizer, schedule and random states. Collective over all ranks.

    A checkpoint written with --no-save-optim restores the weights only: moments start at zero, the schedule at step 0.
    """
    rank, ranks = str(dist.get_rank()), dist.get_world_size()
    try:
        head: dict[str, Any] = {"common": {"format": None, "with_optimizer": None, "ranks": None}}
        dcp.load(head, checkpoint_id=directory)
        common = head["common"]
        state: dict[str, Any] = {"model": distinct_tensors(model)}
        has_random = common["with_optimizer"] and common["ranks"] == ranks
        if common["with_optimizer"]:
            state["optimizer"] = optimizer.state_dict()
        if has_random:
            state["random"] = {rank: _random_state()}
        dcp.load(state, checkpoint_id=directory)
    except FAILURES as error:
        raise CheckpointError(
            f"--load {directory}: cannot be read: {_reason(error)}. Expected a complete checkpoint of this model by "
            "--train-backend fsdp; point --load to one, or remove it to start from --hf-checkpoint."
        ) from error
    if not common["with_optimizer"]:
        logger.warning("%s holds no optimizer state (--no-save-optim): moments and schedule start anew", directory)
        return
    optimizer.adopt(state["optimizer"]["num_steps"])
    if has_random:
        _set_random_state(state["random"][rank])
    else:
        written = common["ranks"]
        logger.warning("%s was written by %d ranks, not %d: random states stay as seeded", directory, written, ranks)


def _reason(error: BaseException) -> str:
    """One short line of what went wrong; torch gathers the errors of all ranks with their tracebacks."""
    if isinstance(error, CheckpointException):
        rank, (cause, _) = next(iter(error.failures.items()))
        return f"rank {rank}: {_reason(cause)}"
    return f"{type(error).__name__} {error}".replace("\n", " ")[:300]


def _random_state() -> dict[str, Any]:
    state = {"python": random.getstate(), "numpy": numpy.random.get_state(), "torch": torch.get_rng_state()}
    return {**state, "cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else state


def _set_random_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    numpy.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
