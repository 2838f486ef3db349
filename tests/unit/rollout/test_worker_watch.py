"""A rollout worker that renews its leases gives up what has gone to another worker, and nothing else."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.helpers.ledger_cases import issue, open_ledger
from vime.handoff.ledger import LocalLedgerPort
from vime.handoff.ledger_types import Task
from vime.rollout.worker import RolloutWorker

DEADLINE_S = 30.0


class SlowPort(LocalLedgerPort):
    """The answer to the first heartbeat arrives when `arrives` is set."""

    def __init__(self, ledger: Any) -> None:
        super().__init__(ledger)
        self.num_asked = 0
        self.asked, self.arrives = asyncio.Condition(), asyncio.Event()

    async def call_async(self, method: Any, *arguments: Any, **options: Any) -> Any:
        result = await super().call_async(method, *arguments, **options)
        async with self.asked:
            self.num_asked += 1
            self.asked.notify_all()
        await self.arrives.wait()
        return result

    async def wait_for_call(self, number: int) -> None:
        async with asyncio.timeout(DEADLINE_S), self.asked:
            await self.asked.wait_for(lambda: self.num_asked >= number)


def test_a_prompt_that_arrives_before_the_answer_to_an_older_heartbeat_is_kept(tmp_path: Path) -> None:
    """Cancelled, it would be nobody's: the worker's heartbeats go on renewing its lease."""

    async def scene() -> None:
        ledger = open_ledger(tmp_path)
        port = SlowPort(ledger)
        worker: Any = RolloutWorker.__new__(RolloutWorker)
        worker._args = SimpleNamespace(transferqueue_lease_timeout_secs=0.03)
        worker.name, worker._ledger, worker._running = "p", port, {}
        watch = asyncio.create_task(worker.watch())
        await port.wait_for_call(1)
        [task] = issue(ledger, 1)
        work = worker._running[task] = asyncio.create_task(asyncio.sleep(DEADLINE_S))
        gone = worker._running[Task("train", 9, 1)] = asyncio.create_task(asyncio.sleep(DEADLINE_S))
        port.arrives.set()
        await port.wait_for_call(4)
        assert not work.done()
        assert gone.cancelled()  # the ledger never issued it, which a later heartbeat says
        for running in (watch, work):
            running.cancel()
        await asyncio.gather(watch, work, return_exceptions=True)
        ledger.close()

    asyncio.run(scene())
