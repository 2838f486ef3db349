"""Routing replay: the trainer sends tokens where the row says, in every pass, layout and recomputation."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.helpers import reference_policy as reference
from tests.helpers.megatron_cases import REPLAY_LAYOUTS, routing_cases
from tests.helpers.megatron_models import make_plan, make_rows
from tests.helpers.megatron_worker import Answers, answers_of
from tests.helpers.routing import told, with_foreign_experts

DIFFERENCE = "train/train_rollout_logprob_abs_diff"


@pytest.fixture(scope="module")
def answers(models: Path, work: Path) -> Answers:
    return answers_of(routing_cases(models), directory=work / "launch-routing")


@pytest.mark.parametrize(
    ("case", "policy", "anchor"),
    [
        *((f"replay-moe-{name}", "qwen3_moe", "qwen3_moe_tied") for name in ("single", *REPLAY_LAYOUTS)),
        ("replay-moe-tied-single", "qwen3_moe_tied", "qwen3_moe"),
    ],
)
def test_foreign_experts_train_as_plain_torch_told_to_use_them(
    answers: Answers, models: Path, case: str, policy: str, anchor: str
) -> None:
    rows = with_foreign_experts(make_rows())
    model = told(reference.load(models / policy), rows)  # the KL anchor is another model: it routes by itself
    steps = reference.train_round(
        model, reference.load(models / anchor), rows, make_plan(rows, dp_size=1, num_steps=2), per_token=False
    )
    state = reference.named_weights(model)
    for rank in answers(case):
        [metrics] = rank["metrics"]
        for key in ("loss", "grad_norm"):
            expected = sum(step[key] for step in steps) / len(steps)
            assert metrics[f"train/{key}"] == pytest.approx(expected, rel=1e-5, abs=2e-6)
        for name, tensor in rank["weights"].items():
            torch.testing.assert_close(tensor, state[name], rtol=0, atol=2e-6, msg=name)


def test_foreign_experts_are_not_what_the_trainer_would_choose(answers: Answers) -> None:
    [foreign], [own] = answers("replay-moe-single"), answers("grpo-moe-single")
    assert foreign["metrics"][0]["train/loss"] != pytest.approx(own["metrics"][0]["train/loss"], rel=1e-3)


def test_replaying_what_the_trainer_chooses_anyway_changes_no_bit(answers: Answers) -> None:
    for own, replayed in zip(answers("own-experts-ignored"), answers("own-experts-replayed"), strict=True):
        assert own["metrics"] == replayed["metrics"]
        assert own["hash"] == replayed["hash"]


def test_with_replay_the_trainer_is_nearer_to_an_engine_whose_routers_differ(answers: Answers) -> None:
    [without], [replayed] = answers("other-routers-ignored"), answers("other-routers-replayed")
    before, after = without["metrics"][0][DIFFERENCE], replayed["metrics"][0][DIFFERENCE]
    print(f"{DIFFERENCE}: {before:.5f} without replay, {after:.5f} with")  # noqa: T201
    assert 0 < after < before / 2
