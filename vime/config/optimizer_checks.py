"""Flags of the optimizer's memory: where its state lies and in what it is kept."""

from __future__ import annotations

from vime.config.parse import Config
from vime.types import ConfigError

NARROWEST_DECAY = 2**-8
"""Half of the largest gap between neighbours in bf16, relative to them: a number that loses less than that in a step is
rounded back to what it was, and never falls."""


def check_optimizer(config: Config) -> None:
    """Refuse what has no effect, and moments that could not follow the gradients. `config` is resolved."""
    optimizer = config.optimizer
    kept = (
        ("--exp-avg-dtype", optimizer.exp_avg_dtype, "--adam-beta1", optimizer.adam_beta1),
        ("--exp-avg-sq-dtype", optimizer.exp_avg_sq_dtype, "--adam-beta2", optimizer.adam_beta2),
    )
    if config.cluster.train_backend == "fsdp":
        given = ["--optimizer-cpu-offload"] if optimizer.optimizer_cpu_offload else []
        given += [f"{flag} {dtype}" for flag, dtype, _, _ in kept if dtype != "fp32"]
        if given:
            raise ConfigError(
                f"{', '.join(given)} with --train-backend fsdp: its optimizer is torch's own, in fp32, on the device. "
                f"Remove {'it' if len(given) == 1 else 'them'}, or use --train-backend megatron."
            )
    if optimizer.optimizer_offload_fraction != 1 and not optimizer.optimizer_cpu_offload:
        raise ConfigError(
            f"--optimizer-offload-fraction {optimizer.optimizer_offload_fraction:g} has no effect without "
            "--optimizer-cpu-offload. Add that, or remove it."
        )
    for flag, dtype, decay_flag, decay in kept:
        if decay == 1:
            raise ConfigError(
                f"{decay_flag} 1: the moment would never take up a gradient. Expected at least 0 and less than 1. "
                "Lower it."
            )
        if dtype == "bf16" and 1 - decay < NARROWEST_DECAY:
            raise ConfigError(
                f"{flag} bf16 with {decay_flag} {decay:g}: in a step the moment falls by less than bf16 can tell, so "
                f"it would never fall. Expected {decay_flag} of at most {1 - NARROWEST_DECAY:.3f}, or {flag} fp32."
            )
