"""Each model family in its layouts is the model of transformers: what it says of rows, what it exports, two steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.helpers import reference_policy as reference
from tests.helpers.families import family_cases, shown_cases
from tests.helpers.megatron_models import make_plan, make_rows
from tests.helpers.megatron_worker import Answers, answers_of
from tests.helpers.nightly import is_night

LOGP = 1e-5  # absolute, fp32
RELATIVE = 1e-5  # loss and gradient norm
ABSOLUTE = 1e-6  # losses are sums of terms near 1 that cancel
WEIGHT = 2e-6  # absolute; one step moves a weight by up to 1e-3
SHOWN = shown_cases()


class Expected(NamedTuple):
    """What transformers and plain torch say of one model."""

    log_probs: list[Tensor]
    file: dict[str, Tensor]
    loss: float
    grad_norm: float
    weights: dict[str, Tensor]


@pytest.fixture(scope="module")
def answers(models: Path, work: Path, request: pytest.FixtureRequest) -> Answers:
    cases = family_cases(models, is_night=is_night(request, Path(__file__)))
    return answers_of(cases, directory=work / "launch-families")


@pytest.fixture(scope="module")
def expected(models: Path) -> Callable[[str], Expected]:
    found: dict[str, Expected] = {}

    def of(name: str) -> Expected:
        family, kind, _, _ = SHOWN[name]
        if kind not in found:
            model, rows = reference.load(models / kind), make_rows()
            log_probs = reference.log_probs(model, rows, reference.TEMPERATURE)
            plan, anchor = make_plan(rows, dp_size=1, num_steps=2), reference.load(models / family.anchor)
            steps = reference.train_round(model, anchor, rows, plan, per_token=False)
            found[kind] = Expected(
                log_probs,
                load_file(models / kind / "model.safetensors"),
                sum(step["loss"] for step in steps) / 2,
                sum(step["grad_norm"] for step in steps) / 2,
                reference.named_weights(model),
            )
        return found[kind]

    return of


def by_night() -> list[Any]:
    return [
        pytest.param(name, marks=[pytest.mark.nightly] * is_for_the_night)
        for name, (_, _, _, is_for_the_night) in SHOWN.items()
    ]


@pytest.mark.parametrize("name", by_night())
def test_a_family_in_a_layout_says_exports_and_learns_what_transformers_does(
    answers: Answers, expected: Callable[[str], Expected], name: str
) -> None:
    theirs = expected(name)
    for rank in answers(name):
        metrics = rank["metrics"]
        logp = max(float((a - b).abs().max()) for a, b in zip(rank["log_probs"], theirs.log_probs, strict=True))
        moved = {key: float((tensor - theirs.weights[key]).abs().max()) for key, tensor in rank["weights"].items()}
        worst = max(moved, key=moved.__getitem__)
        norm = abs(metrics["train/grad_norm"] / theirs.grad_norm - 1)
        print(f"{name}: logp {logp:.1e}, norm {norm:.1e}, weights {moved[worst]:.1e} ({worst})")  # noqa: T201
        assert logp < LOGP
        assert set(rank["before"]) == set(theirs.file)
        assert all(torch.equal(rank["before"][key], tensor) for key, tensor in theirs.file.items())
        assert metrics["train/loss"] == pytest.approx(theirs.loss, rel=RELATIVE, abs=ABSOLUTE)
        assert norm < RELATIVE
        assert moved[worst] < WEIGHT, worst
