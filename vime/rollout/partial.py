"""Completions made in several parts: which tokens of an earlier attempt are continued, and which may be trained.

An aborted group keeps each completion's tokens, log-probabilities and versions. When it is resumed its finished
completions stay, the others continue after their last token, and a completion that no round could train any more begins
again: after a version v that all engines serve, a token older than v - max staleness will never be within the bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from vime.config.parse import Args
from vime.types import Sample, SampleStatus, Version

FINISHED = frozenset({SampleStatus.COMPLETED, SampleStatus.TRUNCATED})
OPEN = frozenset({SampleStatus.PENDING, SampleStatus.ABORTED})
MIXED = "mixed_versions"
"""Reason of a group that --mixed-version-policy reject dropped."""


@dataclass(slots=True)
class PartialStats:
    """Counts of completions made in several parts."""

    partial_groups: int = 0  # aborted, and kept for later
    partial_tokens: int = 0  # response tokens in them
    resumed_groups: int = 0
    resumed_tokens: int = 0  # response tokens that were not sampled again
    discarded_tokens: int = 0  # response tokens sampled again because they had become too old
    masked_tokens: int = 0  # taken out of the loss by --mixed-version-policy mask

    def add(self, other: PartialStats) -> None:
        for entry in fields(self):
            setattr(self, entry.name, getattr(self, entry.name) + getattr(other, entry.name))

    def metrics(self) -> dict[str, float]:
        return {
            "rollout/partial_groups": float(self.partial_groups),
            "rollout/partial_tokens": float(self.partial_tokens),
            "rollout/resumed_groups": float(self.resumed_groups),
            "rollout/resumed_tokens": float(self.resumed_tokens),
            "rollout/discarded_tokens": float(self.discarded_tokens),
            "rollout/masked_tokens": float(self.masked_tokens),
        }


def is_unfinished(samples: Sequence[Sample]) -> bool:
    """Return whether a completion, or a reward, of the group is missing and may still come."""
    if any(sample.status is SampleStatus.FAILED for sample in samples):
        return False
    return any(sample.status in OPEN or sample.reward is None for sample in samples)


def num_response_tokens(samples: Sequence[Sample]) -> int:
    return sum(sample.response_length for sample in samples)


def oldest_allowed(args: Args, version: Version) -> Version:
    """Return the oldest version that a token may have when weights of `version` train on it."""
    if args.debug_rollout_only:  # nothing is trained, and the weights never move
        return 0
    return max(0, version - int(args.transferqueue_max_staleness))


def may_mix(args: Args) -> bool:
    """Return whether newer weights may continue a completion that older ones began."""
    policy = args.mixed_version_policy
    return bool(policy == "mask" or (policy != "reject" and args.transferqueue_max_staleness > 0))


def without_completion(sample: Sample) -> Sample:
    """Return the prompt alone, for a data source that cannot return a group by its number."""
    return Sample(
        group_index=sample.group_index,
        index=sample.index,
        session_id=sample.session_id,
        prompt=sample.prompt,
        tokens=sample.tokens[: sample.prompt_length],
        multimodal_inputs=sample.multimodal_inputs,
        multimodal_train_inputs=sample.multimodal_train_inputs,
        label=sample.label,
        metadata=sample.metadata,
    )


def resume(
    args: Args, kept: Sequence[Sample], fresh: Sequence[Sample], stats: PartialStats, *, oldest: Version
) -> list[Sample]:
    """Return the group to continue: each completion as `kept`, or replaced by the `fresh` one.

    `oldest`: see `oldest_allowed`. When a generate function returns several samples for one prompt and one of them is
    too old, the whole prompt is generated again.
    """
    usable = [_is_usable(args, sample, oldest) for sample in kept]
    if [sample.index for sample in kept] == [sample.index for sample in fresh]:
        group = [mine if is_kept else new for mine, new, is_kept in zip(kept, fresh, usable, strict=True)]
    elif all(usable):
        group = list(kept)
    else:
        group, usable = list(fresh), [False] * len(kept)
    num_kept = sum(sample.response_length for sample, is_kept in zip(kept, usable, strict=True) if is_kept)
    stats.resumed_groups += num_kept > 0
    stats.resumed_tokens += num_kept
    stats.discarded_tokens += num_response_tokens(kept) - num_kept
    return group


def settle_versions(args: Args, samples: Sequence[Sample], stats: PartialStats, *, oldest: Version) -> str | None:
    """Apply --mixed-version-policy to a finished group; return why it is refused, or None.

    `mask`: a token leaves the loss when it is older than the newest token of its completion, or older than `oldest`. It
    stays in the context, and its reward stays in the group's mean.
    """
    if args.mixed_version_policy == "reject":
        return MIXED if any(len(trainable_versions(sample)) > 1 for sample in samples) else None
    if args.mixed_version_policy == "mask":
        for sample in samples:
            stats.masked_tokens += _mask_before(sample, max({oldest, *trainable_versions(sample)}))
    return None


def trainable_versions(sample: Sample) -> set[Version]:
    """Return the versions that sampled the tokens of the loss."""
    spans = sample.token_policy_versions
    return {span.version for span in spans if any(sample.loss_mask[span.start : span.end])}


def _is_usable(args: Args, sample: Sample, oldest: Version) -> bool:
    """Return whether continuing it gives tokens to train on."""
    versions = trainable_versions(sample)
    if sample.response_length == 0 or not versions:
        return sample.response_length > 0
    if args.mixed_version_policy == "mask":  # what is too old is masked, and there will be new tokens
        return sample.status in OPEN or max(versions) >= oldest
    return min(versions) >= oldest


def _mask_before(sample: Sample, version: Version) -> int:
    """Take the tokens that older weights sampled out of the loss; return how many of them were in it."""
    num_masked = 0
    for span in sample.token_policy_versions:
        if span.version < version:
            num_masked += sum(sample.loss_mask[span.start : span.end])
            sample.loss_mask[span.start : span.end] = [0] * (span.end - span.start)
    return num_masked
