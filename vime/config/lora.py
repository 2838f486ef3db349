"""Section of the adapter: what is trained instead of the whole model."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TypedDict

from vime.config.flags import flag
from vime.types import ConfigError

LINEAR_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The linear layers of a decoder layer, by the names of Hugging Face files."""
ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of vLLM 0.32's --max-lora-rank."""


class AdapterInfo(TypedDict):
    """What engines and PEFT's adapter_config.json are told of an adapter."""

    rank: int
    alpha: float
    target_modules: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters (Hu et al. 2021, section 4.1): y = W x + alpha / rank * B A x, of which A and B are trained."""

    lora_rank: int = flag(0, "rank of the adapter that is trained instead of the model; 0: train the model", minimum=0)
    lora_alpha: float = flag(32.0, "the adapter's output is multiplied by this / --lora-rank", minimum=0)
    lora_target_modules: tuple[str, ...] = flag(
        LINEAR_LAYERS, "linear layers that get an adapter, by the names of Hugging Face files", nargs="+"
    )
    lora_dropout: float = flag(
        0.0, "only 0: the engine samples without dropout, and the policy ratio needs one policy", minimum=0
    )
    lora_merge: bool = flag(
        False, "--save-hf writes the whole model with the adapter merged into it, not the adapter as PEFT's directory"
    )

    @property
    def trains_adapter(self) -> bool:
        return self.lora_rank > 0

    @property
    def lora_scale(self) -> float:
        """Factor of the adapter's output: alpha / rank."""
        return self.lora_alpha / self.lora_rank

    @property
    def described(self) -> AdapterInfo:
        """What an engine and PEFT's adapter_config.json say of the adapter."""
        modules = list(self.lora_target_modules)
        return {"rank": self.lora_rank, "alpha": self.lora_alpha, "target_modules": modules}


def check_lora(lora: LoraConfig) -> None:
    """Refuse what no adapter can be."""
    if not lora.trains_adapter:
        return
    if lora.lora_rank > ADAPTER_RANKS[-1]:
        raise ConfigError(
            f"--lora-rank {lora.lora_rank}: vLLM has room for at most {ADAPTER_RANKS[-1]}. Take a smaller rank."
        )
    if lora.lora_alpha == 0:
        raise ConfigError("--lora-alpha 0: the adapter's output would be 0 for ever. Expected a number above 0.")
    if lora.lora_dropout:
        raise ConfigError(
            f"--lora-dropout {lora.lora_dropout}: expected 0. The engine samples without dropout, and the policy ratio "
            "compares the same policy. Remove it."
        )
    unknown = sorted(set(lora.lora_target_modules) - set(LINEAR_LAYERS))
    if unknown or not lora.lora_target_modules:
        raise ConfigError(
            f"--lora-target-modules {' '.join(unknown)}: unknown. Expected some of {', '.join(LINEAR_LAYERS)}."
        )
    twice = sorted(name for name, count in Counter(lora.lora_target_modules).items() if count > 1)
    if twice:
        raise ConfigError(f"--lora-target-modules {' '.join(twice)}: named twice. Name each layer once.")
