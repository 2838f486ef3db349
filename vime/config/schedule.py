"""The learning rate of each optimizer step. Step 0 is the first; both trainers follow it."""

from __future__ import annotations

import math

from vime.config.cluster import OptimizerConfig
from vime.config.parse import Config
from vime.types import ConfigError


def steps_of_round(config: Config) -> int:
    """Return the optimizer steps that one model takes in a round: --num-steps-per-rollout, --num-ppo-epochs times."""
    return (config.batch.num_steps_per_rollout or 1) * config.algo.num_ppo_epochs


def decay_steps(settings: OptimizerConfig, total_steps: int) -> int:
    """Return the step at which a decaying rate has reached --min-lr; contradictions are refused."""
    steps = settings.lr_decay_iters or max(total_steps, 1)
    if settings.lr_decay_style == "constant":
        return steps
    if settings.lr_warmup_iters >= steps:
        raise ConfigError(
            f"--lr-warmup-iters {settings.lr_warmup_iters} leaves nothing of the {steps} steps over which "
            "the rate decays (--lr-decay-iters, or the whole run). Warm up for fewer steps or decay over more."
        )
    check_floor(settings)
    return steps


def check_floor(settings: OptimizerConfig) -> None:
    if settings.lr_decay_style != "constant" and settings.min_lr > settings.lr:
        raise ConfigError(f"--min-lr {settings.min_lr} is above --lr {settings.lr}. Lower it.")


def check_schedule(config: Config) -> None:
    """Check that the decay goes down, and that it is longer than the warm-up if the number of steps is known before the
    prompts are read."""
    optimizer, critic = config.optimizer, config.critic
    check_floor(optimizer)
    for flag, warmup, skipped in (
        ("--lr-warmup-iters", optimizer.lr_warmup_iters, critic.num_critic_only_steps),
        ("--critic-lr-warmup-iters", critic.critic_lr_warmup_iters, 0),
    ):
        steps, rounds = optimizer.lr_decay_iters, config.rollout.num_rollout
        if steps is None and rounds is not None:
            steps = (rounds - skipped) * steps_of_round(config)
        if optimizer.lr_decay_style != "constant" and steps is not None and warmup >= max(1, steps):
            raise ConfigError(
                f"{flag} {warmup} leaves nothing of the {steps} steps over which --lr-decay-style "
                f"{optimizer.lr_decay_style} decays. Warm up for fewer steps, or raise --lr-decay-iters."
            )


def learning_rate_at(settings: OptimizerConfig, step: int, decay_steps: int) -> float:
    """Linear warm-up from 0 over --lr-warmup-iters, then constant, linear or cosine down to --min-lr."""
    warmup = settings.lr_warmup_iters
    if warmup and step <= warmup:
        return settings.lr * step / warmup
    if settings.lr_decay_style == "constant":
        return settings.lr
    if step > decay_steps:
        return settings.min_lr
    done = (step - warmup) / (decay_steps - warmup)
    left = 1.0 - done if settings.lr_decay_style == "linear" else 0.5 * (math.cos(math.pi * done) + 1.0)
    return settings.min_lr + left * (settings.lr - settings.min_lr)
