"""One group: generate completions, check them, reward them. Used by training rounds and by evaluation."""

from __future__ import annotations

import asyncio
import copy

from vime.config.deadlines import generate_deadline_s
from vime.config.parse import Args
from vime.observability.events import span
from vime.protocols import SamplingParams, calling_plugin
from vime.rollout.abort_scope import is_aborting
from vime.rollout.exchanges import complete, recording
from vime.rollout.generation import generate_group
from vime.rollout.images import CHANGED
from vime.rollout.loops import raise_first
from vime.rollout.partial import FINISHED, OPEN
from vime.rollout.plugins import generate_call, plugin, plugin_args
from vime.rollout.reward_errors import REASON, error_of, mark_or_raise
from vime.rollout.rm_hub import async_rm, batched_async_rm
from vime.rollout.sample_rows import by_sample
from vime.types import DynamicFilterOutput, PluginError, RewardError, Sample, SampleStatus
from vime.utils.failpoints import Point, failpoint
from vime.utils.waits import waiting

UNUSABLE = frozenset({SampleStatus.ABORTED, SampleStatus.FAILED})


async def generate_and_rm_group(
    args: Args, group: list[Sample], sampling_params: SamplingParams, *, evaluation: bool = False
) -> list[Sample]:
    """Return completions and rewards for one prompt.

    Consumes the pending and aborted samples (they are written in place); finished ones stay as they are. Waits for the
    engines and the reward function, each with its own deadline. Rewards that a custom generate function has set are
    kept. A group gets no reward if one of its samples came back aborted or failed, or if generation is being aborted.
    With --on-reward-error drop a group whose reward failed is returned with status failed.
    """
    failpoint(Point.GENERATE)
    number = group[0].group_index
    with span("generate_group", group=number):
        samples = await _generate(args, group, sampling_params, evaluation=evaluation)
    waiting = [rows for rows in by_sample(samples) if any(row.reward is None for row in rows)]
    for rows in waiting:
        if any(row.reward is not None for row in rows):
            raise PluginError(
                f"--custom-generate-function-path: sample {rows[0].index} of group {number} has {len(rows)} rows, and "
                "only some of them have a reward; expected the same on all, or none. Rows that are samples by "
                "themselves need an index of their own."
            )
    if any(sample.status in UNUSABLE for sample in samples) or is_aborting():
        return samples
    try:
        if waiting:
            failpoint(Point.REWARD)
            with span("reward_group", group=number):
                await _score(args, samples, waiting)
        for sample in samples:
            sample.scalar_reward(args.reward_key)  # a generate function may have set a reward that cannot be used
    except RewardError as error:
        mark_or_raise(args, samples, error)
    return samples


async def _score(args: Args, samples: list[Sample], waiting: list[list[Sample]]) -> None:
    """Set the rewards. The reward function is asked once for a sample of several rows, about its last one: the branch
    that ended last."""
    if args.group_rm:
        waiting = by_sample(samples)
    asked = [rows[-1] for rows in waiting]
    if len(asked) == 1 and not args.group_rm:
        rewards = [await async_rm(args, asked[0])]
    else:
        rewards = await batched_async_rm(args, asked)
    for rows, reward in zip(waiting, rewards, strict=True):
        for row in rows:
            row.reward = reward


def unusable_reason(samples: list[Sample]) -> str | None:
    """Return why a group cannot be trained, whatever a filter would decide; None when it can."""
    if error_of(samples):
        return REASON
    if any(CHANGED in sample.metadata for sample in samples):
        return CHANGED
    return next((str(sample.status) for sample in samples if sample.status in UNUSABLE), None)


def filter_verdict(args: Args, samples: list[Sample]) -> DynamicFilterOutput:
    """Return the verdict of --dynamic-sampling-filter-path on a finished group; without a filter the group is kept."""
    keep = plugin(args, "dynamic_sampling_filter_path")
    if keep is None:
        return DynamicFilterOutput(keep=True)
    where = f"--dynamic-sampling-filter-path {args.dynamic_sampling_filter_path}"
    with calling_plugin(where, keep, expected=f"It was given a group of {len(samples)}."):
        verdict = keep(plugin_args(keep, args), samples)
    said, reason = (verdict.keep, verdict.reason) if isinstance(verdict, DynamicFilterOutput) else (verdict, None)
    said = said.item() if hasattr(said, "item") else said  # from numpy or torch
    if isinstance(said, bool):
        return DynamicFilterOutput(keep=said, reason=reason)
    raise PluginError(f"{where}: returned {type(verdict).__name__}, expected bool or DynamicFilterOutput.")


def mark_samples(args: Args, groups: list[list[Sample]]) -> None:
    """Let --rollout-sample-filter-path set `remove_sample` on samples of a round."""
    mark = plugin(args, "rollout_sample_filter_path")
    if mark is None:
        return
    with calling_plugin(f"--rollout-sample-filter-path {args.rollout_sample_filter_path}", mark):
        mark(plugin_args(mark, args), groups)


async def _generate(
    args: Args, group: list[Sample], sampling_params: SamplingParams, *, evaluation: bool
) -> list[Sample]:
    todo = [sample for sample in group if sample.status in OPEN]
    if plugin(args, "custom_generate_function_path") is None:
        if todo:
            await generate_group(args, todo, sampling_params)
        return group
    try:
        async with asyncio.TaskGroup() as tasks:
            pending = [
                tasks.create_task(_generate_custom(args, sample, sampling_params, evaluation=evaluation))
                if sample.status in OPEN
                else sample
                for sample in group
            ]
    except BaseExceptionGroup as failures:
        raise_first(failures)
    return [sample for entry in pending for sample in ([entry] if isinstance(entry, Sample) else entry.result())]


async def _generate_custom(
    args: Args, sample: Sample, sampling_params: SamplingParams, *, evaluation: bool
) -> list[Sample]:
    """Call the custom generate function, which returns one sample or a list of them (fan-out)."""
    function = plugin(args, "custom_generate_function_path")
    assert function is not None
    where = f"--custom-generate-function-path {args.custom_generate_function_path}, sample {sample.index}"
    deadline_s = generate_deadline_s(args.config)
    group_index, index = sample.group_index, sample.index
    call = generate_call(function, args, sample, copy.deepcopy(sampling_params), evaluation=evaluation)
    try:
        with waiting("--custom-generate-function-path", deadline_s=deadline_s):
            async with asyncio.timeout(deadline_s):
                with recording(args, sample) as record, calling_plugin(where, function, expected="Expected a Sample."):
                    returned = await call()
    except TimeoutError as error:
        raise PluginError(f"{where}: did not return within {deadline_s:g} s. Raise --generate-timeout-secs.") from error
    answers: list[object] = returned if isinstance(returned, list) else [returned]
    if not answers:
        raise PluginError(f"{where}: returned an empty list, expected at least one Sample.")
    samples: list[Sample] = []
    for entry in answers:
        if not isinstance(entry, Sample):
            raise PluginError(f"{where}: returned {type(entry).__name__}, expected a Sample or a list of them.")
        entry.status = _status(entry.status, where)
        if entry.status is SampleStatus.PENDING:
            raise PluginError(f"{where}: returned a sample whose status is still pending. Set sample.status.")
        entry.group_index = group_index
        entry.index = index if entry.index is None or entry.index < 0 else entry.index
        if entry.status in FINISHED:
            complete(entry, record, where=where)
        samples.append(entry)
    return samples


def _status(value: object, where: str) -> SampleStatus:
    """Return the status, which plug-ins may have given by name."""
    try:
        return SampleStatus(str(getattr(value, "value", value)))
    except ValueError:
        raise PluginError(
            f"{where}: returned a sample of status {value!r}, expected one of {', '.join(SampleStatus)}."
        ) from None
