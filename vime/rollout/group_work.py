"""One prompt of mode `streaming` to its end: answered, scored, filtered, stored, committed; or dropped, or given back.

With --partial-rollout a group that is aborted, or under way when the producer stops, goes into the spool as it is; the
ledger issues it before any new prompt, also after a restart, and it is gone on with behind its last tokens.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Protocol

from vime.handoff.group_store import GroupStore
from vime.handoff.ledger_port import LedgerPort
from vime.handoff.ledger_prompts import PromptDesk
from vime.handoff.ledger_types import Admission, IssuedPrompt, Payload, RoundOrder, Task, TransitionError
from vime.handoff.payload import bytes_to_samples, samples_to_bytes
from vime.handoff.receipts import group_content
from vime.observability.events import span
from vime.rollout.drop_limit import DropStreak
from vime.rollout.generation import train_sampling_params
from vime.rollout.group_writer import GroupWriter
from vime.rollout.groups import filter_verdict, generate_and_rm_group, unusable_reason
from vime.rollout.partial import (
    MIXED,
    PartialStats,
    is_unfinished,
    num_response_tokens,
    oldest_allowed,
    resume,
    settle_versions,
)
from vime.rollout.reward_errors import ErrorShare
from vime.rollout.sample_book import BOOK
from vime.rollout.turns import take_turn
from vime.types import HandoffError, Sample, Version, WaitTimeoutError
from vime.utils.failpoints import Point, failpoint
from vime.utils.waits import waiting

logger = logging.getLogger(__name__)

NEWS_S = 30.0
"""How long one wait for news of the ledger lasts; then it is asked again, with nothing lost in between."""


class PromptsByNumber(Protocol):
    """A data source that knows every group by its number, so that a restart can answer a prompt again."""

    def group_at(self, group_index: int) -> list[Sample]: ...


@dataclass(slots=True)
class ProducerStats:
    """What happened since the last `take_stats`."""

    committed_groups: int = 0
    late_groups: int = 0  # finished after their lease had gone to another attempt
    retried_groups: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    rewards: list[float] = field(default_factory=list)  # of every finished sample, also of dropped groups
    response_tokens: int = 0
    put_times_s: list[float] = field(default_factory=list)
    partial: PartialStats = field(default_factory=PartialStats)


class GroupWork:
    """Lives on the rollout loop. Waits for engines, rewards and room; `GroupWriter` stores what is finished."""

    def __init__(self, args: Any, *, source: PromptsByNumber, ledger: LedgerPort, store: GroupStore) -> None:
        self._args, self._source, self._ledger, self._store = args, source, ledger, store
        in_order = args.transferqueue_round_order == RoundOrder.INDEX
        self._writer = GroupWriter(store, ledger, lingers=in_order and not args.train_early_groups)
        bounds = (args.transferqueue_max_groups, args.transferqueue_max_tokens, args.transferqueue_max_bytes)
        self._has_capacity = any(bound is not None for bound in bounds)
        self._streak, self._errors = DropStreak(args), ErrorShare(args)
        self.stats = ProducerStats()

    def close(self) -> None:
        self._writer.close()

    async def produce(self, issued: IssuedPrompt, *, serving: Version) -> None:
        """One prompt to its end: committed, dropped, or given back. A group that comes too late is thrown away.

        `serving`: the newest weights that every engine had when the prompt was issued.
        """
        task = issued.task
        try:
            with self._writer.expecting(task):
                group = await self._begin(issued, serving)
                take_turn(group[0].group_index)
                samples = await generate_and_rm_group(self._args, group, train_sampling_params(self._args))
            await self._hand_over(task, samples)
        except TransitionError as error:
            logger.warning("%s", error)
            self.stats.late_groups += 1
            await self._writer.run(self._store.forget, [task])

    async def _begin(self, issued: IssuedPrompt, serving: Version) -> list[Sample]:
        """The group as an earlier attempt left it, or its prompts."""
        fresh = self._source.group_at(issued.task.group)
        if issued.partial is None or not self._args.partial_rollout:
            return fresh
        try:
            [data] = await self._writer.run(self._store.get, [issued.partial])
            kept = bytes_to_samples(data)
        except HandoffError as error:  # nothing that was promised is lost: the answers are sampled again
            logger.warning("group %s: its earlier tokens cannot be read, it begins anew: %s", issued.task, error)
            return fresh
        return resume(self._args, kept, fresh, self.stats.partial, oldest=oldest_allowed(self._args, serving))

    async def _hand_over(self, task: Task, samples: list[Sample]) -> None:
        stats = self.stats
        if is_unfinished(samples):
            await self._give_back(task, samples)
            return
        reason = unusable_reason(samples)
        if reason is None:
            stats.rewards += [sample.scalar_reward(self._args.reward_key) for sample in samples]
            stats.response_tokens += num_response_tokens(samples)
            newest = max((version for sample in samples for version in sample.weight_versions), default=0)
            reason = settle_versions(self._args, samples, stats.partial, oldest=oldest_allowed(self._args, newest))
        if reason == MIXED and self._args.stale_policy == "retry":
            stats.retried_groups += 1
            with span("transferqueue_requeue_group", group=task.group, attempt=task.attempt):
                await self._ledger.call_async(PromptDesk.retry, task, MIXED)
            return
        if reason is None:
            verdict = filter_verdict(self._args, samples)
            reason = None if verdict.keep else verdict.reason or "filter"
        if reason is not None:
            stats.dropped[reason] += 1
            BOOK.note_dropped(task.group, reason, samples)
            await self._ledger.call_async(PromptDesk.drop, task, reason)
            self._errors.note(samples)
            self._streak.dropped(reason)
            return
        self._errors.note(samples)
        self._streak.kept()
        await self._commit(task, samples)

    async def _give_back(self, task: Task, samples: list[Sample]) -> None:
        """The group goes to those that are issued first, with --partial-rollout with what it has."""
        stats, checksum = self.stats, None
        num_tokens = num_response_tokens(samples) if self._args.partial_rollout else 0
        if num_tokens:
            checksum = await self._writer.run(self._store.keep, task, samples_to_bytes(samples))
            stats.partial.partial_groups += 1
            stats.partial.partial_tokens += num_tokens
            failpoint(Point.KEEP)
        stats.retried_groups += 1
        with span("transferqueue_requeue_group", group=task.group, attempt=task.attempt):
            await self._ledger.call_async(PromptDesk.retry, task, "aborted", partial=checksum)

    async def _commit(self, task: Task, samples: list[Sample]) -> None:
        stats = self.stats
        for sample in samples:
            sample.attempt = task.attempt
        data = samples_to_bytes(samples)
        num_tokens = sum(len(sample.tokens) for sample in samples)
        if self._has_capacity:
            with waiting("room for a group", "driver", deadline_s=self._args.rollout_timeout_secs):
                await self._wait_for_room(task, num_tokens, len(data))
        failpoint(Point.SPOOL)
        oldest, newest = group_versions(samples)
        payload = Payload(
            checksum=0,  # the writer's
            num_bytes=len(data),
            num_tokens=num_tokens,
            num_rows=len(samples),
            min_version=oldest,
            max_version=newest,
            content=group_content((sample.index, sample.tokens, sample.response_length) for sample in samples),
        )
        with span("transferqueue_put_group", group=task.group, attempt=task.attempt):
            stats.put_times_s.append(await self._writer.put(task, data, payload))
        stats.committed_groups += 1

    async def _wait_for_room(self, task: Task, num_tokens: int, num_bytes: int) -> None:
        """Waits for: room under --transferqueue-max-groups, -tokens, -bytes. Unblocked by: a trained round."""
        limit_s = self._args.rollout_timeout_secs
        ends, seen = time.monotonic() + limit_s, -1
        while True:
            answer: Admission = await self._ledger.call_async(
                PromptDesk.admit, task, num_tokens=num_tokens, num_bytes=num_bytes
            )
            if answer.granted:
                return
            left = ends - time.monotonic()
            if left <= 0:
                raise WaitTimeoutError(f"group {task}: {answer.waits_for}", limit_s, "trainer", "Raise the bound.")
            seen = await self._ledger.wait_for_news_async(seen, min(left, NEWS_S))


def group_versions(samples: list[Sample]) -> tuple[Version, Version]:
    """Oldest version among the trainable tokens of a group (of all tokens when none is), newest among all."""
    trainable = [sample for sample in samples if any(sample.loss_mask)]
    oldest = [sample.oldest_trainable_version for sample in trainable or samples]
    newest = [sample.weight_versions[-1] for sample in samples if sample.weight_versions]
    known = [version for version in oldest if version is not None]
    if not known:
        raise HandoffError(
            f"group {samples[0].group_index}: no token carries a policy version. A generate function grows answers "
            "with Sample.append_response_tokens(..., versions=...)."
        )
    return min(known), max(newest)
