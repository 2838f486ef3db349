"""A round trained at once and the same round in early batches, as cases for `megatron_worker.run`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from tests.helpers import reference_policy as reference
from tests.helpers.engine_contract import SETTINGS, exported
from tests.helpers.megatron_models import make_plan, make_rows
from tests.helpers.megatron_worker import TOTAL_STEPS, Bench, Case
from vime.batching.plan import join_plans
from vime.data.rows import TrainRow
from vime.training.early import BegunRound
from vime.training.mismatch import Judge, LogprobMismatch
from vime.training.worker import TrainWorker

PORTIONS = ((0, 4), (4, 6), (6, 8))  # rows, unequally many; their trainable tokens differ more
RECIPES: dict[str, dict[str, Any]] = {
    "token mean": {"calculate_per_token_loss": True, "use_kl_loss": True, "kl_loss_coef": 0.1, "entropy_coef": 0.01},
    "sample mean": {"advantage_estimator": "rloo", "use_opd": True, "opd_kl_coef": 0.5, "use_kl_loss": True},
}
WAYS = ("at once", "in early batches", "refused first")


def early(bench: Bench) -> dict[str, Any]:
    """Two rounds in each way: metrics of both, and the weights after them."""
    config, backend = bench.backend()
    rows = [
        dataclasses.replace(row, extra={"teacher_log_probs": [-1.0 - (at % 5) for at in range(row.response_length)]})
        for row in make_rows()
    ]
    answer: dict[str, Any] = {}
    for way in WAYS:
        worker = TrainWorker(config, backend, total_steps=TOTAL_STEPS)
        metrics = [
            one_round(BegunRound(config, worker, number), worker, rows, way, dp_size=backend.place.dp_size)
            for number in range(2)
        ]
        answer[way] = {"metrics": metrics, "weights": exported(worker.actor)}
    backend.close()
    return answer


def one_round(
    begun: BegunRound, worker: TrainWorker, rows: list[TrainRow], way: str, *, dp_size: int
) -> dict[str, float]:
    parts = [rows[first:last] for first, last in PORTIONS]
    plans = [make_plan(part, dp_size=dp_size, num_micro_batches=1) for part in parts]
    if way == "at once":
        return worker.train_round(join_plans(plans), dict(enumerate(rows)))
    for part, plan in zip(parts[:-1], plans[:-1], strict=True):
        begun.begin(plan, dict(enumerate(part)))
    last = (plans[-1], dict(enumerate(parts[-1])))
    if way == "in early batches":
        return begun.finish(*last, Judge(version=0))
    try:
        begun.finish(*last, Judge(version=0, threshold=1e-6))  # recorded log-probabilities are made up
    except LogprobMismatch:
        return worker.train_round(*begun.joined())
    raise AssertionError("no mismatch was found")


def is_for_the_night(setting: str, recipe: str) -> bool:
    """The means differ in their denominators, which are summed over replicas: both are tried with one and with two."""
    return recipe == "sample mean" and setting not in ("megatron", "megatron-dp2-distributed")


def early_cases(models: Path, *, is_night: bool) -> list[Case]:
    flags = {
        "hf_checkpoint": str(models / "qwen2"), "ref_load": str(models / "reference"),
        "rollout_temperature": reference.TEMPERATURE, "transfer_queue_extra_data_fields": ("teacher_log_probs",),
    }  # fmt: skip
    return [
        Case(
            name=f"{setting}-early-{recipe}",
            do="tests.helpers.early_cases:early",
            world=world,
            flags={**flags, **layout, **RECIPES[recipe]},
        )
        for setting, (world, layout) in SETTINGS.items()
        for recipe in RECIPES
        if is_night or not is_for_the_night(setting, recipe)
    ]
