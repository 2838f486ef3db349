"""Which Hugging Face layers of a model get an adapter under megatron-core, and what is refused. Without torch: a run is
checked by it before any process starts."""

from __future__ import annotations

from vime.backends.megatron_utils.architecture import Architecture
from vime.backends.megatron_utils.hf_tensors import expected_tensors
from vime.config.cluster import ParallelConfig
from vime.config.lora import LINEAR_LAYERS, LoraConfig
from vime.types import ConfigError

EXPERTS = ".mlp.experts."
BY_HEADS = ("q_proj", "k_proj", "v_proj")


def adapted_layers(architecture: Architecture, lora: LoraConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape [outputs, inputs] of each layer that gets an adapter by name, in the order of the files."""
    return {
        name: shape for name, shape in _linear_layers(architecture).items() if _last(name) in lora.lora_target_modules
    }


def check_adapter(lora: LoraConfig, parallel: ParallelConfig, architecture: Architecture, where: str) -> None:
    """Refuse what megatron-core trains no adapter for. `where`: the flag and name of the model."""
    if architecture.latent is not None:
        raise ConfigError(
            f"--lora-rank {lora.lora_rank}: {where} has latent attention (model_type {architecture.model_type}), "
            "beside whose layers no adapter is trained. Expected another family, or --lora-rank 0."
        )
    if architecture.has_sinks:
        raise ConfigError(
            f"--lora-rank {lora.lora_rank}: {where} has attention sinks and stacked experts (model_type "
            f"{architecture.model_type}), beside whose layers no adapter is trained. Expected another family, or "
            "--lora-rank 0."
        )
    there = {_last(name) for name in _linear_layers(architecture)}
    missing = [name for name in lora.lora_target_modules if name not in there]
    if missing:
        raise ConfigError(
            f"--lora-target-modules {' '.join(missing)}: {where} has such layers as experts only, which have no "
            f"adapter. Give --lora-target-modules {' '.join(name for name in LINEAR_LAYERS if name in there)}."
        )
    if parallel.transformer_impl != "local":
        raise ConfigError(
            f"--lora-rank {lora.lora_rank} with --transformer-impl {parallel.transformer_impl}: it hides what "
            "goes into its linear layers. Expected --transformer-impl local, or --train-backend fsdp."
        )
    ranks, heads = parallel.tensor_model_parallel_size, architecture.num_key_value_heads
    by_heads = [name for name in BY_HEADS if name in lora.lora_target_modules]
    if ranks > heads and by_heads:
        raise ConfigError(
            f"--tensor-model-parallel-size {ranks} with --lora-target-modules {' '.join(by_heads)}: {where} has "
            f"{heads} key/value heads, and their adapter is not cut through a head. Expected at most {heads} ranks, "
            "or --train-backend fsdp."
        )


def _linear_layers(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """Return those of which every token sees all."""
    return {
        name.removesuffix(".weight"): shape
        for name, shape in expected_tensors(architecture).items()
        if name.endswith(".weight") and EXPERTS not in name and _last(name.removesuffix(".weight")) in LINEAR_LAYERS
    }


def _last(name: str) -> str:
    return name.rpartition(".")[2]
