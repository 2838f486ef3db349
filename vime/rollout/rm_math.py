"""The `math` reward: a few math_worker processes, each killed and replaced when it does not respond in time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys

from vime.types import RewardError, WaitTimeoutError
from vime.utils.waits import waiting

logger = logging.getLogger(__name__)

NUM_WORKERS = 2
START_SECONDS = 120.0  # imports sympy: about 2 s on an idle computer
KILL_SECONDS = 10.0


class UnreadableLabelError(RewardError):
    """math-verify finds nothing in a label."""


class MathJudge:
    """A pool of workers. Belongs to one event loop; workers start at first use."""

    def __init__(self, num_workers: int = NUM_WORKERS) -> None:
        # Last in, first out: a worker that already runs is preferred to one that must start.
        self._idle: asyncio.LifoQueue[asyncio.subprocess.Process | None] = asyncio.LifoQueue()
        self._num_workers, self._num_waiting = num_workers, 0
        for _ in range(num_workers):
            self._idle.put_nowait(None)

    async def score(self, gold: str, answer: str, *, timeout_s: float) -> float:
        """Return 1.0 or 0.0. An answer that takes longer than `timeout_s` counts as wrong: the policy wrote it.
        RewardError when `gold` cannot be read."""
        worker = await self._free_worker(timeout_s)
        asked: asyncio.subprocess.Process | None = None
        is_late = True
        try:
            asked = worker if worker is not None and worker.returncode is None else await _start()
            verdict = await _ask(asked, gold, answer, timeout_s)
            is_late = verdict is None
            if verdict is None:
                logger.warning("math reward: an answer could not be scored in %g s and counts as wrong", timeout_s)
                return 0.0
            if verdict["score"] is None:
                raise UnreadableLabelError(
                    f"math-verify finds no expression in the label {gold!r:.60}. No completion would ever be right; "
                    "correct the data or --label-key and begin a new run, or leave such samples out with "
                    "--on-reward-error drop, with which this run can go on too."
                )
            return verdict["score"]
        finally:
            if asked is not None and is_late:
                _kill(asked)  # its late result would be taken for that of the next question
            self._idle.put_nowait(None if is_late else asked)

    async def _free_worker(self, timeout_s: float) -> asyncio.subprocess.Process | None:
        """Return a worker, or None for one that must be started. Waits for: earlier callers, each of which has a worker
        for at most its start and `timeout_s`. Unblocked by: `score`'s end."""
        turns = 1 + self._num_waiting // self._num_workers
        deadline_s = turns * (START_SECONDS + timeout_s)
        self._num_waiting += 1
        try:
            with waiting("a math reward worker to be free", deadline_s=deadline_s):
                async with asyncio.timeout(deadline_s):
                    return await self._idle.get()
        except TimeoutError as error:
            name = f"one of {self._num_workers} math reward workers to be free"
            raise WaitTimeoutError(name, deadline_s, "vime.rollout.rm_math", "Lower --rm-timeout-secs.") from error
        finally:
            self._num_waiting -= 1

    async def close(self) -> None:
        """End the idle workers; a busy one is ended when its caller is cancelled."""
        for worker in [self._idle.get_nowait() for _ in range(self._idle.qsize())]:
            if worker is not None:
                _kill(worker)
                with contextlib.suppress(TimeoutError):  # killed; a zombie costs nothing
                    await asyncio.wait_for(worker.wait(), KILL_SECONDS)
            self._idle.put_nowait(None)


async def _start() -> asyncio.subprocess.Process:
    """Return a worker that has scored a known pair, so that a broken installation is an error and not a row of
    zeros."""
    worker = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "vime.rollout.math_worker",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=1 << 20,
    )
    verdict = await _ask(worker, "1/2", "\\boxed{0.5}", START_SECONDS)
    if verdict is None:
        _kill(worker)
        raise WaitTimeoutError("a math reward worker to start", START_SECONDS, "vime.rollout.rm_math")
    if verdict["score"] != 1.0:
        _kill(worker)
        raise RewardError(
            f"--rm-type math: the worker scored 0.5 against 1/2 as {verdict['score']}. Reinstall math-verify."
        )
    return worker


async def _ask(
    worker: asyncio.subprocess.Process, gold: str, answer: str, timeout_s: float
) -> dict[str, float | None] | None:
    """Return what the worker says, its "score"; None when it is late."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    try:
        with waiting("a math reward worker to judge", deadline_s=timeout_s):
            async with asyncio.timeout(timeout_s):
                worker.stdin.write(json.dumps({"gold": gold, "answer": answer}).encode() + b"\n")
                await worker.stdin.drain()
                line = await worker.stdout.readline()
    except TimeoutError:
        return None
    except (BrokenPipeError, ConnectionResetError):
        line = b""
    if not line:
        raise RewardError(
            "--rm-type math: the worker process died. See its error output above; is math-verify installed?"
        )
    told: dict[str, float | None] = json.loads(line)
    return told


def _kill(worker: asyncio.subprocess.Process) -> None:
    if worker.returncode is None:
        worker.kill()
