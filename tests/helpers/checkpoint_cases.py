"""Checkpoints of small models as the trainer ranks write and load them, as cases for `megatron_worker.run`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.helpers.engine_contract import SETTINGS, exported
from tests.helpers.megatron_models import make_plan, make_rows
from tests.helpers.megatron_worker import Bench, Case
from vime.training.saved_files import hash_files
from vime.utils.manifest import Entry


def written(bench: Bench, directory: Path) -> dict[str, Entry]:
    """A checkpoint after one round; size and hash of each file that this rank wrote."""
    trainer, rows = bench.trainer(), dict(enumerate(make_rows()))
    trainer.train_round(make_plan(list(rows.values()), dp_size=trainer.place.dp_size), rows)
    saves = trainer.save(directory, in_background=True)
    for pending in saves:
        pending.wait(60)
    entries = hash_files(directory, trainer.engines, saves, rank=bench.ranks.rank)
    trainer.backend.close()
    return entries


def switched(bench: Bench, directory: Path, then: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint that a trainer with the flags `then` loads: what it said, and its weights before and after beside
    those that were saved."""
    trainer, rows = bench.trainer(), dict(enumerate(make_rows()))
    plan = make_plan(list(rows.values()), dp_size=trainer.place.dp_size)
    trainer.train_round(plan, rows)
    trainer.save(directory)
    saved = exported(trainer.actor)
    trainer.backend.close()
    trainer = bench.trainer(**then)
    answer: dict[str, Any] = {"saved": saved, "before": exported(trainer.actor), "said": ""}
    try:
        trainer.load(directory)
    except Exception as error:  # also a bare KeyError, which is what the test is about
        answer["said"] = f"{type(error).__name__}: {error}"
    answer["after"] = exported(trainer.actor)
    if not answer["said"]:
        trainer.train_round(plan, rows)
    trainer.backend.close()
    return answer


DISTRIBUTED, PLAIN = {"use_distributed_optimizer": True}, {"use_distributed_optimizer": False}
BF16, FP32 = {"bf16": True}, {"bf16": False}
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "--use-distributed-optimizer off": (DISTRIBUTED, PLAIN),
    "--use-distributed-optimizer on": (PLAIN, DISTRIBUTED),
    "--use-distributed-optimizer off under bf16": ({**DISTRIBUTED, **BF16}, PLAIN),
    "--use-distributed-optimizer on under bf16": (BF16, DISTRIBUTED),
    "--bf16 off": (BF16, FP32),
    "--bf16 on": (FP32, BF16),
}
"""Name, which begins with the flag -> the flags that wrote and those that load."""
WEIGHTS_ONLY = {"no_save_optim": True}
LOADED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "distributed, bf16 off": ({**DISTRIBUTED, **BF16}, FP32),
    "distributed, bf16 on": (DISTRIBUTED, BF16),
    "weights only, distributed off": ({**DISTRIBUTED, **WEIGHTS_ONLY}, PLAIN),
    "weights only, bf16 off": ({**BF16, **WEIGHTS_ONLY}, FP32),
    "weights only, bf16 on": (WEIGHTS_ONLY, BF16),
    "fsdp, bf16 off": ({"train_backend": "fsdp", **BF16}, FP32),
    "fsdp, bf16 on": ({"train_backend": "fsdp"}, BF16),
}


def switch_cases(models: Path, work: Path) -> list[Case]:
    return [
        Case(
            name=name,
            do="tests.helpers.checkpoint_cases:switched",
            world=2,
            flags={"hf_checkpoint": str(models / "qwen2"), **first},
            arguments={"directory": work / name.replace(" ", "_"), "then": second},
        )
        for name, (first, second) in {**REFUSED, **LOADED}.items()
    ]


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
