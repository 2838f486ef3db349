"""Rounds of training whose roles share one worker or are split over several, as cases for `megatron_worker.run`."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.helpers import reference_policy as reference
from tests.helpers.engine_contract import SETTINGS, exported
from tests.helpers.megatron_models import make_plan, make_rows
from tests.helpers.megatron_worker import TOTAL_STEPS, Bench, Case
from vime.data.rows import TrainRow
from vime.training.columns import RETURN, ArrayColumns, Columns, from_arrays, to_arrays
from vime.training.export import weights_hash
from vime.training.roles import needed_roles
from vime.training.worker import TrainWorker
from vime.types import Role

ALGORITHM: dict[str, Any] = {
    "advantage_estimator": "rloo", "use_opd": True, "opd_kl_coef": 0.5,
    "use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "k3",
}  # fmt: skip
PPO: dict[str, Any] = {"advantage_estimator": "ppo", "kl_coef": 0.1, "lambd": 0.9, "critic_lr": 2e-4}
ROUNDS = 2


def rounds(bench: Bench, is_split: bool, naps: bool = False) -> dict[str, Any]:
    """Metrics and weights of two rounds of two steps. With `naps` every worker sleeps before each round."""
    config, backend = bench.backend()
    needed = needed_roles(config)
    policy, *others = [
        TrainWorker(config, backend, total_steps=TOTAL_STEPS, roles=roles)
        for roles in ([(role,) for role in needed] if is_split else [needed])
    ]
    rows = dict(enumerate(make_rows()))
    plan = make_plan(list(rows.values()), dp_size=backend.place.dp_size, num_steps=2)
    torch.manual_seed(5)
    random.seed(5)
    metrics = []
    for _ in range(ROUNDS):
        if naps:
            for worker in (policy, *others):
                worker.sleep()
                worker.wake_up()
        given = _moved({worker: worker.forward_columns(plan, rows) for worker in others}, rows)
        columns = policy.compute_columns(plan, rows, given)
        of_round = policy.update(plan, rows, columns)
        taught = _moved({policy: {name: columns[name] for name in (RETURN,) if name in columns}}, rows)
        for worker in others:
            if Role.CRITIC in worker.engines:
                of_round = {**worker.update(plan, rows, {**given, **taught}), **of_round}
        metrics.append(of_round)
    critics = [worker.engines[Role.CRITIC] for worker in (policy, *others) if Role.CRITIC in worker.engines]
    answer = {
        "metrics": metrics,
        "weights": [exported(engine) for engine in (policy.actor, *critics)],
        "hash": weights_hash(policy.actor) if policy.actor.takes_part_in_export else None,
        "draws": (random.random(), float(torch.rand(1))),
    }
    backend.close()
    return answer


def _moved(answers: dict[TrainWorker, Columns], rows: dict[int, TrainRow]) -> Columns:
    """What the driver does: the columns of the ranks that speak, put together and given to everyone."""
    merged: ArrayColumns = {}
    for worker, columns in answers.items():
        everyone: list[ArrayColumns] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, to_arrays(columns) if worker.place.speaks else {})
        for answer in everyone:
            for name, column in answer.items():
                merged.setdefault(name, {}).update(column)
    return from_arrays(merged, rows)


def is_for_the_night(setting: str, variant: str) -> bool:
    """`naps` is split too; where that fails, the night says whether it was the split or the sleep."""
    return variant == "split" and setting != "megatron"


def role_cases(models: Path, *, is_night: bool) -> list[Case]:
    """`models` holds `qwen2` (the policy), `reference` and `teacher`."""
    teacher = {"opd_teacher_load": str(models / "teacher")}
    common = {
        "hf_checkpoint": str(models / "qwen2"),
        "ref_load": str(models / "reference"),
        "rollout_temperature": reference.TEMPERATURE,
        "lr_decay_style": "cosine",
        "min_lr": reference.FINAL_LR,
        "weight_decay": reference.WEIGHT_DECAY,
    }
    variants: dict[str, dict[str, Any]] = {
        "shared": {"is_split": False},
        "split": {"is_split": True},
        "naps": {"is_split": True, "naps": True},
    }
    return [
        Case(
            name=f"{algorithm}-{setting}-{variant}",
            do="tests.helpers.role_cases:rounds",
            world=world,
            flags={**common, **chosen, **flags},
            arguments=arguments,
        )
        for algorithm, chosen in {"distilled": {**ALGORITHM, **teacher}, "ppo": PPO}.items()
        for setting, (world, flags) in SETTINGS.items()
        for variant, arguments in variants.items()
        if is_night or not is_for_the_night(setting, variant)
    ]
