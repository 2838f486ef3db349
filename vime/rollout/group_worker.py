"""What happens to one prompt group, the same in every mode: generate, score, filter, then keep or drop it.

    take -> resume -> generate and score -> finish -> keep        the group will be trained
                                                   -> drop        with a reason
                                                   -> give_back   unfinished, or not needed now: it is generated again

A mode says where prompts come from and where a group goes: `worker.RolloutWorker` (mode streaming) asks the ledger and
stores each group, `vllm_rollout.RoundWorker` (modes off and buffer) asks the data source for one round.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from vime.config.parse import Args
from vime.handoff.ledger_types import Task
from vime.rollout.abort_scope import AbortScope
from vime.rollout.drop_limit import DropStreak
from vime.rollout.exchanges import PromptTokens
from vime.rollout.generation import train_sampling_params
from vime.rollout.groups import filter_verdict, generate_and_rm_group, unusable_reason
from vime.rollout.loops import raise_first
from vime.rollout.partial import MIXED, PartialStats, is_unfinished, num_response_tokens, settle_versions
from vime.rollout.request_priority import set_request_priority
from vime.rollout.reward_errors import ErrorShare
from vime.rollout.sample_recorder import RECORDER
from vime.rollout.sample_rows import by_sample
from vime.types import Sample, Version


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
    async def keep(self, assignment: Assignment, samples: list[Sample]) -> None:
        """Hand the group over to be trained."""

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
        if reason == MIXED and args.stale_policy == "retry":
            await self.give_back(assignment, samples, MIXED)
            return
        if reason is None:
            verdict = filter_verdict(args, samples)
            reason = None if verdict.keep else verdict.reason or "filter"
        if reason is None:
            self._errors.note(samples)
            self._streak.kept()
            await self.keep(assignment, samples)
        else:
            await self.drop(assignment, samples, reason)

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
