"""A custom advantage: `--custom-reward-post-process-path examples/customization/post_process.py:leave_one_out`.

REINFORCE leave-one-out (Ahmadian et al. 2024): each reward minus the mean of the other rewards of its group. Replaces
the group normalisation of GRPO; returns one number for each sample, in the same shape.
"""

from __future__ import annotations

from typing import Any

from vime.types import Sample


def leave_one_out(args: Any, groups: list[list[Sample]]) -> list[list[float]]:
    """Rewards (1, 0, 0) -> (1 - 0, 0 - 0.5, 0 - 0.5)."""
    processed = []
    for group in groups:
        rewards = [sample.scalar_reward(args.reward_key) for sample in group]
        total, others = sum(rewards), len(rewards) - 1
        processed.append([reward - (total - reward) / others for reward in rewards])
    return processed
