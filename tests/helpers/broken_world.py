"""A tiny model, prompts and a command line that would run, for cases that break one thing of it (`broken_inputs.py`).

No torch: the weights are zeros, which nobody computes with.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from vime.backends.megatron_utils.architecture import read_architecture
from vime.backends.megatron_utils.hf_tensors import expected_tensors

CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789 +=?"
SHAPE: dict[str, Any] = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 32, "head_dim": 16,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 64,
    "max_position_embeddings": 64, "vocab_size": 48, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
    "transformers_version": "5.0.0", "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
}  # fmt: skip


@dataclass
class World:
    """A model, prompts and a command line that would run; a case breaks one thing."""

    root: Path
    environment: dict[str, str] = field(default_factory=dict)
    given: dict[str, str] = field(default_factory=dict)  # flags of the command line that would run

    @property
    def model(self) -> Path:
        return self.root / "model"

    @property
    def prompts(self) -> Path:
        return self.root / "train.jsonl"

    def make(self) -> World:
        self.write_model(self.model)
        self.write_tokenizer({character: number for number, character in enumerate(CHARACTERS)})
        self.records({"input": "1+1=", "label": "2"}, {"input": "2+2=", "label": "4"})
        self.given = {
            "--hf-checkpoint": str(self.model),
            "--prompt-data": str(self.prompts),
            "--label-key": "label",
            "--rm-type": "exact_match",
            "--device": "cpu",
            "--num-rollout": "1",
            "--rollout-batch-size": "2",
            "--n-samples-per-prompt": "2",
            "--rollout-max-response-len": "8",
        }
        return self

    def flags(self) -> list[str]:
        return [word for pair in self.given.items() for word in pair]

    def write_model(self, directory: Path, **changes: Any) -> Path:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps(SHAPE | changes))
        shapes = expected_tensors(read_architecture(str(directory)))
        weights = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
        save_file(weights, directory / "model.safetensors")
        return directory

    def config(self, **changes: Any) -> None:
        """Another config.json beside the same weights."""
        (self.model / "config.json").write_text(json.dumps(SHAPE | changes))

    def write_tokenizer(self, vocabulary: dict[str, int]) -> None:
        from tokenizers import Regex, Tokenizer, models, pre_tokenizers

        tokenizer = Tokenizer(models.WordLevel(vocabulary))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")  # type: ignore[assignment]
        tokenizer.save(str(self.model / "tokenizer.json"))

    def records(self, *records: Any) -> None:
        self.prompts.write_text("".join(json.dumps(record) + "\n" for record in records))

    def tensors(self, change: Callable[[dict[str, Any]], None]) -> None:
        """The weights with some of them changed."""
        shapes = expected_tensors(read_architecture(str(self.model)))
        weights: dict[str, Any] = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
        change(weights)
        save_file(weights, self.model / "model.safetensors")

    def plugin(self, code: str, name: str = "rm") -> str:
        file = self.root / "plugin.py"
        file.write_text(code)
        return f"{file}:{name}"


Break = Callable[[World], Sequence[str] | None]


@dataclass(frozen=True)
class Case:
    """`breaks` spoils the world and may return flags, which win over those before. `says`: what, got, expected and the
    next action, in the words of the answer; an empty one is part of another."""

    name: str
    breaks: Break
    says: tuple[str, ...]


CASES: dict[str, Case] = {}


def case(name: str, *says: str) -> Callable[[Break], Break]:
    def note(breaks: Break) -> Break:
        assert name not in CASES, name
        CASES[name] = Case(name, breaks, says)
        return breaks

    return note


def by_flags(name: str, flags: str, *says: str, without: str = "") -> None:
    """`without`: a flag that the command line would have."""

    def breaks(world: World) -> Sequence[str]:
        world.given.pop(without, None)
        return flags.split()

    case(name, *says)(breaks)
