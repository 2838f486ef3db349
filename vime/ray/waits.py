"""Waiting for Ray: every wait has a name, a deadline and an owner, and a failure of one actor ends it at once.

A plain `ray.get([...])` on W trainer ranks waits for all of them even when one has failed and its peers hang in a
collective. `wait_for` returns when all have returned and raises as soon as one fails, so that no rank's error hides
behind another rank's ten-minute timeout.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Sequence
from typing import NoReturn, Protocol, TypeVar

import ray
from ray import ObjectRef

from vime.observability.stuck import explain
from vime.types import ClusterError, LostError, PartError, VimeError, WaitTimeoutError, may_pass
from vime.utils.errors import first_line
from vime.utils.waits import run_directory, waiting

logger = logging.getLogger(__name__)
Result = TypeVar("Result")
POLL_S = 0.25
START_GRACE_S = 30.0  # beyond a start's own deadline, for an actor to say what it found
DEATH_GRACE_S = 2.0  # after a failure, for Ray to report that an actor died
HANGS_S = 30.0
"""Seconds without a response after which a part of the queue, a rollout worker or the gateway is ended. The queue's
clients give up after three tries of 20 s, which would restart the run."""
LONGEST_LOOK_S = 2.0
GET_S = 10.0  # for Ray to deliver results that are finished


class Silence:
    """How long a process has not responded, in time in which this process ran: one that was stopped itself would take
    everybody whom it had asked before for dead."""

    def __init__(self) -> None:
        self._seconds, self._looked = 0.0, time.monotonic()

    def is_too_long(self) -> bool:
        """Look at the clock; called about every second while there is no response."""
        now = time.monotonic()
        self._seconds += min(now - self._looked, LONGEST_LOOK_S)
        self._looked = now
        return self._seconds > HANGS_S


class Interrupted(Exception):
    """The user asked to stop (Ctrl-C or SIGTERM) while the run waited for `name`."""


class _ActorDiedError(ClusterError):
    """The process of an actor is gone."""


def wait_for(
    refs: Sequence[ObjectRef[Result]],
    *,
    name: str,
    owner: str,
    deadline_s: float,
    on_poll: Callable[[], None] | None = None,
    parties: Sequence[str] | None = None,
) -> list[Result]:
    """Return the results of `refs` in order. `on_poll` runs about four times a second and may raise to end the wait.
    `parties`: the process that must return each (default: `owner`, and of several refs `<owner>-<index>`); none when
    the call itself waits for another process.

    Raises the VimeError that an actor raised, PartError for anything else that it raised, ClusterError when an actor
    died or its machine failed, WaitTimeoutError at the deadline, which names the process that blocked.
    """
    ends = time.monotonic() + deadline_s
    pending = list(refs)
    if parties is None:
        parties = [owner] if len(refs) == 1 else [f"{owner}-{index}" for index in range(len(refs))]
    owed = dict(zip(refs, parties, strict=True)) if parties else {}
    values: dict[ObjectRef[Result], Result] = {}
    with waiting(name, *owed.values(), deadline_s=deadline_s) as wait:
        while pending:
            left = ends - time.monotonic()
            if left <= 0:
                missing = f"{len(pending)} of {len(refs)} have not returned."
                raise WaitTimeoutError(name, deadline_s, owner, f"{missing}{blocking_party()}")
            done, pending = ray.wait(pending, num_returns=len(pending), timeout=min(POLL_S, left))
            if done:
                wait.owners = tuple(owed[ref] for ref in pending if ref in owed)
            try:  # all in one call: a call for each costs the driver a second for 4,096 ranks
                values.update(zip(done, ray.get(done, timeout=GET_S), strict=True))
            except ray.exceptions.RayError:
                _raise_failure(done, pending, list(refs), name, owner)
            if on_poll is not None:
                on_poll()
    return [values[ref] if ref in values else _value(ref, name, owner) for ref in refs]


class Wait(Protocol[Result]):
    """For every rank's answer to a call that was begun."""

    def __call__(self, *, on_poll: Callable[[], None] | None = None, deadline_s: float | None = None) -> list[Result]:
        """The deadline (default: --train-timeout-secs) is for the whole call, however many collectives it makes: those
        have --distributed-timeout-minutes each. A rank that dies ends the wait at once."""
        ...


async def wait_for_async(
    ref: ObjectRef[Result], *, name: str, owner: str, deadline_s: float, parties: Sequence[str] | None = None
) -> Result:
    """`wait_for` of one ref on the caller's event loop."""
    try:
        with waiting(name, *([owner] if parties is None else parties), deadline_s=deadline_s):
            return await asyncio.wait_for(asyncio.wrap_future(ref.future()), deadline_s)
    except TimeoutError as error:
        raise WaitTimeoutError(name, deadline_s, owner) from error
    except ray.exceptions.RayError as error:
        _raise_named(error, name, owner)


def said_meanwhile(ref: ObjectRef[Result], within_s: float) -> Result | None:
    """Poll `ref` while another wait is in progress. Returns None if it is not ready. Never raises: the wait itself
    reports what is wrong."""
    try:
        done, _ = ray.wait([ref], timeout=within_s)
        return ray.get(done[0], timeout=within_s) if done else None
    except ray.exceptions.RayError:
        return None


def ready(starting: ObjectRef[Result], name: str, *, began: float, deadline_s: float) -> Result | None:
    """Return what an actor says when its server is ready, and None until then. `began` is monotonic. Raises as
    `wait_for` what kept it from starting, and WaitTimeoutError when it has not said so within its deadline."""
    what, asked_s = f"{name} to start", time.monotonic() - began
    done, _ = ray.wait([starting], timeout=0)
    if not done and asked_s > deadline_s + START_GRACE_S:
        raise WaitTimeoutError(what, asked_s, "its actor", "See RUN_DIR/logs.")
    return wait_for(done, name=what, owner="vLLM", deadline_s=10, parties=[name])[0] if done else None


def blocking_party() -> str:
    """Return what `vime why-stuck` says of this run now, as the end of a message; empty without a run."""
    run_dir = run_directory()
    if run_dir is None:
        return ""
    try:
        return f" Who blocks: {explain(run_dir, sample_s=0).line}."
    except (VimeError, OSError) as error:
        logger.warning("it is not known who blocks the run: %s", error)
        return ""


def _raise_failure(
    done: list[ObjectRef[Result]],
    pending: list[ObjectRef[Result]],
    refs: list[ObjectRef[Result]],
    name: str,
    owner: str,
) -> None:
    """Return the most informative failure among `done`: a peer of a dead rank fails in a collective first ("connection
    reset"), and Ray reports the death a moment later."""

    def failures(of: list[ObjectRef[Result]]) -> list[VimeError]:
        """Rank failures: a death first, then what an actor raised by itself, because these cause the others."""
        found: list[VimeError] = []
        for ref in of:
            try:
                _value(ref, name, owner if len(refs) == 1 else f"{owner} {refs.index(ref)}")
            except VimeError as error:
                found.append(error)
        return sorted(found, key=lambda error: (not isinstance(error, _ActorDiedError), isinstance(error, LostError)))

    found = failures(done)
    if found and pending and not isinstance(found[0], _ActorDiedError):
        more, _ = ray.wait(pending, num_returns=len(pending), timeout=DEATH_GRACE_S)
        found = failures([*done, *more])
    if found:
        raise found[0]


def _value(ref: ObjectRef[Result], name: str, owner: str) -> Result:
    try:
        return ray.get(ref, timeout=GET_S)
    except ray.exceptions.GetTimeoutError as error:
        raise WaitTimeoutError(name, GET_S, owner, "Ray did not deliver a finished result.") from error
    except ray.exceptions.RayError as error:
        _raise_named(error, name, owner)


def _raise_named(error: Exception, name: str, owner: str) -> NoReturn:
    """Return an actor's own error, or its death as an error of ours; its traceback goes to the log."""
    if isinstance(error, ray.exceptions.RayTaskError):
        cause = error.cause
        logger.info("%s: %s failed:\n%s", name, owner, error)
        if isinstance(cause, VimeError):
            raise cause from error
        message = f"{name}: {owner} failed with {type(cause).__name__}: {cause}{_place(error)}."
        if isinstance(cause, ray.exceptions.RayError) or may_pass(cause):
            raise ClusterError(message) from error
        raise PartError(message) from error
    if isinstance(error, ray.exceptions.RayActorError):
        raise _ActorDiedError(
            f"{name}: {owner} died: {first_line(error)}. Its log is in RUN_DIR/logs; --load resumes the run."
        ) from error
    raise ClusterError(f"{name}: {owner}: {type(error).__name__}: {first_line(error)}") from error


def _place(error: Exception) -> str:
    """Return where an actor raised, from the traceback that Ray sends as text: ` (at file.py:12)`."""
    frames = re.findall(r'File "(.+?)", line (\d+)', str(error))
    return f" (at {frames[-1][0]}:{frames[-1][1]})" if frames else ""


def all_results(waits: Sequence[Callable[[], list[Result]]]) -> list[list[Result]]:
    """Wait for worlds that work side by side. All have ended when the first error is raised; other errors are
    logged."""
    results: list[list[Result]] = []
    errors: list[VimeError] = []
    for wait in waits:
        try:
            results.append(wait())
        except VimeError as error:
            errors.append(error)
    for other in errors[1:]:
        logger.error("failed too: %s", other)
    if errors:
        raise errors[0]
    return results
