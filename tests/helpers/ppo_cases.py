"""What a critic does over several rounds: warm-up alone, more layouts, checkpoints."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from tests.helpers.megatron_cases import DISTRIBUTED, EP2, OVERLAP, PP2, SP2, TP2, VPP2
from tests.helpers.megatron_models import make_plan, make_rows
from tests.helpers.megatron_worker import Bench, Case, exported
from vime.training.export import weights_hash
from vime.types import Role

WARM_UP = 3
"""Layouts beyond those in which every recipe runs."""
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2-sequence": (2, SP2),
    "vpp2": (2, VPP2),
    "dp2-overlap": (2, OVERLAP),  # parameters are gathered late: the critic too must finish its round
    "bf16": (1, {"bf16": True}),
}


def rounds(bench: Bench, count: int) -> dict[str, Any]:
    """Metrics of each round from round 0 on, the policy's hash and the values of row 0 before the first and after each,
    and the critic's weights after the last."""
    trainer = bench.trainer()
    rows = dict(enumerate(make_rows()))
    metrics, hashes, values = [], [weights_hash(trainer.actor)], []
    for number in range(count):
        plan = make_plan(list(rows.values()), dp_size=trainer.place.dp_size, num_steps=2)
        plan = dataclasses.replace(plan, rollout_id=number)
        values.append(trainer.compute_values(plan, rows).get(0))
        metrics.append(trainer.train_round(plan, rows))
        hashes.append(weights_hash(trainer.actor))
    critic = exported(trainer, Role.CRITIC)
    trainer.backend.close()
    return {"metrics": metrics, "hashes": hashes, "values": values, "critic": critic}


def ppo_cases(models: Path, work: Path) -> list[Case]:
    flags = {
        "hf_checkpoint": str(models / "qwen2"),
        "critic_load": str(models / "critic"),
        "advantage_estimator": "ppo",
        "normalize_advantages": True,
        "lambd": 0.9,
        "critic_lr": 2e-3,
    }
    moe = {**flags, "hf_checkpoint": str(models / "qwen3_moe"), "critic_load": None}
    own_schedule = {"lr_decay_style": "linear", "lr_warmup_iters": 1, "critic_lr_warmup_iters": 2}

    def case(name: str, do: str, world: int = 1, more: dict[str, Any] | None = None, **arguments: Any) -> Case:
        return Case(name=f"critic-{name}", do=do, world=world, flags={**flags, **(more or {})}, arguments=arguments)

    mine, resumed = "tests.helpers.ppo_cases:rounds", "resumed"
    no_critic = {"advantage_estimator": "grpo", "critic_load": None, "critic_lr": None}
    alone = {"num_critic_only_steps": WARM_UP, **own_schedule}
    return [
        case("single", mine, count=2),
        *(case(name, mine, world, layout, count=2) for name, (world, layout) in LAYOUTS.items()),
        case("moe-single", mine, 1, moe, count=2),
        case("moe-ep2", mine, 2, {**moe, **EP2}, count=2),
        case("alone", mine, more=alone, count=WARM_UP + 1),
        case(
            "resume-dp2-distributed",
            resumed,
            2,
            {**DISTRIBUTED, **own_schedule},
            directory=work / "critic-dp2",
            in_background=True,
        ),
        case("resume-tp2-as-pp2", resumed, 2, TP2, directory=work / "critic-tp2", then={**PP2, **_without(TP2)}),
        case("missing", "failed_load", more=no_critic, directory=work / "no-critic", advantage_estimator="ppo"),
    ]


def _without(flags: dict[str, Any]) -> dict[str, Any]:
    return dict.fromkeys(flags, 1)
