"""Low-rank adapters inside a Hugging Face model: which layers have one, how it begins, and its names in PEFT's files.

Own layers instead of PEFT's: the base keeps the names of its files, so its export and the twin that finds them stay as
they are, and the adapter's own names differ from PEFT's by `PREFIX` only.

R: rank of the adapter.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from vime.config.lora import LoraConfig
from vime.types import ConfigError, EngineSpec
from vime.weights.plan import TensorMeta

PREFIX = "base_model.model."
FACTORS = ("lora_A", "lora_B")


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
    missing = [target for target in lora.lora_target_modules if target not in there]
    if missing:
        raise ConfigError(
            f"--lora-target-modules {' '.join(missing)}: {spec.flag} {spec.checkpoint} has no linear layer of this "
            f"name (experts are one tensor a layer). Give --lora-target-modules {' '.join(sorted(there)) or 'others'}, "
            "or another model."
        )
    model.requires_grad_(False)
    for name, module in found:
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, LoraLinear(module, lora.lora_rank, lora.lora_scale))


def is_adapter(name: str) -> bool:
    """Return whether the tensor of this name belongs to an adapter."""
    return name.rpartition(".")[0].endswith(FACTORS)


def initial_adapter(model: nn.Module, seed: int) -> dict[str, Tensor]:
    """Return every A and B by name as PEFT begins them: B = 0, A kaiming uniform with a = sqrt(5), which is uniform
    within 1 / sqrt(inputs). Each A is drawn by its name, so that no layout changes it."""
    adapter = {}
    for name, parameter in model.named_parameters():
        if not is_adapter(name):
            continue
        adapter[name] = torch.zeros(parameter.shape)
        if ".lora_A." in name:
            digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:4]))
            bound = 1 / math.sqrt(parameter.size(1))
            adapter[name].uniform_(-bound, bound, generator=generator)
    return adapter


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


def identity(lora: LoraConfig, checkpoint: str) -> dict[str, str]:
    """Return what an adapter belongs to, by the flag that says it; the base also by the content of its files. Reads all
    of them."""
    base = Path(checkpoint).expanduser()
    content = hashlib.sha256()
    for path in sorted(base.glob("*.safetensors")):
        with path.open("rb") as file:
            content.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return {
        "--lora-rank": str(lora.lora_rank),
        "--lora-alpha": str(lora.lora_alpha),
        "--lora-target-modules": " ".join(sorted(lora.lora_target_modules)),
        "--hf-checkpoint": f"with the files sha256:{content.hexdigest()}",
    }
