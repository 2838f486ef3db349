"""Group filters for --dynamic-sampling-filter-path."""

from __future__ import annotations

from vime.config.parse import Args
from vime.types import DynamicFilterOutput, Sample


def check_reward_nonzero_std(args: Args, samples: list[Sample]) -> DynamicFilterOutput:
    """Drop a group whose samples all got the same reward: its advantages are zero (DAPO, Yu et al. 2025, section 3.2).

    The reason names the reward, so that "all right" and "all wrong" are counted apart.
    """
    rewards = [sample.scalar_reward(args.reward_key) for sample in samples]
    if max(rewards) > min(rewards):
        return DynamicFilterOutput(keep=True)
    return DynamicFilterOutput(keep=False, reason=f"zero_std_{rewards[0]:g}")
