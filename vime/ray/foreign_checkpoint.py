"""Recognise what `--load` was given when it is not a checkpoint of Vime, and say what to do with it."""

from __future__ import annotations

from pathlib import Path

from vime.config.hf_config import has_weights
from vime.config.model_files import foreign_round
from vime.types import ConfigError
from vime.utils.manifest import MANIFEST


def refuse_foreign(load: Path) -> None:
    """Raise ConfigError for a Hugging Face model and for a checkpoint of Megatron, slime or plain torch."""
    if not load.is_dir():
        if load.is_file():
            raise ConfigError(f"--load {load}: is a file. Expected a directory of checkpoints or one of them.")
        return
    if (load / "config.json").is_file() and has_weights(str(load)):
        raise ConfigError(
            f"--load {load}: is a Hugging Face model, not a checkpoint of a run: it has no optimizer state and no "
            "place in the data. To start from its weights give it to --hf-checkpoint, and leave --load out."
        )
    if (load / MANIFEST).is_file() and not (load / "run_state.json").is_file():
        raise ConfigError(
            f"--load {load}: is a checkpoint without its run_state.json, which {MANIFEST} names. Expected every file "
            "of it; copy it again from where it came from."
        )
    if (foreign := foreign_round(load)) is not None:
        raise ConfigError(
            f"--load {load}: {foreign.name} is a checkpoint of another trainer (Megatron, slime, verl): it has no "
            "run_state.json. Export it to Hugging Face weights with that trainer's own converter, and give them to "
            "--hf-checkpoint."
        )
