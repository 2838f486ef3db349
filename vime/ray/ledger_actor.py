"""The ledger as a named Ray actor: one process that writes the file. When it dies Ray starts it again on the same file.

A restart loses no call that has returned, because every transition is in the file before its call returns. Ray repeats
a call whose result was lost, because every call of the ledger may be repeated. So callers notice a restart only as a
slow call, within its deadline. Leases get a full timeout from the restart.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Concatenate, cast

from ray import ObjectRef

from vime.handoff.ledger import Ledger, P, Part, R, call_ledger
from vime.handoff.ledger_types import LEDGER_NAME, SPOOL_NAME, LedgerMark, LedgerRules, RestoreReport, Task
from vime.handoff.ledger_undo import lasting_file
from vime.handoff.spool import Spools
from vime.handoff.spool_check import check_spool
from vime.observability.logs import setup_logging
from vime.ray.actor import Actor, Options, start_actor
from vime.ray.cluster import LEDGER_CPUS
from vime.ray.lease_waits import LeaseWaits
from vime.ray.waits import Result, wait_for, wait_for_async
from vime.types import VimeError
from vime.utils.failpoints import Point, failpoint

logger = logging.getLogger(__name__)
EXPIRE_INTERVAL_S = 1.0
CHECKED_BYTES_PER_S = 10**6
"""Least speed at which a ledger's content is checked when it opens, on a slow core."""
NEWS = "news of the ledger"


class LedgerActor:
    """Owns the ledger's file. Its calls run one after the other: none of them waits for anything."""

    def __init__(self, run_dir: str, rules: LedgerRules, synchronous: str) -> None:
        self._run_dir, self._train = Path(run_dir), rules.partition
        setup_logging(self._run_dir, "ledger")
        self._ledger = Ledger(self._run_dir / LEDGER_NAME, rules, clock=time.monotonic, synchronous=synchronous)
        self._lease_waits = LeaseWaits(rules.lease_timeout_s)
        self._expiring: asyncio.Task[None] | None = None
        self._news = asyncio.Condition()
        self._notified = self._ledger.sequence  # the last line of the history that waiters were notified of

    async def call(self, name: str, arguments: tuple[object, ...], options: dict[str, object]) -> object:
        """Run one of `ledger.CALLS`; a refusal is raised as its own error."""
        if self._expiring is None:
            self._expiring = asyncio.create_task(self._expire())
        try:
            result = call_ledger(self._ledger, name, arguments, options)
            if ".commit" in name:
                failpoint(Point.LEDGER_COMMIT)
            return result
        finally:
            await self._tell()

    async def wait_for_news(self, seen: int, timeout_s: float, has: dict[str, int]) -> int:
        """See `LedgerPort.wait_for_news`. Delays no other call."""

        def is_news() -> bool:
            return self._ledger.sequence > seen and self._ledger.has(**has)

        if timeout_s > 0 and not is_news():
            async with self._news:
                try:
                    async with asyncio.timeout(timeout_s):
                        await self._news.wait_for(is_news)
                except TimeoutError:
                    pass  # returning without news is allowed
        return self._ledger.sequence

    async def restore(self, checkpoint_round: int | None, mark: LedgerMark | None, may_be_torn: bool) -> RestoreReport:
        """`ledger.rounds.restore` with the spool of this run; without one every payload counts as lost."""
        spool = self._run_dir / SPOOL_NAME
        check_spool(
            self._run_dir,
            lasting_file(self._run_dir / LEDGER_NAME, checkpoint_round),
            train=self._train,
            may_be_torn=may_be_torn,
        )
        has_payload = Spools(spool).has if spool.is_dir() else _has_none
        return self._ledger.rounds.restore(checkpoint_round, has_payload, mark)

    async def close(self) -> None:
        """Close the file, which alone is the ledger then. The last call."""
        if self._expiring is not None:
            self._expiring.cancel()
        self._ledger.close()

    async def pid(self) -> int:
        return os.getpid()

    async def _expire(self) -> None:
        """Let time pass also while nothing calls the ledger, and show what jobs outside owe. Waits for: the clock. Ends
        with the actor."""
        while True:
            await asyncio.sleep(EXPIRE_INTERVAL_S)
            try:
                self._ledger.expire()
                self._lease_waits.show(self._ledger.lent())
            except VimeError as error:  # a full disk: logged, and tried again
                logger.error("overdue leases could not be taken back: %s", error)
            await self._tell()

    async def _tell(self) -> None:
        """Wake the waiters when there is news."""
        if self._ledger.sequence > self._notified:
            self._notified = self._ledger.sequence
            async with self._news:
                self._news.notify_all()


def _has_none(task: Task, checksum: int) -> bool:  # noqa: ARG001
    return False


class LedgerClient:
    """The ledger as callers in other processes see it, each call with a deadline. A `LedgerPort`. Picklable."""

    def __init__(self, actor: Actor[LedgerActor], deadline_s: float) -> None:
        self._actor, self._deadline_s = actor, deadline_s
        self._opening_s = deadline_s  # of the first two calls, which read the whole file

    @classmethod
    def start(
        cls,
        run_dir: Path,
        rules: LedgerRules,
        *,
        run_id: str,
        deadline_s: float,
        synchronous: str = "NORMAL",
        home: Options | None = None,
    ) -> LedgerClient:
        """Start the actor `vime-<run_id>-ledger` and wait until it responds. The driver calls it once; the actor lives
        as long as any process holds a client of it. `home`: Ray's options for its node. A start reads the whole file,
        and has longer for it."""
        options: Options = {
            "name": f"vime-{run_id}-ledger",
            "num_cpus": LEDGER_CPUS,
            "max_restarts": -1,
            "max_task_retries": -1,
            **(home or {}),
        }
        client = cls(start_actor(LedgerActor, options, str(run_dir), rules, synchronous), deadline_s)
        path = run_dir / LEDGER_NAME
        client._opening_s += path.stat().st_size // CHECKED_BYTES_PER_S if path.exists() else 0
        client._wait(client._actor.ask_coroutine(LedgerActor.pid), "the ledger to start", client._opening_s)
        return client

    def restore(
        self, checkpoint_round: int | None, mark: LedgerMark | None = None, *, may_be_torn: bool = False
    ) -> RestoreReport:
        """Go back to this checkpoint after a restart of the run; the first call after `start`. `may_be_torn`: see
        `check_spool`."""
        result = self._actor.ask_coroutine(LedgerActor.restore, checkpoint_round, mark, may_be_torn)
        return self._wait(result, "the ledger to restore", self._opening_s)

    def close(self) -> None:
        """Close the ledger, which no process calls any more: its file alone is the ledger when this returns."""
        self._wait(self._actor.ask_coroutine(LedgerActor.close), "the ledger to close its file")

    def pid(self) -> int:
        """Return the pid of the actor now; it changes with a restart."""
        return self._wait(self._actor.ask_coroutine(LedgerActor.pid), "the ledger to start")

    def call(self, method: Callable[Concatenate[Part, P], R], *arguments: P.args, **options: P.kwargs) -> R:
        """Run the method in the ledger's process. It must be one of `ledger.CALLS`."""
        name = method.__qualname__
        answer = self._actor.ask_coroutine(LedgerActor.call, name, arguments, options)
        return cast("R", self._wait(answer, _answer_to(name)))

    async def call_async(self, method: Callable[Concatenate[Part, P], R], *arguments: P.args, **options: P.kwargs) -> R:
        """The same on the caller's event loop."""
        name = method.__qualname__
        ref = self._actor.ask_coroutine(LedgerActor.call, name, arguments, options)
        return cast("R", await wait_for_async(ref, name=_answer_to(name), owner="ledger", deadline_s=self._deadline_s))

    def wait_for_news(self, seen: int, timeout_s: float, **has: int) -> int:
        ref = self._actor.ask_coroutine(LedgerActor.wait_for_news, seen, timeout_s, has)
        longest_s = self._deadline_s + timeout_s
        [result] = wait_for([ref], name=NEWS, owner="ledger", deadline_s=longest_s, parties=())
        return result

    async def wait_for_news_async(self, seen: int, timeout_s: float, **has: int) -> int:
        ref = self._actor.ask_coroutine(LedgerActor.wait_for_news, seen, timeout_s, has)
        longest_s = self._deadline_s + timeout_s
        return await wait_for_async(ref, name=NEWS, owner="ledger", deadline_s=longest_s, parties=())

    def _wait(self, ref: ObjectRef[Result], name: str, deadline_s: float | None = None) -> Result:
        [result] = wait_for([ref], name=name, owner="ledger", deadline_s=deadline_s or self._deadline_s)
        return result


def _answer_to(name: str) -> str:
    """Return the name of a wait for a call such as `PromptLedger.issue`."""
    return f"the ledger's call {name.rpartition('.')[2]}"
