"""A round that is judged, in several layouts: stopped, asked under other rules, then trained."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from tests.helpers.megatron_models import make_plan, make_rows
from tests.helpers.megatron_worker import Bench, Case, exported
from vime.data.rows import TrainRow
from vime.training.evidence import MeasuredMismatch
from vime.training.mismatch import Judge, LogprobMismatch
from vime.types import SamplingRule, VersionSpan

TEMPERATURE = 0.8
OTHER = 3  # rows of this version are not compared in round 0
RULES = {
    "plain": SamplingRule(),
    "hot": SamplingRule(temperature=1.7),
    "cut": SamplingRule(temperature=0.7, top_k=40, top_p=0.9),
}
TP2, PP2 = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
CP2 = {"context_parallel_size": 2}
OVERLAP = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
CRITIC = {"advantage_estimator": "ppo", "normalize_advantages": True, "lambd": 0.9, "critic_lr": 2e-3}
LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "single": (1, {}, {}),
    "critic": (1, CRITIC, {}),
    "critic-alone": (1, {**CRITIC, "num_critic_only_steps": 1}, {}),  # the policy does not move in round 0
    "dp2-overlap": (2, OVERLAP, {}),
    "tp2-pp2": (4, {**TP2, **PP2}, {}),
    "tp2-cp2": (4, {**TP2, **CP2, "sequence_parallel": True}, {}),
    "vpp2-dp2": (4, {**PP2, "virtual_pipeline_model_parallel_size": 2}, {"num_steps": 2}),
}


def mixed_rows() -> list[TrainRow]:
    """Row 0 of another version, row 1 half of it."""
    rows = make_rows()
    length = rows[1].response_length
    spans = [(VersionSpan(OTHER, 0, rows[0].response_length),), (VersionSpan(0, 0, 2), VersionSpan(OTHER, 2, length))]
    stale = [dataclasses.replace(row, token_policy_versions=span) for row, span in zip(rows[:2], spans, strict=True)]
    return [*stale, *rows[2:]]


def judged(bench: Bench, **plan: Any) -> dict[str, Any]:
    """What a mismatch says, what it leaves behind, and the round trained after it beside one never judged."""
    rows = mixed_rows()
    trainer = bench.trainer()
    planned = make_plan(rows, dp_size=trainer.place.dp_size, **plan)
    before = exported(trainer)
    found: MeasuredMismatch | None = None
    try:
        trainer.train_round(planned, dict(enumerate(rows)), judge=Judge(version=0, threshold=1e-3))
    except LogprobMismatch as error:
        found = error.measured
    answer = {
        "found": found,
        "before": before,
        "stopped": exported(trainer),
        "under": {name: trainer.log_probs(rows, rule) for name, rule in RULES.items()},
        "speaks": trainer.place.speaks,
        "metrics": trainer.train_round(planned, dict(enumerate(rows)), judge=Judge(version=0, threshold=1e3)),
        "trained": exported(trainer),
    }
    trainer.backend.close()
    trainer = bench.trainer()
    answer["never_judged_metrics"] = trainer.train_round(planned, dict(enumerate(rows)))
    answer["never_judged"] = exported(trainer)
    trainer.backend.close()
    return answer


def mismatch_cases(models: Path) -> list[Case]:
    flags = {"hf_checkpoint": str(models / "qwen2"), "rollout_temperature": TEMPERATURE}
    return [
        Case(
            name=f"judged-{name}",
            do="tests.helpers.mismatch_cases:judged",
            world=world,
            flags={**flags, **layout},
            arguments=plan,
        )
        for name, (world, layout, plan) in LAYOUTS.items()
    ]
