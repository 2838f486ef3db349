"""Low-rank adapters inside a Hugging Face model: which layers have one, how it begins, and its names in PEFT's files.

Own layers instead of PEFT's: the base keeps the names of its files, so its export and the twin that finds them stay as
they are, and the adapter's own names differ from PEFT's by `PREFIX` only.

R: rank of the adapter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from vime.backends.adapters import PREFIX, initial_factor, is_adapter, refuse_missing
from vime.backends.adapters import identity as identity  # for the engine, beside what is here
from vime.config.lora import LoraConfig
from vime.types import EngineSpec
from vime.weights.plan import TensorMeta


class LoraLinear(nn.Linear):
    """y = W x + b + scale * B A x (Hu et al. 2021, section 4.1)."""

    def __init__(self, base: nn.Linear, rank: int, scale: float) -> None:
        """Take weight and bias of `base`; A [R, in] and B [out, R] have no storage yet."""
        super().__init__(base.in_features, base.out_features, bias=False, device="meta", dtype=base.weight.dtype)
        self.weight, self.bias = base.weight, base.bias
        dtype = base.weight.dtype
        self.lora_A = nn.Linear(base.in_features, rank, bias=False, device="meta", dtype=dtype)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False, device="meta", dtype=dtype)
        self.scale, self.is_on = scale, True

    def forward(self, input: Tensor) -> Tensor:
        base = F.linear(input, self.weight, self.bias)
        return base + self.scale * self.lora_B(self.lora_A(input)) if self.is_on else base


def add_adapter(model: nn.Module, lora: LoraConfig, spec: EngineSpec) -> None:
    """Give the layers that --lora-target-modules names an adapter, and freeze everything else. Local; before the cut.

    A name that no layer has is a ConfigError: what it stands for would silently not be trained.
    """
    found = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] in lora.lora_target_modules
    ]
    there = {name.rpartition(".")[2] for name, _ in found}
    refuse_missing(lora.lora_target_modules, there, f"{spec.flag} {spec.checkpoint}")
    model.requires_grad_(False)
    for name, module in found:
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, LoraLinear(module, lora.lora_rank, lora.lora_scale))


def initial_adapter(model: nn.Module, seed: int) -> dict[str, Tensor]:
    """Return every A and B by name, as they begin."""
    return {
        name: initial_factor(name, parameter.shape, seed)
        for name, parameter in model.named_parameters()
        if is_adapter(name)
    }


def switch(model: nn.Module, *, is_on: bool) -> None:
    """Let the adapter count, or leave the plain base."""
    for module in model.modules():
        if isinstance(module, LoraLinear):
            module.is_on = is_on


def adapter_metadata(tensors: Mapping[str, Tensor]) -> list[TensorMeta]:
    """Return what `export_adapter` yields. Local."""
    return [
        TensorMeta(name=PREFIX + name, dtype="float32", shape=tuple(tensor.shape)) for name, tensor in tensors.items()
    ]


@torch.no_grad()
def export_adapter(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """(PEFT's name, whole tensor in fp32), one after the other. Collective over all ranks: each exhausts it."""
    for name, tensor in tensors.items():
        yield PREFIX + name, (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).float()
