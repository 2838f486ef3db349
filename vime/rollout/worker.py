"""A rollout worker of mode `streaming`: it takes prompts from the ledger and commits finished groups.

It generates, scores, filters, stores and commits while the trainer works, also during weight updates. Only the ledger's
slots limit it: a slot becomes free when a group is dropped, or when the engines have confirmed the weights of the round
that trained it. An error (a reward that raises, a lost engine) ends the worker; the process that waits for a round
raises it.

With --partial-rollout a group that is aborted, or in progress when the worker stops, is stored in the spool as it is.
The ledger issues it before any new prompt, also after a restart, and generation continues after its last tokens.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future
from typing import Protocol

from vime.config.deadlines import rollout_deadline_s
from vime.config.parse import Args
from vime.data.payload import bytes_to_samples, samples_to_bytes
from vime.data.rows import encode_facts, trained_tokens
from vime.handoff.group_store import EncodedGroup, GroupStore, StoresGroups
from vime.handoff.ledger import LedgerPort
from vime.handoff.ledger_types import Admission, IssuedPrompt, Payload, PromptGrant, RoundOrder, Task, TransitionError
from vime.handoff.prompt_ledger import PromptLedger
from vime.handoff.receipts import group_content
from vime.handoff.slot_line import WAIT_S
from vime.observability.events import span
from vime.rollout.abort_scope import KEEP_S
from vime.rollout.convert import encoded_group
from vime.rollout.generation import take_prompt_tokens
from vime.rollout.group_worker import Assignment, GroupWorker, WorkerStats
from vime.rollout.group_writer import GroupWriter
from vime.rollout.loops import rollout_loop
from vime.rollout.partial import (
    MIXED,
    num_response_tokens,
    oldest_allowed,
    resume,
)
from vime.rollout.reward_errors import ErrorShare
from vime.types import HandoffError, Sample, Version, WaitTimeoutError
from vime.utils.failpoints import Point, failpoint
from vime.utils.waits import waiting

logger = logging.getLogger(__name__)

NAMED = "rollout-worker-"
STOP_S = 10.0
NEWS_S = 30.0
"""How long one wait for a change of the ledger lasts; then it is repeated. No change is missed in between."""


class PromptsByNumber(Protocol):
    """A data source that returns any group by its number, so that a prompt can be generated again after a restart."""

    def group_at(self, group_index: int) -> list[Sample]: ...


class RolloutWorker(GroupWorker, StoresGroups):
    """Consumes prompts that the ledger issues, each in a task of its own; waits for slots, engines, rewards and queue
    capacity; unblocked by changes of the ledger. `GroupWriter` stores finished groups."""

    def __init__(
        self, args: Args, *, source: PromptsByNumber, ledger: LedgerPort, store: GroupStore, name: str | None = None
    ) -> None:
        super().__init__(args, ErrorShare(args))
        self._source, self._ledger, self._store = source, ledger, store
        self.name = name or worker_name(0)
        in_order = args.transferqueue_round_order == RoundOrder.INDEX
        self._writer = GroupWriter(store, ledger, lingers=in_order and not args.train_early_groups)
        self._has_capacity = has_capacity(args)
        self._future: Future[None] | None = None
        self._num_slots = (args.transferqueue_max_staleness + 1) * args.rollout_batch_size
        self._max_running = self._num_slots  # prompts in progress here
        self._ended = asyncio.Event()  # set when a prompt that was in progress has ended, or the share is another
        self.waits_for = ""  # what the loop that takes prompts waits for; empty when it does not wait

    def start(self) -> None:
        """Start. The engines must have confirmed the weights: the first prompts are sent at once. Calling it again does
        nothing."""
        if self._future is None:
            self._future = rollout_loop().submit(self.run())

    def share(self, num_workers: int) -> None:
        """Set the number of workers that take prompts: each takes at most its share of the slots. Any thread."""
        self._max_running = -(-self._num_slots // num_workers)
        rollout_loop().submit(self._look_again())

    async def _look_again(self) -> None:
        """Let the loop that takes prompts look at the share, which may have grown."""
        self._ended.set()

    def stop(self) -> None:
        """End at once. Prompts in progress stay in the ledger and are issued again. Calling it again does nothing.

        With --partial-rollout their tokens are stored first, as far as the engines still respond.
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
        """Raise the error that ended the worker, if it has ended."""
        if self._future is not None and self._future.done():
            try:
                self._future.result()
            except CancelledError:
                raise HandoffError("the rollout worker was stopped while a round waited for groups.") from None
            raise HandoffError("the rollout worker ended although rounds are left to train.")

    def take_stats(self) -> WorkerStats:
        """Return the counts since the last call. Any thread."""
        taken, self.stats = self.stats, WorkerStats()
        taken.prompts = take_prompt_tokens()
        return taken

    def is_ours(self, producer: str) -> bool:
        return producer == self.name

    def close(self) -> None:
        self.stop()
        self._store.close()

    async def _keep_all(self) -> None:
        await self._abort_scope.end(list(self._running.values()))

    def ended(self) -> None:
        self._ended.set()

    async def take(self) -> list[Assignment]:
        """Waits for: slots, and for this worker's share of them. Unblocked by: a group that ends, or the driver, which
        releases the slots of a round. Returns nothing when the worker stops: what it gives back is for other
        workers."""
        seen, request = -1, uuid.uuid4().hex  # one name until it gets something: it is one place in the line
        with waiting("a slot for a prompt", "driver", deadline_s=None):
            while not self._abort_scope.is_set:
                wanted = min(
                    self._args.over_sampling_batch_size or self._args.rollout_batch_size,
                    self._max_running - len(self._running),
                )
                if wanted < 1:
                    await self._wait_until_one_ends()
                    continue
                grant: PromptGrant = await self._ledger.call_async(
                    PromptLedger.issue, self.name, wanted, request=request
                )
                self.waits_for = grant.waits_for
                if grant.prompts:
                    failpoint(Point.ISSUE)
                    return [self._assignment(issued, grant.serving) for issued in grant.prompts]
                seen = await self._ledger.wait_for_news_async(seen, WAIT_S / 2, slots=1)
        return []

    def _assignment(self, issued: IssuedPrompt, serving: Version) -> Assignment:
        prompts = self._source.group_at(issued.task.group)
        return Assignment(task=issued.task, prompts=prompts, serving=serving, partial=issued.partial)

    async def _wait_until_one_ends(self) -> None:
        """Wait until a prompt in progress here ends, or the worker's share is another."""
        self._ended.clear()
        await self._ended.wait()

    async def watch(self) -> None:
        """Renew the leases of this worker's groups; cancel those that the ledger gave to another worker. Waits for: the
        clock."""
        while True:
            await asyncio.sleep(self._args.transferqueue_lease_timeout_secs / 3)
            known = list(self._running.items())  # the answer may be older than a prompt that arrives before it
            trusted = await self._ledger.call_async(PromptLedger.heartbeat, self.name)
            for task, work in known:
                if task not in trusted and not work.done():
                    work.cancel(f"group {task} was given to another attempt")

    async def produce(self, assignment: Assignment) -> None:
        """Run one prompt until it is committed, dropped or given back. A group that finishes too late is deleted."""
        task = assignment.task
        try:
            with self._writer.expecting(task):
                samples = await self.generate(assignment)
            await self.finish(assignment, samples)
        except TransitionError as error:
            logger.warning("%s", error)
            self.stats.late_groups += 1
            await self._writer.run(self._store.forget, [task])

    async def resume(self, assignment: Assignment) -> list[Sample]:
        """Return the group as an earlier attempt left it in the spool, or its prompts."""
        args, fresh = self._args, assignment.prompts
        if assignment.partial is None or not args.partial_rollout:
            return fresh
        try:
            data = await self._writer.run(self._store.record, *assignment.partial)
            kept = bytes_to_samples(data, self._store.decode)
        except HandoffError as error:  # nothing that was promised is lost: the completions are sampled again
            logger.warning("group %s: its earlier tokens cannot be read, it begins anew: %s", assignment.task, error)
            return fresh
        return resume(args, kept, fresh, self.stats.partial, oldest=oldest_allowed(args, assignment.serving))

    def oldest(self, samples: Sequence[Sample]) -> Version:
        newest = max((version for sample in samples for version in sample.weight_versions), default=0)
        return oldest_allowed(self._args, newest)

    async def note_dropped(self, assignment: Assignment, reason: str) -> None:
        await self._ledger.call_async(PromptLedger.drop, assignment.task, reason)

    async def give_back(self, assignment: Assignment, samples: list[Sample], reason: str) -> None:
        """Put the group among those that are issued first; with --partial-rollout with the tokens that it has."""
        checksum, task = None, assignment.task
        may_keep = self._args.partial_rollout and reason != MIXED
        num_tokens = num_response_tokens(samples) if may_keep else 0
        if num_tokens:
            checksum = await self._writer.run(self._store.keep, task, samples_to_bytes(samples))
            self.stats.partial.partial_groups += 1
            self.stats.partial.partial_tokens += num_tokens
            failpoint(Point.KEEP)
        self.stats.retried_groups += 1
        with span("transferqueue_requeue_group", group=task.group, attempt=task.attempt):
            await self._ledger.call_async(PromptLedger.retry, task, reason, partial=checksum)

    async def keep(self, assignment: Assignment, samples: list[Sample]) -> bool:
        """Store and commit the group. `self.stats` is another object once they were taken, also meanwhile."""
        task = assignment.task
        for sample in samples:
            sample.attempt = task.attempt
        with span("encode_group", group=task.group):
            group = encoded_group(
                self._args, samples, partition_id=self._store.partition, producer_id=self.name, with_samples=True
            )
        num_tokens = sum(len(sample.tokens) for sample in samples)
        if self._has_capacity:
            with waiting("room for a group", "driver", deadline_s=rollout_deadline_s(self._args.config)):
                await self._wait_for_capacity(task, num_tokens, group.num_bytes)
        failpoint(Point.SPOOL)
        payload = payload_of(group, samples)
        with span("transferqueue_put_group", group=task.group, attempt=task.attempt):
            took_s = await self._writer.put(task, group, payload)
        self.stats.put_times_s.append(took_s)
        self.stats.committed_groups += 1
        return True

    async def _wait_for_capacity(self, task: Task, num_tokens: int, num_bytes: int) -> None:
        """Waits for: capacity under --transferqueue-max-groups, -tokens, -bytes. Unblocked by: a trained round."""
        limit_s = rollout_deadline_s(self._args.config)
        ends, seen = time.monotonic() + limit_s, -1
        while True:
            admission: Admission = await self._ledger.call_async(
                PromptLedger.admit, task, num_tokens=num_tokens, num_bytes=num_bytes
            )
            if admission.granted:
                return
            left = ends - time.monotonic()
            if left <= 0:
                raise WaitTimeoutError(f"group {task}: {admission.waits_for}", limit_s, "trainer", "Raise the bound.")
            seen = await self._ledger.wait_for_news_async(seen, min(left, NEWS_S))


def has_capacity(args: Args) -> bool:
    """Return whether the queue has a bound, so that the ledger must be asked for room."""
    bounds = (args.transferqueue_max_groups, args.transferqueue_max_tokens, args.transferqueue_max_bytes)
    return any(bound is not None for bound in bounds)


def payload_of(group: EncodedGroup, samples: Sequence[Sample]) -> Payload:
    """Return what the ledger keeps of a group; the writer sets the checksum. The content hash is made from the samples,
    not from the bytes that they were packed into."""
    rows = group.facts.rows
    is_trained = trained_tokens(rows) > 0
    if (rows["newest_version"] < 0).any():
        raise HandoffError(
            f"group {group.facts.group_index}: no token carries a policy version. A generate function extends samples "
            "with Sample.append_response_tokens(..., versions=...)."
        )
    return Payload(
        checksum=0,
        num_bytes=group.num_bytes,
        num_tokens=int(rows["total_length"].sum()),
        num_rows=len(rows),
        min_version=int((rows[is_trained] if is_trained.any() else rows)["oldest_trainable"].min()),
        max_version=int(rows["newest_version"].max()),
        content=group_content(
            (sample.index, sample.tokens, sample.response_length, images)
            for sample, images in zip(samples, group.images, strict=True)
        ),
        facts=encode_facts(group.facts),
    )


def worker_name(number: int) -> str:
    """Return a name of worker `number` in this process that no other start of the run has."""
    return f"{NAMED}{number}.{os.getpid()}.{uuid.uuid4().hex[:6]}"


def worker_number(name: str) -> int | None:
    """Return the number in a worker's name, which is also its spool's; None for what is no worker's name."""
    number = name.removeprefix(NAMED).partition(".")[0]
    return int(number) if name.startswith(NAMED) and number.isdecimal() else None


async def _cancelled(tasks: list[asyncio.Task[None]]) -> None:
    """Wait until work that was cancelled has ended."""
    await asyncio.gather(*tasks, return_exceptions=True)
