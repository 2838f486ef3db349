"""Numbers about generated samples, under the names that trackers show."""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vime.types import Sample, SampleStatus

TASK_KEY = "reasoning_gym"  # of what `reasoning_gym_tasks` writes
MAX_SOURCES, OTHER = 16, "other"
"""Sources with metrics of their own; the rarer ones of a round count together."""
SHORTEST = 16
"""Answers below so many tokens are in one bucket of length; each further bucket is twice as wide."""


def sample_metrics(args: Any, samples: Sequence[Sample], prefix: str) -> dict[str, float]:
    """Reward, length (tokens) and truncation of `samples`, and more by entry of the reward, source and length;
    empty for no samples."""
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
        **entry_metrics(samples, prefix),
        **source_metrics(args.source_key, samples, rewards, prefix),
        **length_metrics(samples, rewards, prefix),
    }


def entry_metrics(samples: Sequence[Sample], prefix: str) -> dict[str, float]:
    """Mean and deviation of each entry of dict rewards, over the samples that have it as a finite number."""
    entries: dict[str, list[float]] = {}
    for sample in samples:
        if isinstance(sample.reward, Mapping):
            for name, value in sample.reward.items():
                if isinstance(value, int | float) and math.isfinite(value):
                    entries.setdefault(metric_name(name), []).append(float(value))
    found: dict[str, float] = {}
    for name, values in entries.items():
        found[f"{prefix}/reward/{name}/mean"] = statistics.fmean(values)
        found[f"{prefix}/reward/{name}/std"] = statistics.pstdev(values)
    return found


def source_metrics(key: str, samples: Sequence[Sample], rewards: Sequence[float], prefix: str) -> dict[str, float]:
    """Reward, length and share of the samples of each data source; empty when no sample names one."""
    names = [source_of(sample, key) for sample in samples]
    if not any(names):
        return {}
    counts = Counter(name or OTHER for name in names)
    frequent = {name for name, _ in counts.most_common(MAX_SOURCES)}
    members: dict[str, list[int]] = {}
    for number, name in enumerate(names):
        members.setdefault(name if name in frequent else OTHER, []).append(number)
    found: dict[str, float] = {}
    for name, numbers in sorted(members.items()):
        found[f"{prefix}/by_source/{name}/reward_mean"] = statistics.fmean(rewards[number] for number in numbers)
        found[f"{prefix}/by_source/{name}/response_len_mean"] = statistics.fmean(
            samples[number].response_length for number in numbers
        )
        found[f"{prefix}/by_source/{name}/share"] = len(numbers) / len(samples)
    return found


def length_metrics(samples: Sequence[Sample], rewards: Sequence[float], prefix: str) -> dict[str, float]:
    """Reward of short and of long answers: by buckets of tokens, each twice as wide as the one before."""
    members: dict[int, list[float]] = {}
    for sample, reward in zip(samples, rewards, strict=True):
        members.setdefault(_bucket(sample.response_length), []).append(reward)
    found: dict[str, float] = {}
    for low, values in sorted(members.items()):
        name = f"{low}_{max(2 * low, SHORTEST) - 1}"
        found[f"{prefix}/by_length/{name}/reward_mean"] = statistics.fmean(values)
        found[f"{prefix}/by_length/{name}/share"] = len(values) / len(samples)
    return found


def pass_metrics(args: Any, samples: Sequence[Sample], prefix: str) -> dict[str, float]:
    """pass@k of an evaluation, for k = 1, 2, 4, ... and the number of answers: the chance that of k answers to a
    prompt, drawn from its n without repetition, one is right. 1 - C(n - c, k) / C(n, k) with c right ones (Chen et al.,
    arXiv 2107.03374), mean over the prompts. Right: a reward of at least --pass-reward."""
    rights: dict[int, list[bool]] = {}
    for sample in samples:
        is_right = sample.scalar_reward(args.reward_key) >= args.pass_reward
        rights.setdefault(sample.group_index, []).append(is_right)
    most = min((len(answers) for answers in rights.values()), default=0)
    sizes = sorted({*(1 << power for power in range(most.bit_length())), most} - {0})
    return {
        f"{prefix}/pass@{size}": statistics.fmean(_pass_at(size, answers) for answers in rights.values())
        for size in sizes
    }


def source_of(sample: Sample, key: str) -> str:
    """The data source that the metadata names, or the reasoning-gym task; empty when there is none."""
    named = sample.metadata.get(key)
    if named is None and isinstance(task := sample.metadata.get(TASK_KEY), Mapping):
        named = task.get("task")
    return "" if named is None else metric_name(named)


def metric_name(value: object) -> str:
    """`openai/gsm8k` -> `openai_gsm8k`: a part of a metric's name, which `/` would divide."""
    return re.sub(r"[^\w.-]+", "_", str(value))[:64] or "_"


def _bucket(length: int) -> int:
    """The smallest length of the bucket: 0, 16, 32, 64, ..."""
    return 0 if length < SHORTEST else 1 << (length.bit_length() - 1)


def _pass_at(size: int, answers: Iterable[bool]) -> float:
    marks = list(answers)
    wrong = len(marks) - sum(marks)
    return 1.0 - math.comb(wrong, size) / math.comb(len(marks), size)


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
