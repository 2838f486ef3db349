"""A round whose step was begun early batch by early batch ends with the weights of the round trained at once."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.early_cases import RECIPES, is_for_the_night
from tests.helpers.engine_contract import SETTINGS
from tests.helpers.megatron_worker import Answers

RELATIVE = 1e-5  # metrics, fp32
WEIGHT = 2e-6  # absolute; one step moves a weight by up to 1e-3
EVERY = pytest.mark.parametrize(
    ("setting", "recipe"),
    [
        pytest.param(setting, recipe, marks=[pytest.mark.nightly] * is_for_the_night(setting, recipe))
        for setting in SETTINGS
        for recipe in RECIPES
    ],
)


@EVERY
def test_portions_make_the_weights_and_metrics_of_the_whole_round(contract: Answers, setting: str, recipe: str) -> None:
    """Denominators are known when the last early batch comes: 8 samples, and more tokens than the first early batch
    has."""
    for rank in contract(f"{setting}-early-{recipe}"):
        expected, found = rank["at once"], rank["in early batches"]
        for at_once, in_early_batches in zip(expected["metrics"], found["metrics"], strict=True):
            assert in_early_batches == pytest.approx(at_once, rel=RELATIVE, abs=1e-7)
        assert found["weights"].keys() == expected["weights"].keys()
        for name, tensor in expected["weights"].items():
            torch.testing.assert_close(found["weights"][name], tensor, rtol=0, atol=WEIGHT, msg=name)


@EVERY
def test_a_round_refused_after_its_portions_moved_no_weight_and_is_trained_at_once_instead(
    contract: Answers, setting: str, recipe: str
) -> None:
    for rank in contract(f"{setting}-early-{recipe}"):
        for name, tensor in rank["at once"]["weights"].items():
            assert torch.equal(rank["refused first"]["weights"][name], tensor), name
