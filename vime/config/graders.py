"""Built-in rewards by name, as in --rm-type and a record's metadata["rm_type"], and what each of them needs.

What they compute is in `vime/rollout/rm_hub.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

from vime.config.parse import Config
from vime.config.rollout import RM_TYPES, RewardConfig

IN_RECORD = "rm_type"
"""Key of a record's metadata that names its grader."""
COMPARE_WITH_LABEL = ("exact_match", "math", "boxed_exact_match", "boxed_math")
"""Those that read the label as text."""


def own_grader(reward: RewardConfig, metadata: Mapping[str, object]) -> object:
    """Return the grader that a record names; None without one, or where --custom-rm-path scores every completion."""
    return (metadata.get(IN_RECORD) or None) if reward.custom_rm_path is None else None


def own_grader_fault(reward: RewardConfig, metadata: Mapping[str, object]) -> str:
    """Say why a record's own grader cannot score it; empty when it can, or when the record names none."""
    own = own_grader(reward, metadata)
    if own is None:
        return ""
    fault = lack_of(own, reward) if own in RM_TYPES else f"expected one of {', '.join(RM_TYPES)}"
    return f"metadata[{IN_RECORD!r}] is {own!r}, {fault}" if fault else ""


def lack_of(rm_type: str | None, reward: RewardConfig) -> str:
    """Say what this grader needs and the command line lacks; empty when nothing is missing."""
    if rm_type == "dapo" and reward.reward_key not in ("score", "acc"):
        return (
            f"which returns score (1 or -1) and acc (1 or 0), and --reward-key is {reward.reward_key}. Add "
            "--reward-key score"
        )
    if rm_type == "remote_rm" and not reward.rm_url:
        return "which needs --rm-url, the address of the service. Add it"
    return ""


def is_unscored(config: Config) -> bool:
    """Whether no flag names a reward, so that each record must."""
    has_reward = config.reward.rm_type or config.reward.custom_rm_path
    is_scored_elsewhere = config.rollout.custom_generate_function_path or config.debug.load_debug_rollout_data
    return not (has_reward or is_scored_elsewhere or config.algo.loss_type == "sft_loss")
