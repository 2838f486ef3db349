"""Checkpoints of small models as the trainer ranks write and load them, as cases for `megatron_worker.run`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.helpers.engine_contract import SETTINGS
from tests.helpers.megatron_models import make_plan, make_rows
from tests.helpers.megatron_worker import Bench, Case
from vime.training.saved_files import hash_files
from vime.utils.manifest import Entry


def written(bench: Bench, directory: Path) -> dict[str, Entry]:
    """A checkpoint after one round; size and hash of each file that this rank wrote."""
    trainer, rows = bench.trainer(), dict(enumerate(make_rows()))
    trainer.train_round(make_plan(list(rows.values()), dp_size=trainer.place.dp_size), rows)
    for pending in trainer.save(directory, in_background=True):
        pending.wait(60)
    entries = hash_files(directory, trainer.engines, rank=bench.ranks.rank)
    trainer.backend.close()
    return entries


def damage_cases(models: Path, work: Path) -> list[Case]:
    """Every setting of the contract, each with a critic."""
    ppo: dict[str, Any] = {"advantage_estimator": "ppo", "critic_load": str(models / "critic")}
    model = {"hf_checkpoint": str(models / "qwen2"), "ref_load": str(models / "qwen2")}
    return [
        Case(
            name=f"{setting}-written",
            do="tests.helpers.checkpoint_cases:written",
            world=world,
            flags={**model, **ppo, **flags},
            arguments={"directory": work / setting},
        )
        for setting, (world, flags) in SETTINGS.items()
    ]
