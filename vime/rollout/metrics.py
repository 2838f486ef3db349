"""Numbers about generated samples, under the names that trackers show."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from vime.types import Sample, SampleStatus


def sample_metrics(args: Any, samples: Sequence[Sample], prefix: str) -> dict[str, float]:
    """Reward, length (tokens) and truncation of `samples`; empty for no samples."""
    if not samples:
        return {}
    rewards = [sample.scalar_reward(args.reward_key) for sample in samples]
    lengths = sorted(sample.response_length for sample in samples)
    truncated = sum(sample.status is SampleStatus.TRUNCATED for sample in samples)
    return {
        f"{prefix}/reward_mean": statistics.fmean(rewards),
        f"{prefix}/reward_std": statistics.pstdev(rewards),
        f"{prefix}/response_len_mean": statistics.fmean(lengths),
        f"{prefix}/response_len_p50": float(percentile(lengths, 0.50)),
        f"{prefix}/response_len_p95": float(percentile(lengths, 0.95)),
        f"{prefix}/response_len_max": float(lengths[-1]),
        f"{prefix}/truncated_ratio": truncated / len(samples),
        f"{prefix}/num_samples": float(len(samples)),
        f"{prefix}/num_tokens": float(sum(lengths)),
    }


def version_metrics(samples: Sequence[Sample], prefix: str) -> dict[str, float]:
    """Oldest and newest policy version among the response tokens."""
    versions = {version for sample in samples for version in sample.weight_versions}
    if not versions:
        return {}
    return {f"{prefix}/version_oldest": float(min(versions)), f"{prefix}/version_newest": float(max(versions))}


def drop_metrics(dropped: Mapping[str, int]) -> dict[str, float]:
    """Dropped groups, in all and by reason."""
    total = {"rollout/dropped_groups": float(sum(dropped.values()))}
    return total | {f"rollout/dropped_{reason}": float(count) for reason, count in sorted(dropped.items())}


def percentile(ordered: Sequence[int], share: float) -> int:
    """Nearest rank: the smallest entry that at least `share` of all entries do not exceed. 0.95 of 1..20 is 19."""
    rank = -(-len(ordered) * round(share * 100) // 100)
    return ordered[max(0, rank - 1)]
