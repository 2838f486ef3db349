"""What a checkpoint says about the run that wrote it, and why another run cannot continue from it.

This is reported before anything starts; otherwise the trainer ranks would find out one by one. `run_state.json` has
these facts under `written_with`; older checkpoints have none, and then the ranks do find out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TypedDict

from vime.config.hf_config import read_model_shape
from vime.config.lora import AdapterInfo
from vime.config.parse import Config
from vime.training.roles import LEARNING, needed_roles
from vime.types import ConfigError, Role

EXPORT = "start from its --save-hf export (--hf-checkpoint)"
MERGED = f"{EXPORT}, made with --lora-merge"
SIZES = {
    "model_type", "num_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "intermediate_size", "num_experts", "moe_intermediate_size", "vocab_size",
}  # fmt: skip
"""The settings of a model that decide the shapes of its tensors."""


class Facts(TypedDict, total=False):
    """What is written down. A key may be missing in what another version wrote."""

    train_backend: str
    bf16: bool
    use_distributed_optimizer: bool
    has_optimizer: bool
    roles: list[str]
    model: dict[str, object]
    adapter: AdapterInfo | None


def facts_of(config: Config) -> Facts:
    """Return the facts that `refuse_other_run` needs about the run that writes a checkpoint."""
    try:
        shape = asdict(read_model_shape(config.model.hf_checkpoint))
    except ConfigError:  # the model's directory was removed since the start: no reason to lose a checkpoint
        shape = {}
    return {
        "train_backend": config.cluster.train_backend,
        "bf16": bool(config.parallel.bf16),
        "use_distributed_optimizer": bool(config.parallel.use_distributed_optimizer),
        "has_optimizer": not config.model.no_save_optim,
        "roles": [str(role) for role in needed_roles(config) if role in LEARNING],
        "model": {name: value for name, value in shape.items() if name in SIZES},
        "adapter": config.lora.described if config.lora.trains_adapter else None,
    }


def refuse_other_run(checkpoint: Path, written: Facts | None, config: Config) -> None:
    """Raise ConfigError with every reason why this run cannot load the checkpoint."""
    reasons = list(_reasons(written, facts_of(config))) if written else []
    if reasons:
        raise ConfigError(f"--load {checkpoint}: does not fit this run. " + " ".join(reasons))


def _reasons(written: Facts, mine: Facts) -> Iterator[str]:
    was, now = written.get("train_backend"), mine["train_backend"]
    if was != now:
        yield (
            f"It was written with --train-backend {was}, this run has {now}, and neither reads the other's "
            f"checkpoints: use the backend it was written with, or {EXPORT}."
        )
    elif now == "megatron" and written.get("has_optimizer"):
        yield from _optimizer_reasons(written, mine)
    if "adapter" in written:
        yield from _adapter_reasons(written["adapter"], mine["adapter"])
    its, ours = written.get("model") or {}, mine["model"]
    other = [
        f"{name} {its[name]}, not {ours[name]}" for name in sorted(its.keys() & ours.keys()) if its[name] != ours[name]
    ]
    if other:
        yield (
            f"It is of another model than --hf-checkpoint: {'; '.join(other)}. Give the model it was trained from as "
            "--hf-checkpoint, or load a checkpoint of this one."
        )
    if Role.CRITIC in mine["roles"] and Role.CRITIC not in written.get("roles", []):
        yield (
            "It holds no critic, which this --advantage-estimator needs: load a checkpoint that was written with one, "
            f"or {EXPORT}."
        )


def _adapter_reasons(its: AdapterInfo | None, ours: AdapterInfo | None) -> Iterator[str]:
    if its is None or ours is None:
        if ours is not None:
            yield f"It holds a whole model, and this run trains an adapter: remove --lora-rank, or {EXPORT}."
        if its is not None:
            yield (
                f"It holds an adapter, and this run trains the whole model: give --lora-rank {its['rank']}, "
                f"or {MERGED}."
            )
        return
    was, now = _by_flag(its), _by_flag(ours)
    other = [f"{flag} {was[flag]}, not {now[flag]}" for flag in was if was[flag] != now[flag]]
    if other:
        yield f"Its adapter was trained with {'; '.join(other)}: give the flags as they were, or {MERGED}."


def _by_flag(adapter: AdapterInfo) -> dict[str, object]:
    targets = " ".join(sorted(adapter["target_modules"]))
    return {"--lora-rank": adapter["rank"], "--lora-alpha": adapter["alpha"], "--lora-target-modules": targets}


def _optimizer_reasons(written: Facts, mine: Facts) -> Iterator[str]:
    """megatron-core stores moments and main weights in another form for each of these; only its distributed optimizer
    keeps main weights in fp32 with and without --bf16."""
    was, now = written.get("use_distributed_optimizer"), mine["use_distributed_optimizer"]
    if was != now:
        yield (
            f"Its optimizer state was written {_with(was)} --use-distributed-optimizer, this run is "
            f"{_with(now)} it: give the flag as it was, or {EXPORT}."
        )
    elif not now and written.get("bf16") != mine["bf16"]:
        yield (
            f"Its optimizer state was written {_with(written.get('bf16'))} --bf16, this run is "
            f"{_with(mine['bf16'])} it, and only --use-distributed-optimizer can change that: give the flag as it was, "
            f"or {EXPORT}."
        )


def _with(flag: object) -> str:
    return "with" if flag else "without"
