"""Any training engine behaves as `protocols.TrainEngine` says, measured against transformers and plain torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers import reference_policy
from tests.helpers.engine_contract import PACKINGS, REPLICAS, RULE, SETTINGS, plain_critic_steps, plain_steps
from tests.helpers.megatron_models import make_plan, make_rows
from tests.helpers.reference_ppo import Critic
from vime.weights.hashing import content_hash
from vime.weights.plan import TensorMeta

Answers = Callable[[str], list[Any]]
LOGP = 1e-4  # absolute, to transformers
RELATIVE = 1e-5  # loss and gradient norm, fp32
WEIGHT = 2e-6  # absolute; one step moves a weight by up to 1e-3
ALL = pytest.mark.parametrize("setting", SETTINGS)


@ALL
@pytest.mark.parametrize(("role", "model"), [("actor", "qwen2"), ("frozen", "reference")])
def test_forward_answers_the_log_probabilities_of_transformers_in_any_packing(
    contract: Answers, small_models: Path, setting: str, role: str, model: str
) -> None:
    expected = reference_policy.log_probs(
        reference_policy.load(small_models / model), make_rows(), reference_policy.TEMPERATURE
    )
    ranks = contract(f"{setting}-forward")
    for packing in PACKINGS:
        found: dict[int, torch.Tensor] = {}
        for rank in ranks:
            column = rank[f"{role}-{packing}"]
            assert bool(column) == rank["place"].holds_tokens
            found |= column
        assert sorted(found) == list(range(len(expected)))
        for row, logp_R in found.items():
            assert logp_R.dtype == torch.float32
            torch.testing.assert_close(logp_R, expected[row], rtol=0, atol=LOGP)


@ALL
def test_forward_under_another_rule_answers_what_that_rule_would_have_sampled_with(
    contract: Answers, small_models: Path, setting: str
) -> None:
    model = reference_policy.load(small_models / "qwen2")
    expected = [reference_policy.log_probs_under(model, row, RULE) for row in make_rows()]
    assert any(torch.isneginf(expected_R).any() for expected_R in expected)  # the rule drops some tokens
    for rank in contract(f"{setting}-forward"):
        for row, logp_R in rank["under"].items():
            torch.testing.assert_close(logp_R, expected[row], rtol=0, atol=LOGP)
        assert bool(rank["under"]) == rank["place"].holds_tokens


@ALL
def test_every_replica_has_one_source_and_one_rank_that_speaks(contract: Answers, setting: str) -> None:
    places = [rank["place"] for rank in contract(f"{setting}-forward")]
    assert [place.rank for place in places] == list(range(len(places)))
    for replica in range(places[0].dp_size):
        members = [place for place in places if place.dp_rank == replica]
        assert sum(place.is_source for place in members) == 1
        assert sum(place.speaks for place in members) == 1
        assert all(place.holds_tokens for place in members if place.speaks)


LEARNED = [
    *((setting, packing) for setting in SETTINGS for packing in PACKINGS),
    *((setting, "empty-rank") for setting in SETTINGS if REPLICAS[setting] > 1),
]


@pytest.mark.parametrize(("setting", "packing"), LEARNED)
def test_two_steps_equal_plain_torch_in_any_packing_with_empty_micro_batches_and_with_an_empty_rank(
    contract: Answers, small_models: Path, setting: str, packing: str
) -> None:
    ranks = contract(f"{setting}-learned-{packing}")
    rows = make_rows()
    expected, model = plain_steps(small_models / "qwen2", rows, make_plan(rows, dp_size=1, num_steps=2))
    state = model.state_dict()
    for rank in ranks:
        for taken, step in zip(rank["steps"], expected, strict=True):
            assert taken["loss"] == pytest.approx(step["loss"], rel=RELATIVE)
            assert taken["grad_norm"] == pytest.approx(step["grad_norm"], rel=RELATIVE)
            assert taken["lr"] == pytest.approx(step["lr"], rel=1e-9)
            assert taken["num_shares"] in (0, taken["num_batches"])
        for name, tensor in rank["weights"].items():
            torch.testing.assert_close(tensor, state[name], rtol=0, atol=WEIGHT, msg=name)
    assert ranks[0]["weights"]


@ALL
def test_a_critic_answers_and_learns_what_plain_torch_does_and_begins_at_zero_without_a_head(
    contract: Answers, small_models: Path, setting: str
) -> None:
    rows = make_rows()
    with torch.no_grad():
        values = [Critic(small_models / "critic")(row) for row in rows]
    steps, critic = plain_critic_steps(small_models / "critic", rows, make_plan(rows, dp_size=1, num_steps=2))
    found: dict[str, dict[int, torch.Tensor]] = {"headed": {}, "headless": {}}
    for rank in contract(f"{setting}-critic"):
        for name, column in rank["values"].items():
            found[name] |= column
        for taken, step in zip(rank["steps"], steps, strict=True):
            assert [taken[key] for key in ("loss", "grad_norm", "lr")] == pytest.approx(
                [step[key] for key in ("loss", "grad_norm", "lr")], rel=RELATIVE
            )
        for name, tensor in rank["weights"].items():
            torch.testing.assert_close(tensor, critic.state_dict()[name], rtol=0, atol=WEIGHT, msg=name)
    for row, value_R in enumerate(values):
        torch.testing.assert_close(found["headed"][row], value_R, rtol=0, atol=LOGP)
        assert found["headless"][row].tolist() == [0.0] * len(value_R)


@ALL
def test_the_export_is_the_file_as_its_metadata_and_hash_say(
    contract: Answers, small_models: Path, setting: str
) -> None:
    file = load_file(small_models / "qwen2" / "model.safetensors")
    ranks = [rank["before"] for rank in contract(f"{setting}-learned-two")]
    for rank in ranks:
        assert rank["metadata"] == ranks[0]["metadata"]
        if rank["hash"] is None:
            continue
        assert [TensorMeta.of(name, tensor) for name, tensor in rank["weights"].items()] == rank["metadata"]
        assert set(rank["weights"]) == set(file)
        assert all(torch.equal(tensor, file[name]) for name, tensor in rank["weights"].items())
        assert rank["hash"] == content_hash(rank["weights"])
    assert ranks[0]["hash"] is not None


@ALL
def test_a_gradient_norm_that_is_not_finite_is_answered_everywhere_and_moves_no_weight(
    contract: Answers, setting: str
) -> None:
    for rank in contract(f"{setting}-not-finite"):
        assert not math.isfinite(rank["grad_norm"])
        assert all(torch.equal(tensor, rank["after"][name]) for name, tensor in rank["before"].items())


@ALL
@pytest.mark.parametrize("pause", ["slept", "loaded"])
def test_nothing_after_sleep_and_wake_or_save_and_load_differs_from_a_run_without(
    contract: Answers, setting: str, pause: str
) -> None:
    for rank in contract(f"{setting}-interrupted"):
        straight, paused = rank["straight"], rank[pause]
        assert paused["steps"] == straight["steps"]
        assert paused["draws"] == straight["draws"]
        assert all(torch.equal(tensor, paused["weights"][name]) for name, tensor in straight["weights"].items())


@ALL
def test_a_sleeping_engine_refuses_everything_and_a_frozen_one_wakes_unchanged(contract: Answers, setting: str) -> None:
    for rank in contract(f"{setting}-interrupted"):
        assert rank["asleep-False"] == rank["asleep-True"] == []  # what the policy and the frozen one did not refuse
        assert rank["resting-False"] == rank["resting-True"] == []
        assert all(rank["exports_alike_at_rest"])
        assert all(rank["frozen"])


@ALL
def test_a_frozen_engine_refuses_to_learn(contract: Answers, setting: str) -> None:
    for rank in contract(f"{setting}-forward"):
        assert rank["accepted"] == []
