"""Numbers about generated samples, under the names that trackers show."""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from vime.config.parse import Args
from vime.data.rows import SampleFacts
from vime.rollout.sample_rows import by_sample
from vime.types import Sample, SampleStatus

TASK_KEY = "reasoning_gym"  # written by `reasoning_gym_tasks`
MAX_SOURCES, MAX_REASONS, OTHER = 16, 32, "other"
"""How many sources, and reasons of drops, have metrics of their own; the rarer ones of a round count together."""
SHORTEST = 16
"""Completions with fewer tokens share one length bucket; each further bucket is twice as wide."""


def sample_metrics(args: Args, samples: Sequence[Sample], prefix: str) -> dict[str, float]:
    """Return `completion_metrics` of samples."""
    return completion_metrics(row_facts(args, samples), prefix)


def row_facts(args: Args, rows: Sequence[Sample]) -> list[SampleFacts]:
    """Return the numbers of each row; `rows`: of whole groups."""
    return [
        _row_facts(args, row, is_first_row=place == 0) for of_one in by_sample(rows) for place, row in enumerate(of_one)
    ]


def _row_facts(args: Args, sample: Sample, *, is_first_row: bool) -> SampleFacts:
    return SampleFacts(
        reward=sample.scalar_reward(args.reward_key),
        response_length=sample.response_length,
        is_truncated=sample.status is SampleStatus.TRUNCATED,
        is_removed=sample.remove_sample,
        entries=reward_entries(sample),
        source=source_of(sample, args.source_key),
        oldest_version=min(sample.weight_versions, default=-1),
        newest_version=max(sample.weight_versions, default=-1),
        is_first_row=is_first_row,
    )


def completion_metrics(completions: Sequence[SampleFacts], prefix: str) -> dict[str, float]:
    """Return reward, length (tokens) and truncation, and more by reward entry, source and length; empty without
    completions. Rewards and numbers of samples count a sample of several rows once; lengths and truncation are of each
    row."""
    if not completions:
        return {}
    samples = [completion for completion in completions if completion.is_first_row]
    rewards = [sample.reward for sample in samples]
    lengths = sorted(completion.response_length for completion in completions)
    return {
        f"{prefix}/reward_mean": statistics.fmean(rewards),
        f"{prefix}/reward_std": statistics.pstdev(rewards),
        f"{prefix}/response_len_mean": statistics.fmean(lengths),
        f"{prefix}/response_len_p50": float(percentile(lengths, 0.50)),
        f"{prefix}/response_len_p95": float(percentile(lengths, 0.95)),
        f"{prefix}/response_len_max": float(lengths[-1]),
        f"{prefix}/truncated_ratio": sum(completion.is_truncated for completion in completions) / len(completions),
        f"{prefix}/num_samples": float(len(samples)),
        f"{prefix}/num_tokens": float(sum(lengths)),
        **entry_metrics(samples, prefix),
        **source_metrics(completions, prefix),
        **length_metrics(samples, prefix),
    }


def num_removed(completions: Iterable[SampleFacts]) -> int:
    """Return how many samples are left out of the loss with all of their rows."""
    is_removed: list[bool] = []
    for completion in completions:
        if completion.is_first_row:
            is_removed.append(completion.is_removed)
        else:
            is_removed[-1] &= completion.is_removed
    return sum(is_removed)


def reward_entries(sample: Sample) -> dict[str, float] | None:
    """Return the finite numbers of a dict reward, by their names in metrics; None for another reward."""
    if not isinstance(sample.reward, Mapping):
        return None
    return {
        metric_name(name): float(value)
        for name, value in sample.reward.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }


def entry_metrics(completions: Sequence[SampleFacts], prefix: str) -> dict[str, float]:
    """Return mean and deviation of each entry of dict rewards, over the completions that have it."""
    entries: dict[str, list[float]] = {}
    for completion in completions:
        for name, value in (completion.entries or {}).items():
            entries.setdefault(name, []).append(value)
    found: dict[str, float] = {}
    for name, values in entries.items():
        found[f"{prefix}/reward/{name}/mean"] = statistics.fmean(values)
        found[f"{prefix}/reward/{name}/std"] = statistics.pstdev(values)
    return found


def source_metrics(completions: Sequence[SampleFacts], prefix: str) -> dict[str, float]:
    """Return reward and share of the samples of each data source, which their first rows name, and the length of its
    rows; empty when none names one."""
    if not any(completion.source for completion in completions):
        return {}
    counts = Counter(completion.source or OTHER for completion in completions)
    frequent = {name for name, _ in counts.most_common(MAX_SOURCES)}
    members: dict[str, list[SampleFacts]] = {}
    for completion in completions:
        members.setdefault(completion.source if completion.source in frequent else OTHER, []).append(completion)
    num_samples = sum(completion.is_first_row for completion in completions)
    found: dict[str, float] = {}
    for name, of_source in sorted(members.items()):
        rewards = [completion.reward for completion in of_source if completion.is_first_row]
        if rewards:  # a later row may name a source of its own
            found[f"{prefix}/by_source/{name}/reward_mean"] = statistics.fmean(rewards)
        found[f"{prefix}/by_source/{name}/response_len_mean"] = statistics.fmean(
            completion.response_length for completion in of_source
        )
        found[f"{prefix}/by_source/{name}/share"] = len(rewards) / num_samples
    return found


def length_metrics(samples: Sequence[SampleFacts], prefix: str) -> dict[str, float]:
    """Return the reward by length of a sample's first row: buckets of tokens, each twice as wide as the one before."""
    members: dict[int, list[float]] = {}
    for sample in samples:
        members.setdefault(_bucket(sample.response_length), []).append(sample.reward)
    found: dict[str, float] = {}
    for low, values in sorted(members.items()):
        name = f"{low}_{max(2 * low, SHORTEST) - 1}"
        found[f"{prefix}/by_length/{name}/reward_mean"] = statistics.fmean(values)
        found[f"{prefix}/by_length/{name}/share"] = len(values) / len(samples)
    return found


def pass_metrics(args: Args, samples: Sequence[Sample], prefix: str) -> dict[str, float]:
    """Return pass@k of an evaluation for k = 1, 2, 4, ... up to the number of completions: the chance that at least one
    of k completions, drawn without repetition from the n of a prompt, is right. It is 1 - C(n - c, k) / C(n, k) with c
    right ones (Chen et al., arXiv 2107.03374), averaged over the prompts. Right: a reward of at least --pass-reward."""
    rights: dict[int, list[bool]] = {}
    for sample, *_ in by_sample(samples):
        is_right = sample.scalar_reward(args.reward_key) >= args.pass_reward
        rights.setdefault(sample.group_index, []).append(is_right)
    most = min((len(completions) for completions in rights.values()), default=0)
    sizes = sorted({*(1 << power for power in range(most.bit_length())), most} - {0})
    return {
        f"{prefix}/pass@{size}": statistics.fmean(_pass_at(size, completions) for completions in rights.values())
        for size in sizes
    }


def source_of(sample: Sample, key: str) -> str:
    """Return the data source that the metadata names, or the reasoning-gym task; empty when there is none."""
    named = sample.metadata.get(key)
    if named is None and isinstance(task := sample.metadata.get(TASK_KEY), Mapping):
        named = task.get("task")
    return "" if named is None else metric_name(named)


def metric_name(value: object) -> str:
    """Return the value as a part of a metric's name, which `/` would split: `openai/gsm8k` -> `openai_gsm8k`."""
    return re.sub(r"[^\w.-]+", "_", str(value))[:64] or "_"


def _bucket(length: int) -> int:
    """Return the smallest length of the bucket: 0, 16, 32, 64, ..."""
    return 0 if length < SHORTEST else 1 << (length.bit_length() - 1)


def _pass_at(size: int, completions: Iterable[bool]) -> float:
    marks = list(completions)
    wrong = len(marks) - sum(marks)
    return 1.0 - math.comb(wrong, size) / math.comb(len(marks), size)


def version_metrics(completions: Sequence[SampleFacts], prefix: str) -> dict[str, float]:
    """Return the oldest and newest policy version among the response tokens."""
    known = [completion for completion in completions if completion.newest_version >= 0]
    if not known:
        return {}
    return {
        f"{prefix}/version_oldest": float(min(completion.oldest_version for completion in known)),
        f"{prefix}/version_newest": float(max(completion.newest_version for completion in known)),
    }


def drop_metrics(dropped: Mapping[str, int]) -> dict[str, float]:
    """Return the number of dropped groups, in all and by reason. Reasons are text of plug-ins and jobs: the rarer ones
    of a round count together."""
    by_name = Counter[str]()
    for reason, count in dropped.items():
        by_name[metric_name(reason)] += count
    frequent = {name for name, _ in by_name.most_common(MAX_REASONS)}
    found = {"rollout/dropped_groups": float(sum(dropped.values()))}
    for name, count in sorted(by_name.items()):
        metric = f"rollout/dropped_{name if name in frequent else OTHER}"
        found[metric] = found.get(metric, 0.0) + count
    return found


def percentile(ordered: Sequence[int], share: float) -> int:
    """Nearest rank: the smallest entry that at least `share` of all entries do not exceed. 0.95 of 1..20 is 19."""
    rank = -(-len(ordered) * round(share * 100) // 100)
    return ordered[max(0, rank - 1)]
