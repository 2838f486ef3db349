"""A rollout worker of mode `streaming`: prompt after prompt, from a slot of the ledger to a committed group.

It generates, scores, filters, stores and commits beside the trainer, also while weights move, and is bounded by the
ledger's slots alone: a slot comes free when a group is dropped, or when the engines confirmed the weights of the round
that trained it. What ends with an error (a reward that raises, an engine that is gone) ends the worker; whoever waits
for a round raises it.

With --partial-rollout a group that is aborted, or under way when the worker stops, goes into the spool as it is; the
ledger issues it before any new prompt, also after a restart, and it is gone on with behind its last tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from vime.data.groups import encode_facts
from vime.data.payload import bytes_to_samples, samples_to_bytes
from vime.handoff.group_store import EncodedGroup, GroupStore, StoredGroup
from vime.handoff.ledger_port import LedgerPort
from vime.handoff.ledger_types import Admission, IssuedPrompt, Payload, PromptGrant, RoundOrder, Task, TransitionError
from vime.handoff.prompt_ledger import PromptLedger
from vime.handoff.receipts import group_content
from vime.observability.events import span
from vime.rollout.abort_scope import KEEP_S, AbortScope
from vime.rollout.convert import encoded_group
from vime.rollout.drop_limit import DropStreak
from vime.rollout.generation import train_sampling_params
from vime.rollout.group_writer import GroupWriter
from vime.rollout.groups import filter_verdict, generate_and_rm_group, unusable_reason
from vime.rollout.loops import raise_first, rollout_loop
from vime.rollout.partial import (
    MIXED,
    PartialStats,
    is_unfinished,
    num_response_tokens,
    oldest_allowed,
    resume,
    settle_versions,
)
from vime.rollout.request_priority import set_request_priority
from vime.rollout.reward_errors import ErrorShare
from vime.rollout.sample_recorder import RECORDER
from vime.types import HandoffError, Sample, Version, WaitTimeoutError
from vime.utils.failpoints import Point, failpoint
from vime.utils.waits import waiting

logger = logging.getLogger(__name__)

STOP_S = 10.0
SHARE_S = 1.0
NEWS_S = 30.0
"""How long one wait for news of the ledger lasts; then it is asked again, with nothing lost in between."""


class PromptsByNumber(Protocol):
    """A data source that knows every group by its number, so that a restart can answer a prompt again."""

    def group_at(self, group_index: int) -> list[Sample]: ...


@dataclass(slots=True)
class WorkerStats:
    """What happened since the last `take_stats`."""

    committed_groups: int = 0
    late_groups: int = 0  # finished after their lease had gone to another attempt
    retried_groups: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    rewards: list[float] = field(default_factory=list)  # of every finished sample, also of dropped groups
    response_tokens: int = 0
    put_times_s: list[float] = field(default_factory=list)
    partial: PartialStats = field(default_factory=PartialStats)

    @classmethod
    def joined(cls, parts: Sequence[WorkerStats]) -> WorkerStats:
        """Of several workers."""
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
        return whole


class RolloutWorker:
    """Lives on the rollout loop. Consumes prompts that the ledger issues, each in a task of its own; waits for slots,
    engines, rewards and room; unblocked by the ledger's news. `GroupWriter` stores what is finished."""

    def __init__(
        self, args: Any, *, source: PromptsByNumber, ledger: LedgerPort, store: GroupStore, name: str | None = None
    ) -> None:
        self._args, self._source, self._ledger, self._store = args, source, ledger, store
        self.name = name or worker_name(0)
        in_order = args.transferqueue_round_order == RoundOrder.INDEX
        self._writer = GroupWriter(store, ledger, lingers=in_order and not args.train_early_groups)
        bounds = (args.transferqueue_max_groups, args.transferqueue_max_tokens, args.transferqueue_max_bytes)
        self._has_capacity = any(bound is not None for bound in bounds)
        self._streak, self._errors = DropStreak(args), ErrorShare(args)
        self.stats = WorkerStats()
        self._running: dict[Task, asyncio.Task[None]] = {}
        self._future: Future[None] | None = None
        self._abort_scope = AbortScope()
        self._num_slots = (args.transferqueue_max_staleness + 1) * args.rollout_batch_size
        self._most = self._num_slots  # prompts under way here
        self._ended = asyncio.Event()  # a prompt that was under way
        self.waits_for = ""  # of the loop that takes prompts; empty when it does not wait

    def start(self) -> None:
        """Begin. The engines must have confirmed the weights: the first prompts are sent at once."""
        self._future = rollout_loop().submit(self._run())

    def share(self, num_workers: int) -> None:
        """So many workers take prompts: none takes more than its share of the slots. Any thread."""
        self._most = -(-self._num_slots // num_workers)

    def stop(self) -> None:
        """End at once; prompts in flight stay the ledger's and are issued again. Calling it again does nothing.

        With --partial-rollout their tokens are kept first, as far as the engines still answer.
        """
        loop = rollout_loop()
        if self._future is not None:
            try:
                if self._args.partial_rollout and not self._future.done():
                    loop.run(self._keep_all(), name="the groups under way to be kept", timeout_s=KEEP_S + STOP_S)
            finally:
                self._future.cancel()
                self._future = None
                loop.run(_cancelled(list(self._running.values())), name="the worker to end", timeout_s=STOP_S)
        self._writer.close()

    def raise_if_failed(self) -> None:
        """Raise what ended the worker."""
        if self._future is not None and self._future.done():
            try:
                self._future.result()
            except CancelledError:
                raise HandoffError("the rollout worker was stopped while a round waited for groups.") from None
            raise HandoffError("the rollout worker ended although rounds are left to train.")

    def take_stats(self) -> WorkerStats:
        """What happened since the last call. Any thread."""
        taken, self.stats = self.stats, WorkerStats()
        return taken

    @property
    def num_running(self) -> int:
        return len(self._running)

    def is_ours(self, producer: str) -> bool:
        return producer == self.name

    def samples(self, groups: Sequence[StoredGroup]) -> list[list[Sample]]:
        """The answers of finished groups, whoever generated them."""
        return [self._store.samples(group.task, group.checksum) for group in groups]

    def restore(self, groups: Sequence[StoredGroup]) -> None:
        """Put into the queue again what an earlier life of the run stored."""
        self._store.restore(groups)

    def release(self, tasks: Sequence[Task]) -> None:
        """Nobody asks for the samples of these groups any more."""
        self._store.release(tasks)

    def compact(self, needed: Mapping[Task, int | None]) -> int:
        """Drop from the spool what no restart can need; the bytes freed."""
        return self._store.compact(needed)

    @property
    def spool_bytes(self) -> int:
        return self._store.spool_bytes

    def close(self) -> None:
        self.stop()
        self._store.close()

    async def _keep_all(self) -> None:
        await self._abort_scope.end(list(self._running.values()))

    async def _run(self) -> None:
        self._abort_scope.govern()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._heartbeat())
                while not self._abort_scope.is_set:
                    grant = await self._take_prompts()
                    if grant.prompts:
                        failpoint(Point.ISSUE)
                    for issued in grant.prompts:
                        task = tasks.create_task(self.produce(issued, serving=grant.serving))
                        self._running[issued.task] = task
                        task.add_done_callback(partial(self._note_end, issued.task))
        except BaseExceptionGroup as failures:
            raise_first(failures)

    def _note_end(self, task: Task, _work: asyncio.Task[None]) -> None:
        self._running.pop(task, None)
        self._ended.set()

    async def _take_prompts(self) -> PromptGrant:
        """Waits for: slots, and for this worker's share of them. Unblocked by: a group that ends, or the driver, which
        releases those of a round. An empty grant when the worker stops: what it gives back is for others."""
        seen = -1
        with waiting("a slot for a prompt", "driver", deadline_s=None):
            while not self._abort_scope.is_set:
                wanted = min(self._args.over_sampling_batch_size, self._most - len(self._running))
                if wanted < 1:
                    await self._wait_for_an_end()
                    continue
                grant: PromptGrant = await self._ledger.call_async(
                    PromptLedger.issue, self.name, wanted, request=uuid.uuid4().hex
                )
                self.waits_for = grant.waits_for
                if grant.prompts:
                    return grant
                seen = await self._ledger.wait_for_news_async(seen, NEWS_S, slots=1)
        return PromptGrant(prompts=())

    async def _wait_for_an_end(self) -> None:
        """Of a prompt that is under way here; or for a larger share, which is looked at now and then."""
        self._ended.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SHARE_S):
                await self._ended.wait()

    async def _heartbeat(self) -> None:
        """Keep what this worker works on; give up what the ledger gave to others. Waits for: the clock."""
        while True:
            await asyncio.sleep(self._args.transferqueue_lease_timeout_secs / 3)
            trusted = await self._ledger.call_async(PromptLedger.heartbeat, self.name)
            for task, work in list(self._running.items()):
                if task not in trusted and not work.done():
                    work.cancel(f"group {task} was given to another attempt")

    async def produce(self, issued: IssuedPrompt, *, serving: Version) -> None:
        """One prompt to its end: committed, dropped, or given back. A group that comes too late is thrown away.

        `serving`: the newest weights that every engine had when the prompt was issued.
        """
        task = issued.task
        try:
            with self._writer.expecting(task):
                group = await self._begin(issued, serving)
                set_request_priority(group[0].group_index)
                samples = await generate_and_rm_group(self._args, group, train_sampling_params(self._args))
            await self._hand_over(task, samples)
        except TransitionError as error:
            logger.warning("%s", error)
            self.stats.late_groups += 1
            await self._writer.run(self._store.forget_attempt, task)

    async def _begin(self, issued: IssuedPrompt, serving: Version) -> list[Sample]:
        """The group as an earlier attempt left it, or its prompts."""
        fresh = self._source.group_at(issued.task.group)
        if issued.partial is None or not self._args.partial_rollout:
            return fresh
        try:
            data = await self._writer.run(self._store.record, *issued.partial)
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
                await self._ledger.call_async(PromptLedger.retry, task, MIXED)
            return
        if reason is None:
            verdict = filter_verdict(self._args, samples)
            reason = None if verdict.keep else verdict.reason or "filter"
        if reason is not None:
            stats.dropped[reason] += 1
            RECORDER.note_dropped(task.group, reason, samples)
            await self._ledger.call_async(PromptLedger.drop, task, reason)
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
            await self._ledger.call_async(PromptLedger.retry, task, "aborted", partial=checksum)

    async def _commit(self, task: Task, samples: list[Sample]) -> None:
        stats = self.stats
        for sample in samples:
            sample.attempt = task.attempt
        with span("encode_group", group=task.group):
            group = encoded_group(self._args, samples, producer_id=self.name, with_samples=True)
        num_tokens = sum(len(sample.tokens) for sample in samples)
        if self._has_capacity:
            with waiting("room for a group", "driver", deadline_s=self._args.rollout_timeout_secs):
                await self._wait_for_room(task, num_tokens, len(group.record))
        failpoint(Point.SPOOL)
        payload = payload_of(group, samples)
        with span("transferqueue_put_group", group=task.group, attempt=task.attempt):
            stats.put_times_s.append(await self._writer.put(task, group, payload))
        stats.committed_groups += 1

    async def _wait_for_room(self, task: Task, num_tokens: int, num_bytes: int) -> None:
        """Waits for: room under --transferqueue-max-groups, -tokens, -bytes. Unblocked by: a trained round."""
        limit_s = self._args.rollout_timeout_secs
        ends, seen = time.monotonic() + limit_s, -1
        while True:
            answer: Admission = await self._ledger.call_async(
                PromptLedger.admit, task, num_tokens=num_tokens, num_bytes=num_bytes
            )
            if answer.granted:
                return
            left = ends - time.monotonic()
            if left <= 0:
                raise WaitTimeoutError(f"group {task}: {answer.waits_for}", limit_s, "trainer", "Raise the bound.")
            seen = await self._ledger.wait_for_news_async(seen, min(left, NEWS_S))


def payload_of(group: EncodedGroup, samples: Sequence[Sample]) -> Payload:
    """What the ledger keeps of a group; its checksum is the writer's. The content is hashed from the samples, not from
    the bytes that were made of them."""
    rows = group.facts.rows
    is_trained = rows["num_trainable"] > 0
    if (rows["newest_version"] < 0).any():
        raise HandoffError(
            f"group {group.facts.group_index}: no token carries a policy version. A generate function grows answers "
            "with Sample.append_response_tokens(..., versions=...)."
        )
    return Payload(
        checksum=0,
        num_bytes=len(group.record),
        num_tokens=int(rows["total_length"].sum()),
        num_rows=len(rows),
        min_version=int((rows[is_trained] if is_trained.any() else rows)["oldest_trainable"].min()),
        max_version=int(rows["newest_version"].max()),
        content=group_content((sample.index, sample.tokens, sample.response_length) for sample in samples),
        facts=encode_facts(group.facts),
    )


def worker_name(number: int) -> str:
    """Of worker `number` in this process; no other life of the run has it."""
    return f"rollout-worker-{number}.{os.getpid()}.{uuid.uuid4().hex[:6]}"


async def _cancelled(tasks: list[asyncio.Task[None]]) -> None:
    """Wait until work that was cancelled has ended."""
    await asyncio.gather(*tasks, return_exceptions=True)
