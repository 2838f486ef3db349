"""A critic learns alone and beside the policy, in every layout, and is stopped and resumed. Its numbers of one round
against plain torch are in test_megatron_algorithms.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.megatron_models import make_rows
from tests.helpers.megatron_worker import Answers, answers_of
from tests.helpers.ppo_cases import LAYOUTS, WARM_UP, ppo_cases
from tests.helpers.reference_ppo import Critic

RELATIVE, ABSOLUTE, WEIGHT = 1e-5, 1e-6, 2e-6  # as in test_megatron_algorithms.py


@pytest.fixture(scope="module")
def critics(models: Path, work: Path) -> Answers:
    return answers_of(ppo_cases(models, work), directory=work / "launch-critics")


def test_values_are_those_of_the_models_reward_head_and_zero_without_one(critics: Answers, models: Path) -> None:
    [single], [headless] = critics("critic-single"), critics("critic-moe-single")
    with torch.no_grad():
        expected_R = Critic(models / "critic")(make_rows()[0])
    torch.testing.assert_close(single["values"][0], expected_R, rtol=0, atol=2e-6)
    assert expected_R.abs().min() > 0
    assert headless["values"][0].tolist() == [0.0] * len(expected_R)
    assert headless["metrics"][0]["train/value_mean"] == 0
    assert headless["values"][1].abs().min() > 0


@pytest.mark.parametrize(
    ("one", "other"), [("single", name) for name in LAYOUTS if name != "bf16"] + [("moe-single", "moe-ep2")]
)
def test_two_rounds_with_a_critic_are_the_same_in_another_layout(critics: Answers, one: str, other: str) -> None:
    [single], ranks = critics(f"critic-{one}"), critics(f"critic-{other}")
    assert len(ranks) == 2
    for rank in ranks:
        for expected, metrics in zip(single["metrics"], rank["metrics"], strict=True):
            assert metrics == pytest.approx(expected, rel=RELATIVE, abs=ABSOLUTE)
        assert rank["metrics"] == ranks[0]["metrics"]
        for name, tensor in single["critic"].items():
            torch.testing.assert_close(rank["critic"][name], tensor, rtol=0, atol=WEIGHT, msg=name)


def test_a_bfloat16_critic_answers_in_float32_and_learns_the_same_way(critics: Answers) -> None:
    [single], [rough] = critics("critic-single"), critics("critic-bf16")
    assert rough["values"][0].dtype == torch.float32
    for expected, metrics in zip(single["metrics"], rough["metrics"], strict=True):
        assert metrics["train/value_loss"] == pytest.approx(expected["train/value_loss"], rel=0.1)


def test_the_policy_stays_while_the_critic_warms_up_alone(critics: Answers) -> None:
    [alone] = critics("critic-alone")
    assert len(set(alone["hashes"][: WARM_UP + 1])) == 1
    assert alone["hashes"][WARM_UP + 1] != alone["hashes"][WARM_UP]
    losses = [metrics["train/value_loss"] for metrics in alone["metrics"]]
    assert losses[WARM_UP] < losses[WARM_UP - 1] < losses[0]
    for metrics in alone["metrics"][:WARM_UP]:
        assert "train/loss" not in metrics
        assert metrics["train/num_samples"] == 8


def test_the_rate_of_the_policy_waits_for_its_own_first_step(critics: Answers) -> None:
    [alone] = critics("critic-alone")
    # 8 steps of the run, linear decay to 0; the last step of each round, 2 steps a round.
    # Critic: peak 2e-3, warm-up 2 steps, so step 1 has 1/2 of the peak, and step s >= 2 has (8 - s) / 6
    rates = [metrics["train/critic_lr"] for metrics in alone["metrics"]]
    assert rates == pytest.approx([2e-3 / 2, 2e-3 * 5 / 6, 2e-3 * 3 / 6, 2e-3 * 1 / 6])
    # policy: peak 1e-3, the 8 - 3 x 2 steps that are its own, one of them warm-up: its second step has the peak
    assert alone["metrics"][WARM_UP]["train/lr"] == pytest.approx(1e-3)


def test_a_critic_goes_on_after_a_checkpoint_as_if_it_had_never_stopped(critics: Answers) -> None:
    for rank in critics("critic-resume-dp2-distributed"):  # both models written in the background
        assert rank["resumed"]["metrics"] == rank["never_stopped"]["metrics"]
        assert rank["resumed"]["hash"] == rank["never_stopped"]["hash"]
        for name, tensor in rank["never_stopped"]["critic"].items():
            assert torch.equal(rank["resumed"]["critic"][name], tensor), name


def test_a_critics_checkpoint_loads_in_another_layout(critics: Answers, models: Path) -> None:
    before = load_file(models / "critic" / "model.safetensors")
    for rank in critics("critic-resume-tp2-as-pp2"):
        resumed, expected = rank["resumed"], rank["never_stopped"]
        assert resumed["metrics"] == pytest.approx(expected["metrics"], rel=RELATIVE, abs=ABSOLUTE)
        for name, tensor in expected["critic"].items():
            torch.testing.assert_close(resumed["critic"][name], tensor, rtol=0, atol=WEIGHT, msg=name)
            assert not torch.equal(tensor, before[name]), name


def test_a_checkpoint_without_a_critic_is_refused(critics: Answers) -> None:
    [rank] = critics("critic-missing")
    kind, message = rank["error"]
    assert kind == "CheckpointError"
    assert "holds no critic" in message
