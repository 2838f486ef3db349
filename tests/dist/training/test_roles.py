"""Models that share the policy's ranks or have their own, asleep between rounds or not: the same bits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import reference_algorithms, reference_policy
from tests.helpers.engine_contract import SETTINGS
from tests.helpers.megatron_models import make_plan, make_rows
from tests.helpers.role_cases import ALGORITHM, is_for_the_night

Answers = Callable[[str], list[Any]]


@pytest.mark.parametrize(
    ("setting", "variant"),
    [
        pytest.param(setting, variant, marks=[pytest.mark.nightly] * is_for_the_night(setting, variant))
        for setting in SETTINGS
        for variant in ("split", "naps")
    ],
)
@pytest.mark.parametrize(("algorithm", "telling"), [("distilled", "train/kl_loss"), ("ppo", "train/value_loss")])
def test_split_roles_and_sleep_between_rounds_change_no_bit(
    contract: Answers, setting: str, variant: str, algorithm: str, telling: str
) -> None:
    shared, other = contract(f"{algorithm}-{setting}-shared"), contract(f"{algorithm}-{setting}-{variant}")
    assert shared[0]["metrics"][1][telling] > 0
    for expected, found in zip(shared, other, strict=True):
        assert found["metrics"] == expected["metrics"]
        assert found["hash"] == expected["hash"]
        assert found["draws"] == expected["draws"]
        for model, same in zip(expected["weights"], found["weights"], strict=True):
            assert all(torch.equal(tensor, same[name]) for name, tensor in model.items())


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_teacher_that_the_trainer_runs_pulls_as_in_plain_torch(
    contract: Answers, small_models: Path, setting: str
) -> None:
    model, rows = reference_policy.load(small_models / "qwen2"), make_rows()
    teacher_logps = reference_policy.log_probs(
        reference_policy.load(small_models / "teacher"), rows, reference_policy.TEMPERATURE
    )
    taught = [
        dataclasses.replace(row, extra={"teacher_log_probs": logp_R.tolist()})
        for row, logp_R in zip(rows, teacher_logps, strict=True)
    ]
    reference = reference_policy.load(small_models / "reference")
    plan = make_plan(rows, dp_size=1, num_steps=2)
    steps = reference_algorithms.train_round(model, reference, taught, plan, ALGORITHM)
    found = contract(f"distilled-{setting}-shared")[0]["metrics"][0]
    assert found["train/loss"] == pytest.approx(sum(step["loss"] for step in steps) / 2, rel=1e-5)
    assert found["train/grad_norm"] == pytest.approx(sum(step["grad_norm"] for step in steps) / 2, rel=1e-5)
