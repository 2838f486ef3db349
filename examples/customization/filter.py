"""A custom group filter: `--dynamic-sampling-filter-path examples/customization/filter.py:keep_mixed_groups`.

Drops groups that teach nothing (all rewards equal) and groups where most completions reached the length limit. The
reason is counted as the metric `rollout/dropped_<reason>`.
"""

from __future__ import annotations

from typing import Any

from vime.types import DynamicFilterOutput, Sample, SampleStatus

MAX_TRUNCATED_SHARE = 0.5


def keep_mixed_groups(args: Any, samples: list[Sample]) -> DynamicFilterOutput:
    truncated = sum(sample.status is SampleStatus.TRUNCATED for sample in samples)
    if truncated > MAX_TRUNCATED_SHARE * len(samples):
        return DynamicFilterOutput(keep=False, reason="truncated")
    rewards = {sample.scalar_reward(args.reward_key) for sample in samples}
    if len(rewards) == 1:
        return DynamicFilterOutput(keep=False, reason="equal_rewards")
    return DynamicFilterOutput(keep=True)


def leave_out_truncated(args: Any, groups: list[list[Sample]]) -> None:
    """For --rollout-sample-filter-path: truncated completions count in the group's mean but not in the loss."""
    for group in groups:
        for sample in group:
            sample.remove_sample = sample.status is SampleStatus.TRUNCATED
