"""The learning rate by step, worked by hand."""

from __future__ import annotations

import pytest

from vime.config.cluster import OptimizerConfig
from vime.config.parse import Config
from vime.config.schedule import decay_steps, learning_rate_at, steps_of_round
from vime.types import ConfigError


@pytest.mark.parametrize(
    ("style", "expected"),
    [
        # warm-up over 2 steps from 0 to 1; then over the 4 steps 2..6 down to 0.2
        ("constant", [0.0, 0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.0, 0.5, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2]),
        # 0.2 + 0.8 * (1 + cos(pi k / 4)) / 2, cos(pi / 4) = 0.7071068
        ("cosine", [0.0, 0.5, 1.0, 0.88284271, 0.6, 0.31715729, 0.2, 0.2]),
    ],
)
def test_rate_of_each_step(style: str, expected: list[float]) -> None:
    settings = OptimizerConfig(lr=1.0, min_lr=0.2, lr_warmup_iters=2, lr_decay_style=style)
    steps = decay_steps(settings, 6)
    assert [learning_rate_at(settings, step, steps) for step in range(8)] == pytest.approx(expected)


def test_decay_iters_win_over_the_length_of_the_run() -> None:
    assert decay_steps(OptimizerConfig(lr_decay_style="linear", lr_decay_iters=3), 6) == 3


@pytest.mark.parametrize(
    ("knobs", "says"),
    [({"lr_warmup_iters": 6}, "--lr-warmup-iters 6"), ({"lr": 1e-6, "min_lr": 1e-5}, "--min-lr 1e-05 is above")],
)
def test_a_decay_that_cannot_be_is_refused(knobs: dict[str, float], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        decay_steps(OptimizerConfig(lr_decay_style="linear", **knobs), 6)


def test_every_pass_over_a_round_counts_in_the_schedule() -> None:
    # 3 rounds of 2 steps, 4 times over: 24 steps of the schedule, 8 a round
    config = Config().replace(num_steps_per_rollout=2, num_ppo_epochs=4)
    assert steps_of_round(config) == 8
    assert steps_of_round(Config()) == 1
