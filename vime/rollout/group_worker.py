"""What happens to one prompt group, the same in every mode: generate, score, filter, then keep or drop it.

    take -> resume -> generate and score -> finish -> keep        the group will be trained
                                                   -> drop        with a reason
                                                   -> give_back   unfinished, or not needed now: it is generated again

A mode says where prompts come from and where a group goes: `worker.RolloutWorker` (mode streaming) asks the ledger and
stores each group, `vllm_rollout.RoundWorker` (modes off and buffer) asks the data source for one round. Evaluation
calls `generate_and_rm_group` by itself.
"""

from __future__ import annotations

import asyncio
import copy
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from vime.config.deadlines import generate_function_deadline_s
from vime.config.parse import Args
from vime.handoff.ledger_types import Task
from vime.observability.events import span
from vime.protocols import SamplingParams, calling_plugin
from vime.rollout.abort_scope import AbortScope, is_aborting
from vime.rollout.drop_limit import DropStreak
from vime.rollout.exchanges import PromptTokens, complete, recording
from vime.rollout.generation import generate_group, train_sampling_params
from vime.rollout.images import CHANGED
from vime.rollout.loops import raise_first
from vime.rollout.partial import (
    FINISHED,
    MIXED,
    OPEN,
    PartialStats,
    is_unfinished,
    num_response_tokens,
    settle_versions,
)
from vime.rollout.plugins import generate_call, plugin, plugin_args
from vime.rollout.request_priority import set_request_priority
from vime.rollout.reward_errors import REASON, ErrorShare, error_of, mark_or_raise
from vime.rollout.rm_hub import async_rm, batched_async_rm
from vime.rollout.sample_recorder import RECORDER
from vime.rollout.sample_rows import TURNS, by_sample
from vime.types import DynamicFilterOutput, PluginError, RewardError, Sample, SampleStatus, Version
from vime.utils.failpoints import Point, failpoint
from vime.utils.waits import waiting

UNUSABLE = frozenset({SampleStatus.ABORTED, SampleStatus.FAILED})


@dataclass(slots=True)
class WorkerStats:
    """Counts since the last `take_stats`."""

    committed_groups: int = 0
    late_groups: int = 0  # finished after their lease had gone to another attempt
    retried_groups: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    rewards: list[float] = field(default_factory=list)  # of every finished sample, also of dropped groups
    response_tokens: int = 0
    put_times_s: list[float] = field(default_factory=list)
    partial: PartialStats = field(default_factory=PartialStats)
    prompts: PromptTokens = field(default_factory=PromptTokens)

    @classmethod
    def joined(cls, parts: Sequence[WorkerStats]) -> WorkerStats:
        """Return the sum over several workers."""
        whole = cls()
        for part in parts:
            whole.committed_groups += part.committed_groups
            whole.late_groups += part.late_groups
            whole.retried_groups += part.retried_groups
            whole.dropped += part.dropped
            whole.rewards += part.rewards
            whole.response_tokens += part.response_tokens
            whole.put_times_s += part.put_times_s
            whole.partial.add(part.partial)
            whole.prompts.add(part.prompts)
        return whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """A group to generate. `prompts`: its samples as the data source returned them. `partial` names tokens of an
    earlier attempt in the spool; `serving`: the newest weights that every engine had when the group was issued."""

    task: Task
    prompts: list[Sample]
    serving: Version
    partial: tuple[Task, int] | None = None


class GroupWorker(ABC):
    """Runs on the rollout loop; each group is an asyncio task of its own. An error of a plug-in, or a lost engine, ends
    all of them and is raised by `run`."""

    def __init__(self, args: Args, errors: ErrorShare) -> None:
        self._args, self._errors, self._streak = args, errors, DropStreak(args)
        self.stats = WorkerStats()
        self._running: dict[Task, asyncio.Task[None]] = {}
        self._abort_scope = AbortScope()

    @property
    def num_running(self) -> int:
        return len(self._running)

    async def run(self) -> None:
        """Work until `take` returns no more prompts, then finish the remaining groups with `end`."""
        self._abort_scope.activate()
        try:
            async with asyncio.TaskGroup() as tasks:
                watch = tasks.create_task(self.watch())
                while assignments := await self.take():
                    for assignment in assignments:
                        work = tasks.create_task(self.produce(assignment))
                        self._running[assignment.task] = work
                        work.add_done_callback(partial(self._note_end, assignment.task))
                watch.cancel()
                await self.end()
        except BaseExceptionGroup as failures:
            raise_first(failures)

    @abstractmethod
    async def take(self) -> list[Assignment]:
        """Wait for the next groups to generate and return them. An empty list: this worker must end."""

    async def watch(self) -> None:  # noqa: B027  nothing to do in one of the modes
        """Run beside the work; cancelled when the work ends."""

    async def end(self) -> None:  # noqa: B027  nothing to do in one of the modes
        """Called when `take` has no more prompts: handle the groups that are still in progress."""

    async def resume(self, assignment: Assignment) -> list[Sample]:
        """Return the group as an earlier attempt left it, or its prompts."""
        return assignment.prompts

    @abstractmethod
    async def keep(self, assignment: Assignment, samples: list[Sample]) -> bool:
        """Hand the group over to be trained. Returns whether it may be: what else became of it is noted."""

    async def note_dropped(self, assignment: Assignment, reason: str) -> None:  # noqa: B027  nothing to do in one of the modes
        """Note that the group will not be trained; its statistics are counted already."""

    @abstractmethod
    async def give_back(self, assignment: Assignment, samples: list[Sample], reason: str) -> None:
        """Ask for the group again; tokens that it has are kept where the mode does that."""

    @abstractmethod
    def oldest(self, samples: Sequence[Sample]) -> Version:
        """Return the oldest version that a trained token of the finished group may have."""

    async def produce(self, assignment: Assignment) -> None:
        """Generate one group, then keep, drop or give it back."""
        await self.finish(assignment, await self.generate(assignment))

    async def generate(self, assignment: Assignment) -> list[Sample]:
        """Return the group with completions and rewards."""
        group = await self.resume(assignment)
        set_request_priority(group[0].group_index)
        return await generate_and_rm_group(self._args, group, train_sampling_params(self._args))

    async def finish(self, assignment: Assignment, samples: list[Sample]) -> None:
        """Decide about a group whose generation has ended."""
        args, stats = self._args, self.stats
        stats.response_tokens += num_response_tokens(samples)
        if is_unfinished(samples):
            await self.give_back(assignment, samples, "aborted")
            return
        reason = unusable_reason(samples)
        if reason is None:
            stats.rewards += [rows[0].scalar_reward(args.reward_key) for rows in by_sample(samples)]
            reason = settle_versions(args, samples, stats.partial, oldest=self.oldest(samples))
        if reason == MIXED:
            await self.settle_mixed(assignment, samples)
            return
        if reason is None:
            verdict = filter_verdict(args, samples)
            reason = None if verdict.keep else verdict.reason or "filter"
        if reason is None:
            self._errors.note(samples)
            if await self.keep(assignment, samples):
                self._streak.kept()
        else:
            await self.drop(assignment, samples, reason)

    async def settle_mixed(self, assignment: Assignment, samples: list[Sample]) -> None:
        """Give back or drop a group that --mixed-version-policy reject does not train, as --stale-policy says."""
        if self._args.stale_policy == "retry":
            await self.give_back(assignment, samples, MIXED)
        else:
            await self.drop(assignment, samples, MIXED)

    async def drop(self, assignment: Assignment, samples: list[Sample], reason: str) -> None:
        self.stats.dropped[reason] += 1
        RECORDER.note_dropped(assignment.task.group, reason, samples)
        await self.note_dropped(assignment, reason)
        self._errors.note(samples)
        self._streak.dropped(reason)

    def _note_end(self, task: Task, _work: asyncio.Task[None]) -> None:
        self._running.pop(task, None)
        self.ended()

    def ended(self) -> None:  # noqa: B027  nothing to do in one of the modes
        """Called when a group is no longer in progress."""


async def generate_and_rm_group(
    args: Args, group: list[Sample], sampling_params: SamplingParams, *, evaluation: bool = False
) -> list[Sample]:
    """Return completions and rewards for one prompt.

    Consumes the pending and aborted samples (they are written in place); finished ones stay as they are. Waits for the
    engines and the reward function, each with its own deadline. Rewards that a custom generate function has set are
    kept. A group gets no reward if one of its samples came back aborted or failed, or if generation is being aborted.
    With --on-reward-error drop a group whose reward failed is returned with status failed. What only rewards need
    (`TURNS`) is not returned.
    """
    failpoint(Point.GENERATE)
    number = group[0].group_index
    with span("generate_group", group=number):
        samples = await _generate(args, group, sampling_params, evaluation=evaluation)
    try:
        await _reward(args, samples, number)
    finally:
        for sample in samples:
            sample.metadata.pop(TURNS, None)
    return samples


async def _reward(args: Args, samples: list[Sample], number: int) -> None:
    waiting = [rows for rows in by_sample(samples) if any(row.reward is None for row in rows)]
    for rows in waiting:
        if any(row.reward is not None for row in rows):
            raise PluginError(
                f"--custom-generate-function-path: sample {rows[0].index} of group {number} has {len(rows)} rows, and "
                "only some of them have a reward; expected the same on all, or none. Rows that are samples by "
                "themselves need an index of their own."
            )
    if any(sample.status in UNUSABLE for sample in samples) or is_aborting():
        return
    try:
        if waiting:
            failpoint(Point.REWARD)
            with span("reward_group", group=number):
                await _score(args, samples, waiting)
        for sample in samples:
            sample.scalar_reward(args.reward_key)  # a generate function may have set a reward that cannot be used
    except RewardError as error:
        mark_or_raise(args, samples, error)


async def _score(args: Args, samples: list[Sample], waiting: list[list[Sample]]) -> None:
    """Set the rewards. The reward function is asked once for a sample of several rows, about its last one: the branch
    that ended last, whose metadata has the turns of all."""
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
    deadline_s = generate_function_deadline_s(args.config)
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
