"""What a rank holds of a model that is cut over all ranks, without making it."""

from __future__ import annotations

from vime.backends.fsdp_utils.attention import NAME
from vime.backends.fsdp_utils.hf_config import read_config
from vime.backends.fsdp_utils.model import bare_model
from vime.backends.memory import ModelBytes
from vime.types import EngineSpec

FP32 = 4


def shard_bytes(spec: EngineSpec, *, world_size: int) -> ModelBytes:
    """Return the bytes between two steps: every tensor is cut along its first dimension, the first rank's piece being
    the largest; fp32 parameters, gradients and two moments. A pass also holds whole layers and activations, which are
    not counted here."""
    model = bare_model(spec, read_config(spec.checkpoint, flag=spec.flag), implementation=NAME)
    count = sum(-(-len(part) // world_size) * (part.numel() // len(part)) for part in model.parameters())
    return ModelBytes(
        num_parameters=count,
        parameters=FP32 * count,
        gradients=FP32 * count * spec.is_trainable,
        optimizer=2 * FP32 * count * spec.is_trainable,
    )
