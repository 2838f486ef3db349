"""--reference-mode promises equal bits: what would move one is refused, and each refusal says how it would."""

from __future__ import annotations

from vime.config.parse import Config
from vime.types import ConfigError


def check_reference_mode(config: Config) -> None:
    """Refuse what lets time, or a kernel nobody compared, decide. `config` is resolved."""
    if not config.debug.reference_mode:
        return
    staleness, pause = config.queue.transferqueue_max_staleness, config.weights.pause_mode
    if config.cluster.device != "cpu":
        raise ConfigError(
            f"--reference-mode with --device {config.cluster.device}: equal bits are shown on the CPU only. Use "
            "--device cpu, or leave the flag out."
        )
    if staleness > 0:
        raise ConfigError(
            f"--reference-mode with --transferqueue-max-staleness {staleness}: whether a round is sampled by these "
            "weights or by older ones would depend on who is faster, and on whether the run was restarted. Use 0, with "
            "train.py, or leave --reference-mode out."
        )
    if config.rollout.partial_rollout:
        raise ConfigError(
            "--reference-mode with --partial-rollout: where an answer is cut depends on who is faster, and it goes on "
            "under another seed. Leave one of the two out."
        )
    if pause != "wait":
        raise ConfigError(
            f"--reference-mode with --pause-mode {pause}: an answer would be cut where the update happens to meet it. "
            "Use wait."
        )
