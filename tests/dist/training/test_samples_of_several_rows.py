"""A sample of several rows moves the weights as one sample, however its rows are cut over packs, ranks and time."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.engine_contract import SETTINGS
from tests.helpers.megatron_worker import Answers
from tests.helpers.several_rows_cases import RECIPES, WAYS, is_for_the_night

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
def test_rows_of_a_sample_move_the_weights_as_rows_whose_rewards_were_scaled_by_hand(
    contract: Answers, setting: str, recipe: str
) -> None:
    for rank in contract(f"{setting}-several-{recipe}"):
        expected = rank["as samples of one row"]
        found = rank["in packs of three"]
        for name, tensor in expected["weights"].items():
            torch.testing.assert_close(found["weights"][name], tensor, rtol=0, atol=WEIGHT, msg=name)
        if expected["weights"]:
            assert found["metrics"]["train/loss"] == pytest.approx(expected["metrics"]["train/loss"], rel=RELATIVE)
        # 8 rows are 5 samples
        counts = [(way["metrics"]["train/num_samples"], way["metrics"]["train/num_rows"]) for way in (expected, found)]
        assert counts == [(8, 8), (5, 8)]


@EVERY
@pytest.mark.parametrize("way", [*WAYS, "with shared prompts", "in early batches"])
def test_no_cut_over_packs_ranks_or_time_changes_the_step(
    contract: Answers, setting: str, recipe: str, way: str
) -> None:
    for rank in contract(f"{setting}-several-{recipe}"):
        expected, found = rank["in packs of three"], rank[way]
        names = ("train/loss", "train/grad_norm", "train/num_samples", "train/num_rows", "train/num_tokens")
        assert [found["metrics"][name] for name in names] == pytest.approx(
            [expected["metrics"][name] for name in names], rel=RELATIVE
        )
        for name, tensor in expected["weights"].items():
            torch.testing.assert_close(found["weights"][name], tensor, rtol=0, atol=WEIGHT, msg=name)


def test_replicas_and_backends_agree_also_where_one_rank_has_no_row(contract: Answers) -> None:
    [expected] = contract("megatron-several-grpo")
    for setting in ("megatron-dp2-distributed", "fsdp", "fsdp-dp2"):
        found = contract(f"{setting}-several-grpo")[0]
        for way in ("in packs of three", "one row"):
            for name, tensor in expected[way]["weights"].items():
                torch.testing.assert_close(
                    found[way]["weights"][name], tensor, rtol=0, atol=WEIGHT, msg=f"{way} {name}"
                )
