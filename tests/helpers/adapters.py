"""Adapters of tiny models: random numbers, and the model with them merged in."""

from __future__ import annotations

import copy

import torch

from vime.config.lora import AdapterInfo


def make_adapter(model: torch.nn.Module, seed: int, info: AdapterInfo) -> dict[str, torch.Tensor]:
    """Random numbers under the names of PEFT, large enough to change every answer."""
    chance, found = torch.Generator().manual_seed(seed), {}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in info["target_modules"]:
            rows, columns = module.weight.shape
            for half, shape in (("A", (info["rank"], columns)), ("B", (rows, info["rank"]))):
                found[f"base_model.model.{name}.lora_{half}.weight"] = 0.2 * torch.randn(shape, generator=chance)
    return found


def merged(model: torch.nn.Module, adapter: dict[str, torch.Tensor], info: AdapterInfo) -> torch.nn.Module:
    whole = copy.deepcopy(model)
    with torch.no_grad():
        for name, module in whole.named_modules():
            if name.rpartition(".")[2] in info["target_modules"]:
                a, b = (adapter[f"base_model.model.{name}.lora_{half}.weight"] for half in "AB")
                module.weight += info["alpha"] / info["rank"] * b @ a
    return whole
