"""Samples -> training rows: rewards normalised by group, every list's length checked, versions checked.

The last station where plug-ins have had their say; behind it a row is numbers only and never changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from vime.algo.advantages import group_signal
from vime.rollout.plugins import is_of_slime, plugin, plugin_args
from vime.rollout.routed_experts import routed_experts_column
from vime.seams import calling_plugin
from vime.types import (
    LARGEST_REWARD,
    HandoffError,
    PluginError,
    Sample,
    SampleStatus,
    StaleError,
    TrainGroup,
    TrainRow,
    tiling_fault,
)

_TRAINABLE = frozenset({SampleStatus.COMPLETED, SampleStatus.TRUNCATED})


def to_train_groups(args: Any, groups: list[list[Sample]], rollout_id: int) -> list[TrainGroup]:
    """Groups in the given order as rows of round `rollout_id`.

    `row.reward` is what --advantage-estimator makes of the group's rewards (or what --custom-reward-post-process-path
    answers), `row.raw_reward` the reward function's. Samples marked `remove_sample` count in the group's mean and leave
    the loss: their mask is 0. Raises HandoffError for anything misaligned and StaleError for a token outside the
    staleness bound.
    """
    for group in groups:
        _check_group(group)
        for sample in group:
            _check_alignment(sample)
            _check_versions(args, sample, rollout_id)
    rewards = _normalised(args, groups)
    return [
        TrainGroup(
            group_index=group[0].group_index,
            rows=tuple(
                _row(args, sample, reward, rollout_id) for sample, reward in zip(group, group_rewards, strict=True)
            ),
        )
        for group, group_rewards in zip(groups, rewards, strict=True)
    ]


def _row(args: Any, sample: Sample, reward: float, rollout_id: int) -> TrainRow:
    mask = [0] * sample.response_length if sample.remove_sample else list(sample.loss_mask)
    return TrainRow(
        sample_index=sample.index,
        group_index=sample.group_index,
        rollout_id=rollout_id,
        tokens=tuple(sample.tokens),
        response_length=sample.response_length,
        loss_mask=tuple(mask),
        rollout_log_probs=tuple(sample.rollout_log_probs),
        token_policy_versions=tuple(sample.token_policy_versions),
        reward=reward,
        raw_reward=_raw_reward(args, sample),
        status=str(sample.status),
        truncated=sample.status is SampleStatus.TRUNCATED,
        extra=_extra_columns(args, sample),
        attempt=sample.attempt,
    )


def _extra_columns(args: Any, sample: Sample) -> dict[str, Any]:
    """Optional columns that were asked for (--transfer-queue-extra-data-fields) and that this room writes."""
    writers = {"teacher_log_probs": _teacher_log_probs, "rollout_routed_experts": routed_experts_column}
    where = f"sample {sample.index} of group {sample.group_index}"
    return {
        name: write(args, sample, where)
        for name, write in writers.items()
        if name in args.transfer_queue_extra_data_fields
    }


def _teacher_log_probs(_args: Any, sample: Sample, where: str) -> tuple[float, ...]:
    values = sample.teacher_log_probs
    if values is None or len(values) != sample.response_length or not all(map(math.isfinite, values)):
        got = "none" if values is None else f"{len(values)} values"
        raise HandoffError(
            f"{where}: teacher_log_probs holds {got}, expected {sample.response_length} finite numbers, one per "
            "response token. The reward or generate plug-in must set sample.teacher_log_probs (--use-opd)."
        )
    return tuple(float(value) for value in values)


def _normalised(args: Any, groups: list[list[Sample]]) -> list[list[float]]:
    custom = plugin(args, "custom_reward_post_process_path")
    if custom is None:
        raw = [[_raw_reward(args, sample) for sample in group] for group in groups]
        if args.loss_type == "sft_loss":
            return raw
        divide_by_std = not args.disable_grpo_std_normalization
        return [
            group_signal(
                torch.tensor(reward, dtype=torch.float64),
                estimator=args.advantage_estimator,
                divide_by_std=divide_by_std,
            ).tolist()
            for reward in raw
        ]
    where = f"--custom-reward-post-process-path {args.custom_reward_post_process_path}"
    with calling_plugin(where, custom, expected="Expected a list of lists of numbers."):
        answer = [[float(reward) for reward in group] for group in _post_processed(custom, args, groups)]
    shape, expected = [len(group) for group in answer], [len(group) for group in groups]
    if shape != expected:
        raise PluginError(f"{where}: answered groups of sizes {shape[:8]}, expected {expected[:8]}.")
    for group, rewards in zip(groups, answer, strict=True):
        for sample, reward in zip(group, rewards, strict=True):
            if not abs(reward) <= LARGEST_REWARD:
                raise PluginError(
                    f"{where}: answered {reward} for sample {sample.index}, expected a finite number of at most "
                    f"{LARGEST_REWARD:.2g}. Guard the division."
                )
    return answer


def _post_processed(custom: Callable[..., Any], args: Any, groups: list[list[Sample]]) -> Any:
    """One of slime takes the samples of all groups in a row, and returns (raw rewards, rewards) of them."""
    if not is_of_slime(custom):
        return custom(args, groups)
    samples = [sample for group in groups for sample in group]
    answer = custom(plugin_args(custom, args), samples)
    flat = list(answer[1] if isinstance(answer, tuple) else answer)
    if len(flat) != len(samples):
        return [flat]
    taken = iter(flat)
    return [[next(taken) for _ in group] for group in groups]


def _raw_reward(args: Any, sample: Sample) -> float:
    """The reward function's answer; an answer to imitate (--loss-type sft_loss) needs none and counts 0."""
    if args.loss_type == "sft_loss" and sample.reward is None:
        return 0.0
    return sample.scalar_reward(args.reward_key)


def _check_group(group: list[Sample]) -> None:
    if not group:
        raise HandoffError("an empty group reached conversion. A rollout function must return whole groups.")
    indexes = {sample.group_index for sample in group}
    if len(indexes) > 1:
        raise HandoffError(f"one group holds samples of groups {sorted(indexes)}; expected a single group_index.")


def _check_alignment(sample: Sample) -> None:
    """Every per-token list covers the response exactly."""
    where = f"sample {sample.index} of group {sample.group_index}"
    if sample.status not in _TRAINABLE:
        raise HandoffError(f"{where} is {sample.status}: it cannot be trained on. Drop its group or finish the answer.")
    length = sample.response_length
    lengths = {"loss_mask": len(sample.loss_mask), "rollout_log_probs": len(sample.rollout_log_probs)}
    wrong = {name: value for name, value in lengths.items() if value != length}
    if length < 1 or wrong or len(sample.tokens) <= length:
        raise HandoffError(
            f"{where}: response_length {length}, tokens {len(sample.tokens)}, {lengths}. Expected a prompt, at least "
            "one response token and lists of response_length; grow answers with Sample.append_response_tokens only."
        )
    if not all(math.isfinite(value) for value in sample.rollout_log_probs):
        raise HandoffError(f"{where}: a log-probability is not finite. Look at the engine's logits.")
    if not set(sample.loss_mask) <= {0, 1}:
        raise HandoffError(f"{where}: loss_mask holds {sorted(set(sample.loss_mask))}, expected 0 and 1 only.")
    fault = tiling_fault(sample.token_policy_versions, length)
    if fault is not None:
        raise HandoffError(f"{where}: {fault}.")


def _check_versions(args: Any, sample: Sample, rollout_id: int) -> None:
    """Round r is trained by weights of version r: its tokens are of versions r - max staleness .. r.

    Not asked of recorded rollouts and of --debug-rollout-only, whose weights never move.
    """
    if args.debug_rollout_only or args.load_debug_rollout_data:
        return
    oldest, newest = sample.oldest_trainable_version, sample.weight_versions[-1]
    assert oldest is not None  # the spans tile the response
    bound = args.transferqueue_max_staleness
    is_too_old = any(sample.loss_mask) and rollout_id - oldest > bound  # context may be of any age
    if is_too_old or newest > rollout_id:
        raise StaleError(
            f"sample {sample.index} of group {sample.group_index}: versions {sample.weight_versions} in round "
            f"{rollout_id}, expected {max(0, rollout_id - bound)}..{rollout_id}: --transferqueue-max-staleness {bound}."
        )
