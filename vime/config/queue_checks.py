"""What mode `streaming` fills in and refuses, before any process starts."""

from __future__ import annotations

from vime.config.parse import Config
from vime.config.rollout import RolloutConfig
from vime.config.run import DebugConfig
from vime.types import ConfigError

BUFFER, STREAMING = "buffer", "streaming"
ROUNDS, GROUPS = "vime.rollout.vllm_rollout.generate_rollout", "vime.rollout.transferqueue_rollout.generate_rollout"


def resolve_rollout_function(rollout: RolloutConfig, mode: str) -> str:
    """The default rollout function is that of the mode."""
    return GROUPS if mode == STREAMING and rollout.rollout_function_path == ROUNDS else rollout.rollout_function_path


def check_queue(config: Config) -> None:
    """Flags that contradict the mode, and bounds under which a run would wait for ever."""
    rollout, queue, mode = config.rollout, config.queue, config.queue.transferqueue_mode
    if (rollout.rollout_function_path == GROUPS) != (mode == STREAMING):
        advice = (
            "Remove the flag; --custom-generate-function-path, rewards and filters work group by group."
            if mode == STREAMING
            else f"It needs --transferqueue-mode {STREAMING}."
        )
        raise ConfigError(f"--rollout-function-path {rollout.rollout_function_path} with mode {mode}: {advice}")
    if mode != STREAMING:
        return
    _check_debug(config.debug)
    wanted = rollout.rollout_batch_size
    if queue.transferqueue_max_groups is not None and queue.transferqueue_max_groups < wanted:
        raise ConfigError(
            f"--transferqueue-max-groups {queue.transferqueue_max_groups} is below --rollout-batch-size {wanted}: no "
            "round would ever be whole. Raise it, or leave it out."
        )


def _check_debug(debug: DebugConfig) -> None:
    if debug.debug_rollout_only:
        raise ConfigError(
            f"--debug-rollout-only with --transferqueue-mode {STREAMING}: rounds that nobody trains would never give "
            "their slots back. Use mode off."
        )
