"""The producer of mode `streaming`: group after group, from a slot of the ledger to a committed payload.

It runs beside the trainer, also while weights move, and is bounded by the ledger's slots alone: a slot comes free when
a group is dropped, or when the engines confirmed the weights of the round that trained it. What ends with an error
(a reward that raises, an engine that is gone) ends the producer; the reader of finished groups raises it.
"""

from __future__ import annotations

import asyncio
import os
import uuid
from concurrent.futures import CancelledError, Future
from typing import Any

from vime.handoff.group_store import GroupStore
from vime.handoff.ledger_port import LedgerPort
from vime.handoff.ledger_prompts import PromptDesk
from vime.handoff.ledger_types import PromptGrant, Task
from vime.rollout.group_work import NEWS_S, GroupWork, ProducerStats, PromptsByNumber
from vime.rollout.halt import KEEP_S, Halt
from vime.rollout.loops import raise_first, rollout_loop
from vime.types import HandoffError
from vime.utils.failpoints import Point, failpoint
from vime.utils.waits import waiting

STOP_S = 10.0


class GroupProducer:
    """Lives on the rollout loop. Consumes prompts that the ledger issues, each in a task of its own (`GroupWork`);
    waits for slots; unblocked by the ledger's news."""

    def __init__(self, args: Any, *, source: PromptsByNumber, ledger: LedgerPort, store: GroupStore) -> None:
        self._args, self._ledger = args, ledger
        self.name = f"rollout-manager.{os.getpid()}.{uuid.uuid4().hex[:6]}"
        self._work = GroupWork(args, source=source, ledger=ledger, store=store)
        self._running: dict[Task, asyncio.Task[None]] = {}
        self._future: Future[None] | None = None
        self._halt = Halt()
        self.waits_for = ""  # of the loop that takes prompts; empty when it does not wait

    def start(self) -> None:
        """Begin. The engines must have confirmed the weights: the first prompts are sent at once."""
        self._future = rollout_loop().submit(self._run())

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
                loop.run(_cancelled(list(self._running.values())), name="the producer to end", timeout_s=STOP_S)
        self._work.close()

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
        taken, self._work.stats = self._work.stats, ProducerStats()
        return taken

    @property
    def peek(self) -> ProducerStats:
        """What happened since the last `take_stats`, still growing. Any thread."""
        return self._work.stats

    @property
    def num_running(self) -> int:
        return len(self._running)

    async def _keep_all(self) -> None:
        await self._halt.end(list(self._running.values()))

    async def _run(self) -> None:
        self._halt.govern()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._heartbeat())
                while not self._halt.is_set:
                    grant = await self._take_prompts()
                    if grant.prompts:
                        failpoint(Point.ISSUE)
                    for issued in grant.prompts:
                        task = tasks.create_task(self._work.produce(issued, serving=grant.serving))
                        self._running[issued.task] = task
                        task.add_done_callback(lambda _, key=issued.task: self._running.pop(key, None))
        except BaseExceptionGroup as failures:
            raise_first(failures)

    async def _take_prompts(self) -> PromptGrant:
        """Waits for: slots. Unblocked by: a group that is dropped, or the driver, which releases those of a round. An
        empty grant when the producer stops: what it gives back is for others."""
        wanted = self._args.over_sampling_batch_size
        seen = -1
        with waiting("a slot for a prompt", "driver", deadline_s=None):
            while not self._halt.is_set:
                grant: PromptGrant = await self._ledger.call_async(
                    PromptDesk.issue, self.name, wanted, request=uuid.uuid4().hex
                )
                self.waits_for = grant.waits_for
                if grant.prompts:
                    return grant
                seen = await self._ledger.wait_for_news_async(seen, NEWS_S, slots=1)
        return PromptGrant(prompts=())

    async def _heartbeat(self) -> None:
        """Keep what this producer works on; give up what the ledger gave to others. Waits for: the clock."""
        while True:
            await asyncio.sleep(self._args.transferqueue_lease_timeout_secs / 3)
            trusted = await self._ledger.call_async(PromptDesk.heartbeat, self.name)
            for task, work in list(self._running.items()):
                if task not in trusted and not work.done():
                    work.cancel(f"group {task} was given to another attempt")


async def _cancelled(tasks: list[asyncio.Task[None]]) -> None:
    """Wait until work that was cancelled has ended."""
    await asyncio.gather(*tasks, return_exceptions=True)
