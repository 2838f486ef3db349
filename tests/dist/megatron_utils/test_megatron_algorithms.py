"""Every estimator, correction and loss type equals plain torch, and no layout or packing changes it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from tests.helpers import reference_algorithms, reference_policy
from tests.helpers.algorithm_cases import LAYOUTS, ROUND, algorithm_cases, is_for_the_night, stale_plan, stale_rows
from tests.helpers.megatron_worker import Answers, answers_of
from tests.helpers.nightly import is_night
from tests.helpers.reference_algorithms import RECIPES
from tests.helpers.reference_ppo import Critic

RELATIVE = 1e-5  # loss and gradient norm, fp32
ABSOLUTE = 1e-6  # sums of terms near 1 that cancel
WEIGHT = 2e-6  # absolute; one step moves a weight by up to 1e-3


@pytest.fixture(scope="module")
def algorithms(models: Path, work: Path, request: pytest.FixtureRequest) -> Answers:
    return answers_of(
        algorithm_cases(models, is_night=is_night(request, Path(__file__))), directory=work / "launch-algorithms"
    )


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_round_equals_plain_torch(algorithms: Answers, models: Path, recipe: str) -> None:
    model, rows = reference_policy.load(models / "qwen2"), stale_rows()
    loaded = RECIPES[recipe].get("critic_load")
    critic = None if loaded is None else Critic(models / loaded)
    steps = reference_algorithms.train_round(
        model,
        reference_policy.load(models / "reference"),
        rows,
        stale_plan(rows, dp_size=1),
        RECIPES[recipe],
        critic,
    )
    [answer] = algorithms(f"{recipe}-single")
    for key in steps[0].keys() - {"lr"}:
        expected = sum(step[key] for step in steps) / len(steps)
        got = answer["metrics"][f"train/{key}"]
        print(f"{recipe} {key}: {got:.7f}, plain torch {expected:.7f}")  # noqa: T201
        assert got == pytest.approx(expected, rel=RELATIVE, abs=ABSOLUTE if key == "loss" else 0)
    for part, reference in (("weights", model), ("critic", critic)):
        state = {} if reference is None else reference.state_dict()
        for name, tensor in answer.get(part, {}).items():
            torch.testing.assert_close(tensor, state[name], rtol=0, atol=WEIGHT, msg=name)


@pytest.mark.parametrize(
    ("recipe", "layout"),
    [
        pytest.param(recipe, layout, marks=[pytest.mark.nightly] * is_for_the_night(recipe, layout))
        for recipe in RECIPES
        for layout in LAYOUTS
        if layout != "single"
    ],
)
def test_a_layout_or_packing_changes_no_metric_and_no_weight(algorithms: Answers, recipe: str, layout: str) -> None:
    [single] = algorithms(f"{recipe}-single")
    ranks = algorithms(f"{recipe}-{layout}")
    assert len(ranks) == LAYOUTS[layout][0]
    for rank in ranks:
        assert rank["metrics"] == pytest.approx(single["metrics"], rel=RELATIVE, abs=ABSOLUTE)
        assert rank["metrics"] == ranks[0]["metrics"]
        for part in single.keys() & {"weights", "critic"}:
            for name, tensor in single[part].items():
                torch.testing.assert_close(rank[part][name], tensor, rtol=0, atol=WEIGHT, msg=name)


def test_the_recipes_reach_what_they_are_about(algorithms: Answers) -> None:
    def metric(recipe: str, name: str) -> float:
        return algorithms(f"{recipe}-single")[0]["metrics"][f"train/{name}"]

    assert 0 < metric("ppo", "value_clipfrac") < 1
    for recipe in ("three-passes", "gspo", "cispo", "rloo-dual-tis", "grpo-normalised-decoupled", "ppo"):
        assert 0 < metric(recipe, "pg_clipfrac") < 1
    for recipe in ("rloo-dual-tis", "grpo-normalised-decoupled", "icepop-unbiased-kl", "mis"):
        assert 0 < metric(recipe, "tis_clipfrac") < 1
    assert 0 < metric("engine-old-opsm", "opsm_maskfrac") < 1


def test_effective_sample_size_is_told_apart_by_staleness(algorithms: Answers, models: Path) -> None:
    rows = stale_rows()
    with torch.no_grad():
        logps = reference_policy.log_probs(reference_policy.load(models / "qwen2"), rows, reference_policy.TEMPERATURE)

    def size(numbers: list[int]) -> float:
        weights = [
            math.exp(float(logp) - engine)
            for row in numbers
            for logp, engine, mask in zip(logps[row], rows[row].rollout_log_probs, rows[row].loss_mask, strict=True)
            if mask
        ]
        return sum(weights) ** 2 / len(weights) / sum(weight**2 for weight in weights)

    # steps hold rows 0-3 and 4-7; behind round 3 by 2 (row 0: its oldest token), 1, 2, 3 | 0, 1, 2, 3 versions.
    # Rows 0 and 2 are of the first step, whose policy is that of the checkpoint; the second step's moved, by 1e-3 a
    # weight.
    assert [ROUND - row.oldest_version for row in rows] == [2, 1, 2, 3, 0, 1, 2, 3]
    [answer] = algorithms("grpo-normalised-decoupled-single")
    metrics = answer["metrics"]
    assert metrics["train/ess/staleness_2"] == pytest.approx((size([0, 2]) + size([6])) / 2, rel=0.05)
    assert metrics["train/ess"] == pytest.approx((size([0, 1, 2, 3]) + size([4, 5, 6, 7])) / 2, rel=0.05)
    # trainable tokens: 6 + 12 of 72, row 6 has 8 of 41
    assert metrics["train/token_share/staleness_2"] == pytest.approx((18 / 72 + 8 / 41) / 2)
    assert metrics["train/ess/staleness_0"] > 0
    assert "train/ess/staleness_4_7" not in metrics
    assert "train/mismatch_kl" in metrics
    assert "train/mismatch_kl" not in algorithms("mis-single")[0]["metrics"]
