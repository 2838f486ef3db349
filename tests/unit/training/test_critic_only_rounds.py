"""In a round of the critic alone nobody asks the reference model, unless the penalty of --kl-coef reads it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers.megatron_models import make_plan, make_rows
from vime.config.parse import parse
from vime.training.columns import REF_LOGP
from vime.training.roles import engine_spec
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


def test_the_policys_schedule_has_no_steps_in_the_rounds_of_the_critic_alone() -> None:
    flags = [*PPO, "3", "--num-steps-per-rollout", "2", "--lr", "1e-6", "--lr-warmup-iters", "4"]
    config = parse([*flags, "--critic-lr", "2e-6", "--critic-lr-warmup-iters", "5", "--critic-load", "there"])
    policy, critic, reference = (
        engine_spec(role, config, total_steps=20) for role in (Role.ACTOR, Role.CRITIC, Role.REFERENCE)
    )
    assert (policy.total_steps, policy.lr, policy.lr_warmup_iters) == (20 - 3 * 2, 1e-6, 4)
    assert engine_spec(Role.ACTOR, config.replace(num_ppo_epochs=2), total_steps=20).total_steps == 20 - 3 * 2 * 2
    assert (critic.total_steps, critic.lr, critic.lr_warmup_iters) == (20, 2e-6, 5)
    assert (critic.checkpoint, critic.flag) == ("there", "--critic-load")
    assert (reference.total_steps, reference.lr) == (0, 0.0)
