"""--reference-mode promises equal bits: what could change one is refused, and each refusal says why."""

from __future__ import annotations

from vime.config.parse import Config
from vime.types import ConfigError


def check_reference_mode(config: Config) -> None:
    """Refuse what depends on time, or on a kernel that was not compared. `config` is resolved."""
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
            "--reference-mode with --partial-rollout: where a completion is cut depends on who is faster, and it "
            "continues with another seed. Leave one of the two out."
        )
    if pause != "wait":
        raise ConfigError(
            f"--reference-mode with --pause-mode {pause}: a completion would be cut wherever the update happens to "
            "come. Use wait."
        )
