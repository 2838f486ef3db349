"""What `--load` was given when it is no checkpoint of Vime: said by name, with what to do with it."""

from __future__ import annotations

from pathlib import Path

from vime.config.hf_config import has_weights
from vime.ray.checkpoint import LATEST
from vime.types import ConfigError
from vime.utils.manifest import MANIFEST

OF_MEGATRON = ("*.distcp", "common.pt", ".metadata", "mp_rank_*", "metadata.json")


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
    for directory in (load, *_named(load)):
        if not (directory / "run_state.json").is_file() and any(_holds(directory, name) for name in OF_MEGATRON):
            raise ConfigError(
                f"--load {load}: {directory.name} is a checkpoint of another trainer (Megatron, slime, verl): it has "
                "no run_state.json. Export it to Hugging Face weights with that trainer's own converter, and give them "
                "to --hf-checkpoint."
            )


def _named(load: Path) -> list[Path]:
    """The directories of rounds in `load`, that of the marker first."""
    marker = load / LATEST
    text = marker.read_text(errors="replace").strip() if marker.is_file() else ""
    names = [f"iter_{int(text):07d}"] if text.isdigit() else [text] if text == "release" else []
    return [load / name for name in names] + sorted(path for path in load.glob("iter_*") if path.is_dir())


def _holds(directory: Path, pattern: str) -> bool:
    return any(directory.glob(pattern))
