"""Each recipe of `reference_algorithms` in each layout, and the stale rows that they train on."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from tests.helpers import reference_policy as reference
from tests.helpers.megatron_models import make_plan, make_rows
from tests.helpers.megatron_worker import Bench, Case, exported
from tests.helpers.reference_algorithms import RECIPES
from vime.config.algo_checks import resolve_algo
from vime.config.parse import Config
from vime.data.rows import TrainRow
from vime.types import Role, RoundPlan, VersionSpan

ROUND = 3
LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "single": (1, {}, {}),
    "one-pack": (1, {}, {"num_micro_batches": 1}),
    "dp2": (2, {}, {}),
    "tp2": (2, {"tensor_model_parallel_size": 2}, {}),
    "pp2": (2, {"pipeline_model_parallel_size": 2}, {"num_micro_batches": 3}),
    "cp2": (2, {"context_parallel_size": 2}, {}),
}
IN_EVERY_LAYOUT = ("three-passes", "gspo", "ppo")


def is_for_the_night(recipe: str, layout: str) -> bool:
    """How logits and layers are cut is not a recipe's business: three recipes, one with a critic, show that. How a
    replica's samples and a sequence's tokens are summed is: each recipe is tried on two ranks of either."""
    return layout in ("tp2", "pp2") and recipe not in IN_EVERY_LAYOUT


def stale_rows() -> list[TrainRow]:
    """Rows of 0 to 3 versions behind round 3; row 0 began under version 1 and ended under 3."""
    rows = make_rows()
    spans = [(VersionSpan(ROUND - index % 4, 0, row.response_length),) for index, row in enumerate(rows)]
    spans[0] = (VersionSpan(1, 0, 2), VersionSpan(ROUND, 2, rows[0].response_length))
    return [
        dataclasses.replace(
            row,
            rollout_id=ROUND,
            token_policy_versions=span,
            extra={"teacher_log_probs": [-1.0 - (index % 5) for index in range(row.response_length)]},
        )
        for row, span in zip(rows, spans, strict=True)
    ]


def stale_plan(rows: list[TrainRow], *, dp_size: int, **plan: Any) -> RoundPlan:
    """Two optimizer steps, so that the policy leaves the proximal one."""
    return dataclasses.replace(make_plan(rows, dp_size=dp_size, num_steps=2, **plan), rollout_id=ROUND)


def algorithm(bench: Bench, **plan: Any) -> dict[str, Any]:
    """Metrics of one round and the weights after it."""
    trainer = bench.trainer()
    rows = stale_rows()
    metrics = trainer.train_round(stale_plan(rows, dp_size=trainer.place.dp_size, **plan), dict(enumerate(rows)))
    answer = {"metrics": metrics, "weights": exported(trainer)}
    if Role.CRITIC in trainer.engines:
        answer["critic"] = exported(trainer, Role.CRITIC)
    trainer.backend.close()
    return answer


def algorithm_cases(models: Path, *, is_night: bool) -> list[Case]:
    common = {
        "hf_checkpoint": str(models / "qwen2"),
        "ref_load": str(models / "reference"),
        "rollout_temperature": reference.TEMPERATURE,
        "lr_decay_style": "cosine",
        "min_lr": reference.FINAL_LR,
        "weight_decay": reference.WEIGHT_DECAY,
    }
    cases = []
    for name, recipe in RECIPES.items():
        algo = resolve_algo(Config().replace(**recipe).algo, max_staleness=0)
        if "critic_load" in recipe:
            algo["critic_load"] = str(models / recipe["critic_load"])
        cases += [
            Case(
                name=f"{name}-{layout}",
                do="tests.helpers.algorithm_cases:algorithm",
                world=world,
                flags={**common, **recipe, **algo, **flags},
                arguments=plan,
            )
            for layout, (world, flags, plan) in LAYOUTS.items()
            if is_night or not is_for_the_night(name, layout)
        ]
    return cases
