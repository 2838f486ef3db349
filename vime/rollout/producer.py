"""The producer of mode `streaming`: group after group, from a slot of the ledger to a committed payload.

It runs beside the trainer, also while weights move, and is bounded by the ledger's slots alone: a slot comes free when
a group is dropped, or when the engines confirmed the weights of the round that trained it. What ends with an error
(a reward that raises, an engine that is gone) ends the producer; the reader of finished groups raises it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from vime.handoff.group_store import GroupStore
from vime.handoff.ledger_port import LedgerPort
from vime.handoff.ledger_types import Admission, IssuedPrompt, Payload, PromptGrant, Task, TransitionError
from vime.handoff.payload import samples_to_bytes
from vime.observability.events import span
from vime.rollout.generation import train_sampling_params
from vime.rollout.group_writer import GroupWriter
from vime.rollout.groups import UNUSABLE, filter_verdict, generate_and_rm_group
from vime.rollout.loops import raise_first, rollout_loop
from vime.types import HandoffError, Sample, SampleStatus, Version, WaitTimeoutError
from vime.utils.failpoints import Point, failpoint
from vime.utils.waits import waiting

logger = logging.getLogger(__name__)

NEWS_S = 30.0
"""How long one wait for news of the ledger lasts; then it is asked again, with nothing lost in between."""
STOP_S = 10.0


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


class GroupProducer:
    """Lives on the rollout loop. Consumes prompts that the ledger issues; waits for slots, engines, rewards and room;
    unblocked by the ledger's news and by the answers."""

    def __init__(self, args: Any, *, source: PromptsByNumber, ledger: LedgerPort, store: GroupStore) -> None:
        self._args, self._source, self._ledger, self._store = args, source, ledger, store
        self.name = f"rollout-manager.{os.getpid()}.{uuid.uuid4().hex[:6]}"
        self._writer = GroupWriter(store)
        self._stats = ProducerStats()
        self._running: dict[Task, asyncio.Task[None]] = {}
        self._future: Future[None] | None = None
        self.waits_for = ""  # of the loop that takes prompts; empty when it does not wait

    def start(self) -> None:
        """Begin. The engines must have confirmed the weights: the first prompts are sent at once."""
        self._future = rollout_loop().submit(self._run())

    def stop(self) -> None:
        """End at once; prompts in flight stay the ledger's and are issued again. Calling it again does nothing."""
        if self._future is not None:
            self._future.cancel()
            self._future = None
            rollout_loop().run(_cancelled(list(self._running.values())), name="the producer to end", timeout_s=STOP_S)
        self._writer.close()

    def raise_if_failed(self) -> None:
        """Raise what ended the producer."""
        if self._future is not None and self._future.done():
            try:
                self._future.result()
            except CancelledError:
                raise HandoffError("the producer was stopped while a round waited for groups.") from None
            raise HandoffError("the producer ended although rounds are left to train.")

    def take_stats(self) -> ProducerStats:
        """What happened since the last call. Any thread."""
        taken, self._stats = self._stats, ProducerStats()
        return taken

    @property
    def peek(self) -> ProducerStats:
        """What happened since the last `take_stats`, still growing. Any thread."""
        return self._stats

    @property
    def num_running(self) -> int:
        return len(self._running)

    async def _run(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._heartbeat())
                while True:
                    prompts = await self._take_prompts()
                    if prompts:
                        failpoint(Point.ISSUE)
                    for issued in prompts:
                        task = tasks.create_task(self._produce(issued))
                        self._running[issued.task] = task
                        task.add_done_callback(lambda _, key=issued.task: self._running.pop(key, None))
        except BaseExceptionGroup as failures:
            raise_first(failures)

    async def _take_prompts(self) -> Sequence[IssuedPrompt]:
        """Waits for: slots. Unblocked by: a group that is dropped, or the driver, which releases those of a round."""
        wanted = self._args.over_sampling_batch_size
        seen = -1
        with waiting("a slot for a prompt", "driver", deadline_s=None):
            while True:
                grant: PromptGrant = await self._ledger.call_async(
                    "prompts", "issue", self.name, wanted, request=uuid.uuid4().hex
                )
                self.waits_for = grant.waits_for
                if grant.prompts:
                    return grant.prompts
                seen = await self._ledger.wait_for_news_async(seen, NEWS_S, slots=1)

    async def _heartbeat(self) -> None:
        """Keep what this producer works on; give up what the ledger gave to others. Waits for: the clock."""
        while True:
            await asyncio.sleep(self._args.transferqueue_lease_timeout_secs / 3)
            trusted = await self._ledger.call_async("prompts", "heartbeat", self.name)
            for task, work in list(self._running.items()):
                if task not in trusted and not work.done():
                    work.cancel(f"group {task} was given to another attempt")

    async def _produce(self, issued: IssuedPrompt) -> None:
        """One prompt to its end: committed, dropped, or given back. A group that comes too late is thrown away."""
        task = issued.task
        try:
            samples = await generate_and_rm_group(
                self._args, self._source.group_at(task.group), train_sampling_params(self._args)
            )
            await self._hand_over(task, samples)
        except TransitionError as error:
            logger.warning("%s", error)
            self._stats.late_groups += 1
            await self._writer.run(self._store.forget, [task])

    async def _hand_over(self, task: Task, samples: list[Sample]) -> None:
        stats = self._stats
        unusable = next((sample.status for sample in samples if sample.status in UNUSABLE), None)
        if unusable is SampleStatus.ABORTED:
            stats.retried_groups += 1
            with span("transferqueue_requeue_group", group=task.group, attempt=task.attempt):
                await self._ledger.call_async("prompts", "retry", task, "aborted")
            return
        reason = str(unusable) if unusable is not None else None
        if reason is None:
            stats.rewards += [sample.scalar_reward(self._args.reward_key) for sample in samples]
            stats.response_tokens += sum(sample.response_length for sample in samples)
            verdict = filter_verdict(self._args, samples)
            reason = None if verdict.keep else verdict.reason or "filter"
        if reason is not None:
            stats.dropped[reason] += 1
            await self._ledger.call_async("prompts", "drop", task, reason)
            return
        data = samples_to_bytes(samples)
        num_tokens = sum(len(sample.tokens) for sample in samples)
        with waiting("room for a group", "driver", deadline_s=self._args.rollout_timeout_secs):
            await self._wait_for_room(task, num_tokens, len(data))
        failpoint(Point.SPOOL)
        began = time.monotonic()
        with span("transferqueue_put_group", group=task.group, attempt=task.attempt):
            checksum = await self._writer.put(task, data)
        stats.put_times_s.append(time.monotonic() - began)
        oldest, newest = group_versions(samples)
        failpoint(Point.COMMIT)
        payload = Payload(
            checksum=checksum,
            num_bytes=len(data),
            num_tokens=num_tokens,
            num_rows=len(samples),
            min_version=oldest,
            max_version=newest,
        )
        with span("commit_group", group=task.group, attempt=task.attempt):
            await self._ledger.call_async("prompts", "commit", task, payload)
        failpoint(Point.COMMITTED)
        stats.committed_groups += 1

    async def _wait_for_room(self, task: Task, num_tokens: int, num_bytes: int) -> None:
        """Waits for: room under --transferqueue-max-groups, -tokens, -bytes. Unblocked by: a trained round."""
        limit_s = self._args.rollout_timeout_secs
        ends, seen = time.monotonic() + limit_s, -1
        while True:
            answer: Admission = await self._ledger.call_async(
                "prompts", "admit", task, num_tokens=num_tokens, num_bytes=num_bytes
            )
            if answer.granted:
                return
            left = ends - time.monotonic()
            if left <= 0:
                raise WaitTimeoutError(f"group {task}: {answer.waits_for}", limit_s, "trainer", "Raise the bound.")
            seen = await self._ledger.wait_for_news_async(seen, min(left, NEWS_S))


def group_versions(samples: list[Sample]) -> tuple[Version, Version]:
    """Oldest version among the trainable tokens of a group (of all tokens when none is), newest among all."""
    oldest = [sample.oldest_trainable_version for sample in samples]
    newest = [sample.weight_versions[-1] for sample in samples if sample.weight_versions]
    known = [version for version in oldest if version is not None]
    if not known:
        raise HandoffError(
            f"group {samples[0].group_index}: no token carries a policy version. A generate function grows answers "
            "with Sample.append_response_tokens(..., versions=...)."
        )
    return min(known), max(newest)


async def _cancelled(tasks: list[asyncio.Task[None]]) -> None:
    """Wait until work that was cancelled has ended."""
    await asyncio.gather(*tasks, return_exceptions=True)
