"""What the train backends share about low-rank adapters: names, how one begins, and what a checkpoint of one belongs
to."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from vime.config.lora import LoraConfig
from vime.types import CheckpointError, ConfigError

PREFIX = "base_model.model."
"""Before the names of PEFT's files."""
FACTORS = ("lora_A", "lora_B")


def is_adapter(name: str) -> bool:
    """Return whether the tensor of this name belongs to an adapter."""
    return name.rpartition(".")[0].endswith(FACTORS)


def initial_factor(name: str, shape: Sequence[int], seed: int) -> Tensor:
    """Return A or B, whole, as PEFT begins them: B = 0, A kaiming uniform with a = sqrt(5), which is uniform within
    1 / sqrt(inputs). Each A is drawn by its name, so that no layout and no backend changes it."""
    factor = torch.zeros(tuple(shape))
    if ".lora_A." in name:
        digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:4]))
        bound = 1 / math.sqrt(shape[1])
        factor.uniform_(-bound, bound, generator=generator)
    return factor


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


def refuse_other_kind(directory: Path, *, is_written: bool, is_trained: bool) -> None:
    """Refuse an adapter where a whole model is trained, and the reverse."""
    if is_written == is_trained:
        return
    raise CheckpointError(
        f"--load {directory}: holds {'an adapter' if is_written else 'a whole model'}, this run trains "
        f"{'an adapter' if is_trained else 'the whole model'}. Give --lora-rank as it was, or another --load."
    )


def refuse_other_adapter(directory: Path, written: Mapping[str, object], mine: Mapping[str, object]) -> None:
    """Refuse an adapter of another `identity`."""
    for flag, value in mine.items():
        if written[flag] != value:
            raise CheckpointError(
                f"--load {directory}: its adapter was trained {flag} {written[flag]}, this run is {flag} {value}. "
                "Nothing was loaded. Give the flag as it was, or start a new run."
            )


def refuse_missing(targets: Sequence[str], there: Collection[str], where: str) -> None:
    """Refuse names of --lora-target-modules that no layer has: what they stand for would silently not be trained.
    `there`: the names of `where`, a model, that could have an adapter."""
    missing = [target for target in targets if target not in there]
    if missing:
        raise ConfigError(
            f"--lora-target-modules {' '.join(missing)}: {where} has no linear layer of this name (experts have no "
            f"adapter). Give --lora-target-modules {' '.join(sorted(there)) or 'others'}, or another model."
        )
