"""In a round of the critic alone nobody asks the reference model, unless the penalty of --kl-coef reads it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers.megatron_models import make_plan, make_rows
from vime.config.parse import parse
from vime.training.columns import REF_LOGP
from vime.training.worker import TrainWorker
from vime.types import EngineSpec, Role

PPO = ["--advantage-estimator", "ppo", "--num-critic-only-steps"]
LOSS_TERM = ["--use-kl-loss", "--kl-loss-coef", "0.1"]


@pytest.mark.parametrize(
    ("flags", "is_asked"),
    [
        ([*PPO, "1", *LOSS_TERM], False),
        ([*PPO, "0", *LOSS_TERM], True),
        ([*PPO, "1", "--kl-coef", "0.1"], True),
    ],
)
def test_the_reference_is_asked_when_a_formula_reads_it(flags: list[str], is_asked: bool) -> None:
    asked: list[Role] = []

    def build(spec: EngineSpec) -> Any:
        def forward(_batches: Any) -> list[Any]:
            asked.append(spec.role)
            return []

        return SimpleNamespace(forward=forward)

    rows = make_rows()
    backend: Any = SimpleNamespace(build=build, place=SimpleNamespace(dp_rank=0))
    worker = TrainWorker(parse(flags), backend, total_steps=4)
    columns = worker.forward_columns(make_plan(rows, dp_size=1, num_steps=1), dict(enumerate(rows)))  # of round 0
    assert (REF_LOGP in columns) is is_asked
    assert asked == ([Role.REFERENCE] if is_asked else []) + [Role.CRITIC]
