"""What each call of the gateway does. A job outside is one more producer of the ledger, and nothing else is kept.

No database stands beside the ledger, so that a gateway that is killed at any moment finds everything again:

- who has a lease: in the lease itself, which is signed with a key of the run and names group, attempt and producer;
- whether a group is committed: in the ledger, which counts a commit once for each attempt;
- samples of a group that is not whole: in the durable spool, under their attempt, before the call returns.

A response is sent only when what it says is on disk. A call whose response was lost is therefore repeated as it was.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import math
import re
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NoReturn, Protocol

import msgspec

from vime.gateway import messages as m
from vime.gateway.refusal import Refusal
from vime.gateway.weights import Weights
from vime.handoff.group_store import EncodedGroup, GroupStore
from vime.handoff.ledger import Ledger
from vime.handoff.ledger_port import LedgerPort
from vime.handoff.ledger_types import EXTERNAL, CapacityError, IssuedPrompt, Payload, PromptGrant, Task, TransitionError
from vime.handoff.prompt_ledger import PromptLedger
from vime.types import LARGEST_REWARD, HandoffError, Sample, SampleStatus, VersionSpan, tiling_fault
from vime.utils.waits import waiting

SAMPLE_MARK = b"vime-gateway-sample-1\n"  # begins the record of a single sample in the spool
_LEASE = re.compile(r"(.+)/(\d{1,15})#(\d{1,9})\.([A-Za-z0-9_-]{32})")
MOST_LOG_PROB = 1e-3  # engines round
NO_PAYLOAD = Payload(checksum=0, num_bytes=0, num_tokens=0, num_rows=0, min_version=0, max_version=0)
"""The ledger refuses to commit it: it only asks whether an attempt is committed already."""


STOP_POLL_S = 1.0
_STOPPING = Refusal(
    503,
    "unavailable",
    "the run is being stopped.",
    got="a wait for prompts",
    expected="a run that goes on, perhaps when it was started again",
    next_action="Repeat the call after Retry-After.",
    retry_after_s=2,
)


class Prompts(Protocol):
    """A data source that returns any group by its number: samples with index, prompt, label and metadata."""

    def group_at(self, group_index: int) -> list[Sample]: ...


class Writer(Protocol):
    """What is used of `vime.rollout.group_writer.GroupWriter`."""

    async def put(self, task: Task, group: EncodedGroup, payload: Payload) -> float:
        """Store and commit. Raises TransitionError for a group that comes too late."""
        ...


Encode = Callable[[str, list[Sample]], tuple[EncodedGroup, Payload]]
"""(producer, samples of one group) -> its stored form, as a rollout worker of the run makes it. Any thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one call may bring, and what a job is told about the run."""

    samples_per_prompt: int
    max_staleness: int
    lease_timeout_s: float
    vocab_size: int
    max_tokens: int  # of one sample, prompt and completion
    temperature: float  # at which the trainer computes log-probabilities
    max_body_bytes: int = 64 << 20
    calls_per_s: float = 200.0  # of one token, on average; twice as many at once
    failures_per_s: float = 20.0  # calls without a valid token, of all callers together
    max_partial_bytes: int = 256 << 20  # samples of one producer whose groups are not whole


@dataclass(slots=True)
class Job:
    """What is known of a producer since the gateway started; nothing depends on it."""

    called: float = 0.0
    said: m.Register = field(default_factory=m.Register)
    is_told: bool = False  # its last lease or heartbeat said that no prompt is left
    committed: int = 0
    dropped: Counter[str] = field(default_factory=Counter)  # reason -> groups
    refused: Counter[str] = field(default_factory=Counter)


class Gateway:
    """All methods run on one event loop. `producer` is the name of the caller's token, so every caller acts for
    itself."""

    def __init__(
        self,
        *,
        ledger: LedgerPort,
        store: GroupStore,
        writer: Writer,
        prompts: Prompts,
        encode: Encode,
        weights: Weights,
        limits: Limits,
        lease_key: bytes,
    ) -> None:
        """`writer` is that of a rollout worker, on `store`, used on this loop alone."""
        self._ledger, self._store, self._writer, self._prompts, self._encode = ledger, store, writer, prompts, encode
        self.weights, self.limits, self._lease_key = weights, limits, lease_key
        self.is_stopping = False  # set from any thread: calls that wait end within STOP_POLL_S
        self.jobs: dict[str, Job] = {}
        self._samples: dict[Task, dict[int, m.GivenSample]] = {}  # of groups that are not whole, by index
        self._owner: dict[Task, str] = {}  # of these groups
        self._partial: dict[str, dict[Task, int]] = {}  # producer -> bytes in the spool of groups that are not whole
        self._locks: weakref.WeakValueDictionary[Task, asyncio.Lock] = weakref.WeakValueDictionary()

    def job(self, producer: str) -> Job:
        return self.jobs.setdefault(producer, Job())

    async def register(self, producer: str, said: m.Register) -> m.Registered:
        """What an earlier process of the same producer had leased goes to others: nobody works on it any more, and
        heartbeats of this one would renew it for ever."""
        limits, self.job(producer).said = self.limits, said
        await self.leave(producer, m.Leave())
        return m.Registered(
            producer=producer,
            protocol=m.PROTOCOL,
            serving=self.weights.serving,
            samples_per_prompt=limits.samples_per_prompt,
            max_staleness=limits.max_staleness,
            temperature=limits.temperature,
            lease_timeout_s=limits.lease_timeout_s,
            max_body_bytes=limits.max_body_bytes,
        )

    async def heartbeat(self, producer: str, said: m.Heartbeat) -> m.Alive:  # noqa: ARG002  it has no fields
        held = await self._ledger.call_async(PromptLedger.heartbeat, _ledger_name(producer))
        status = await self._ledger.call_async(Ledger.status)
        self.job(producer).is_told = status.is_over
        return m.Alive(
            leases=[self._lease(producer, task) for task in sorted(held)],
            serving=self.weights.serving,
            lags=self.weights.lag(producer),
            is_exhausted=status.is_over,
        )

    async def leave(self, producer: str, said: m.Leave) -> m.Left:  # noqa: ARG002  it has no fields
        return m.Left(given_back=await self._ledger.call_async(PromptLedger.abandon, _ledger_name(producer)))

    async def lease(self, producer: str, call: m.LeasePrompts) -> m.Prompts:
        """Waits for: a slot, `wait_s` at most. Unblocked by: a round that is served, or a dropped group."""
        name = _ledger_name(producer)
        # Before the look at the weights: a gateway that was started again does not know them, and a job that does not
        # hear of its leases would renew them by heartbeats, and nobody would work on them.
        repeated = await self._ledger.call_async(PromptLedger.issued, name, call.request)
        if repeated.prompts:
            return self._prompts_of(producer, repeated)
        ends, seen = time.monotonic() + call.wait_s, -1
        with waiting("a slot for an external job", "driver", deadline_s=call.wait_s):
            while True:
                lag = self.weights.lag(producer)  # looked at again: a version may be released during the wait
                is_over = bool(lag) and (await self._ledger.call_async(Ledger.status)).is_over
                if lag and not is_over:
                    return m.Prompts(prompts=[], serving=self.weights.serving, waits_for=lag, lags=lag)
                grant = await self._ledger.call_async(PromptLedger.issue, name, call.count, request=call.request)
                left = ends - time.monotonic()
                if grant.prompts or grant.is_exhausted or left <= 0:
                    break
                if self.is_stopping:
                    raise _STOPPING
                seen = await self._ledger.wait_for_news_async(seen, min(left, STOP_POLL_S), slots=1)
        self.job(producer).is_told = grant.is_exhausted
        return self._prompts_of(producer, grant)

    def _prompts_of(self, producer: str, grant: PromptGrant) -> m.Prompts:
        return m.Prompts(
            prompts=[self._prompt(producer, issued) for issued in grant.prompts],
            serving=self.weights.serving,
            waits_for=grant.waits_for,
            is_exhausted=grant.is_exhausted,
        )

    async def put_group(self, producer: str, call: m.PutGroup) -> m.Put:
        task = self._task(producer, call.lease)
        async with self._lock(task):
            if await self._is_committed(producer, task):
                return m.Put(group=task.group, attempt=task.attempt, is_committed=True, repeated=True)
            await self._commit(producer, task, call.samples)
        return m.Put(group=task.group, attempt=task.attempt, is_committed=True)

    async def put_sample(self, producer: str, call: m.PutSample) -> m.Put:
        task, given = self._task(producer, call.lease), call.sample
        async with self._lock(task):
            if await self._is_committed(producer, task):
                return m.Put(group=task.group, attempt=task.attempt, is_committed=True, repeated=True)
            have = await self._samples_of(producer, task)
            is_repeated = given.index in have
            if is_repeated and have[given.index] != given:
                raise Refusal(
                    409,
                    "other_sample",
                    f"sample {given.index} of this lease is stored already, with other content.",
                    got=f"{len(given.tokens)} tokens, reward {given.reward:g}",
                    expected=f"the same call again: {len(have[given.index].tokens)} tokens, "
                    f"reward {have[given.index].reward:g}",
                    next_action="Go on with the other samples, or give the lease back to begin anew.",
                )
            if not is_repeated:
                self._filled(producer, task, [given], is_whole=False)
                record = SAMPLE_MARK + msgspec.msgpack.encode(given)
                await self._take_room(producer, task, len(record))
                try:
                    await asyncio.to_thread(self._store.keep, task, record)
                except BaseException:
                    self._partial[producer][task] -= len(record)
                    raise
                have[given.index] = given
            missing = [sample.index for sample in self._prompts.group_at(task.group) if sample.index not in have]
            if not missing:
                await self._commit(producer, task, list(have.values()))
        return m.Put(
            group=task.group,
            attempt=task.attempt,
            is_committed=not missing,
            missing=missing,
            repeated=is_repeated and bool(missing),
        )

    def not_told(self, since: float) -> list[str]:
        """Return the jobs that have called since `since` (of `time.monotonic`) and do not know that the run is over."""
        return [name for name, job in list(self.jobs.items()) if job.called >= since and not job.is_told]

    async def drop(self, producer: str, call: m.EndLease) -> m.Ended:
        """The group will never be trained."""
        ended = await self._end(producer, call, PromptLedger.drop)
        self.job(producer).dropped[call.reason] += not ended.repeated
        return ended

    async def give_back(self, producer: str, call: m.EndLease) -> m.Ended:
        """The group is issued again, before any new prompt."""
        return await self._end(producer, call, PromptLedger.retry)

    async def loaded(self, producer: str, call: m.Loaded) -> m.Confirmed:
        self.weights.confirm(producer, call)
        return m.Confirmed(version=call.version, serving=self.weights.serving)

    async def queue(self) -> m.QueueState:
        status = await self._ledger.call_async(Ledger.status)
        return m.QueueState(
            active=status.active,
            ready=status.ready,
            retry=status.retry,
            held_groups=status.held_groups,
            held_tokens=status.held_tokens,
            held_bytes=status.held_bytes,
            leases=status.producers,
        )

    async def producers(self) -> m.Producers:
        now = time.monotonic()
        return m.Producers(
            producers=[
                m.ProducerState(
                    name=name,
                    model=job.said.model,
                    engines=job.said.engines,
                    is_online=now - job.called < self.limits.lease_timeout_s,
                    seconds_since_call=round(now - job.called, 3),
                    newest_version=self.weights.newest(name),
                    committed=job.committed,
                    refused=dict(job.refused),
                    lags=self.weights.lag(name),
                )
                for name, job in sorted(self.jobs.items())
            ]
        )

    async def _end(self, producer: str, call: m.EndLease, end: Callable[[PromptLedger, Task, str], bool]) -> m.Ended:
        task = self._task(producer, call.lease)
        async with self._lock(task):
            try:
                is_first = await self._ledger.call_async(end, task, call.reason)
            except TransitionError as error:
                _refuse_late(error)
            self._forget(task)
        return m.Ended(repeated=not is_first)

    async def _is_committed(self, producer: str, task: Task) -> bool:
        """Whether an earlier call committed this attempt. Renews the leases of the producer; Refusal when this one is
        lost."""
        held = await self._ledger.call_async(PromptLedger.heartbeat, _ledger_name(producer))
        self._forget_lost(producer, held)
        if task in held:
            return False
        try:
            await self._ledger.call_async(PromptLedger.commit, task, NO_PAYLOAD)
        except TransitionError as error:
            _refuse_late(error)
        return True

    async def _commit(self, producer: str, task: Task, given: Sequence[m.GivenSample]) -> None:
        """Store and commit a group, in the steps of `RolloutWorker.keep`."""
        samples = self._filled(producer, task, given, is_whole=True)
        try:
            group, payload = await asyncio.to_thread(self._encode, _ledger_name(producer), samples)
        except HandoffError as error:
            raise _invalid("the group cannot be trained on.", str(error), "rows whose lists line up") from error
        try:
            admission = await self._ledger.call_async(
                PromptLedger.admit, task, num_tokens=payload.num_tokens, num_bytes=len(group.record)
            )
        except CapacityError as error:
            raise Refusal(
                413,
                "too_large",
                "the group is larger than the queue.",
                got=str(error),
                expected="a group within --transferqueue-max-tokens and -max-bytes",
                next_action="Drop the lease with a reason, or let whoever started the run raise the bound.",
            ) from error
        if not admission.granted:
            raise Refusal(
                429,
                "no_room",
                "the queue is full.",
                got=f"a group of {payload.num_tokens} tokens, {len(group.record)} bytes",
                expected=admission.waits_for,
                next_action="Repeat the same call after Retry-After; send heartbeats meanwhile.",
                retry_after_s=1,
            )
        try:
            await self._writer.put(task, group, payload)
        except TransitionError as error:
            await asyncio.to_thread(self._store.forget_attempt, task)
            _refuse_late(error)
        self._forget(task)
        self._partial.get(producer, {}).pop(task, None)
        self.job(producer).committed += 1

    async def _take_room(self, producer: str, task: Task, num_bytes: int) -> None:
        """Count a sample of a group that is not whole, or refuse it.

        What was stored for a lease that ended counts until the spool has deleted it: a job that gives leases back again
        and again fills the spool as well.
        """
        partial = self._partial.setdefault(producer, {})
        most = self.limits.max_partial_bytes
        if sum(partial.values()) + num_bytes > most:
            for ended in [other for other in partial if other not in self._samples]:
                if not await asyncio.to_thread(self._store.kept, ended):
                    partial.pop(ended, None)
        if sum(partial.values()) + num_bytes > most:
            raise Refusal(
                429,
                "no_room",
                "too many samples of this producer wait for the rest of their groups.",
                got=f"{sum(partial.values())} bytes stored, {num_bytes} more",
                expected=f"at most {most} bytes; samples of leases that ended count until the next checkpoint",
                next_action="Complete the groups that were begun, whole if need be (POST /v1/groups), then repeat.",
                retry_after_s=1,
            )
        partial[task] = partial.get(task, 0) + num_bytes

    async def _samples_of(self, producer: str, task: Task) -> dict[int, m.GivenSample]:
        """The samples of a group so far; after a restart of the gateway from the spool."""
        if task not in self._samples:
            records = await asyncio.to_thread(self._store.kept, task)
            found = [
                msgspec.msgpack.decode(record[len(SAMPLE_MARK) :], type=m.GivenSample)
                for record in records
                if record.startswith(SAMPLE_MARK)
            ]
            self._samples[task] = {sample.index: sample for sample in found}
            self._owner[task] = producer
            if found:
                self._partial.setdefault(producer, {})[task] = sum(map(len, records))
        return self._samples[task]

    def _forget_lost(self, producer: str, held: frozenset[Task]) -> None:
        """Free the samples of groups that other attempts generate now."""
        for task in [task for task, owner in self._owner.items() if owner == producer and task not in held]:
            self._forget(task)

    def _forget(self, task: Task) -> None:
        self._samples.pop(task, None)
        self._owner.pop(task, None)

    def _filled(self, producer: str, task: Task, given: Sequence[m.GivenSample], *, is_whole: bool) -> list[Sample]:
        """Return the group's samples with what the job generated, in the order of the prompt. Checks everything that
        does not need the other samples."""
        prompts = {sample.index: sample for sample in self._prompts.group_at(task.group)}
        indices = sorted(sample.index for sample in given)
        if (is_whole and indices != sorted(prompts)) or not prompts.keys() >= set(indices):
            raise _invalid(
                f"the samples are not those of group {task.group}.",
                f"indices {indices[:16]}",
                f"{'each' if is_whole else 'one'} of {sorted(prompts)[:16]}",
            )
        by_index = {sample.index: sample for sample in given}
        for index, sample in by_index.items():
            _check_sample(sample, self.limits)
            for _, _, version in sample.versions:
                if not self.weights.has_confirmed(producer, version):
                    raise Refusal(
                        409,
                        "unconfirmed_version",
                        f"sample {index}: its tokens name weights that this job has not confirmed.",
                        got=f"version {version}",
                        expected=f"a version that it reported as loaded; the newest is {self.weights.newest(producer)}",
                        next_action="Report the hashes of the engines (POST /v1/weights/loaded), then repeat the call.",
                        retry_after_s=0,
                    )
        return [_fill(prompts[index], by_index[index], task) for index in prompts if index in by_index]

    def _prompt(self, producer: str, issued: IssuedPrompt) -> m.Prompt:
        samples = self._prompts.group_at(issued.task.group)
        return m.Prompt(
            lease=self._lease(producer, issued.task),
            group=issued.task.group,
            attempt=issued.task.attempt,
            prompt=samples[0].prompt,
            tokens=samples[0].tokens,
            label=samples[0].label,
            samples=[m.PromptSample(index=sample.index, metadata=sample.metadata) for sample in samples],
        )

    def _lock(self, task: Task) -> asyncio.Lock:
        """Calls for one attempt run one after the other: a call and its repetition may arrive together."""
        return self._locks.setdefault(task, asyncio.Lock())

    def _lease(self, producer: str, task: Task) -> str:
        digest = hmac.digest(self._lease_key, f"{producer}\n{task}".encode(), hashlib.sha256)[:24]
        return f"{task}.{base64.urlsafe_b64encode(digest).decode()}"

    def _task(self, producer: str, lease: str) -> Task:
        """Return the attempt that a lease names. A lease of another producer is refused as one that never existed."""
        match = _LEASE.fullmatch(lease)
        if match is not None:
            task = Task(match[1], int(match[2]), int(match[3]))
            if hmac.compare_digest(self._lease(producer, task).encode(), lease.encode()):
                return task
        raise Refusal(
            404,
            "unknown_lease",
            "this producer has no such lease.",
            got=repr(lease[:80]),
            expected="a lease as POST /v1/leases returned it to the same token",
            next_action="Discard the work and lease new prompts.",
        )


def _ledger_name(producer: str) -> str:
    """The producer's name in the ledger and in the audit: no worker of the run has it."""
    return f"{EXTERNAL}{producer}"


def _fill(prompt: Sample, given: m.GivenSample, task: Task) -> Sample:
    prompt.tokens, prompt.response_length = given.tokens, given.response_length
    prompt.loss_mask = list(given.loss_mask) if given.loss_mask is not None else [1] * given.response_length
    prompt.rollout_log_probs, prompt.reward = given.log_probs, given.reward
    prompt.token_policy_versions = _spans(given)
    prompt.status, prompt.response, prompt.attempt = SampleStatus(given.status), given.response, task.attempt
    return prompt


def _spans(given: m.GivenSample) -> list[VersionSpan]:
    return [VersionSpan(version=version, start=start, end=end) for start, end, version in given.versions]


def _check_sample(given: m.GivenSample, limits: Limits) -> None:
    """Refuse a sample that no trainer could use, and say which number is wrong."""
    where, length = f"sample {given.index}", given.response_length
    if not length < len(given.tokens) <= limits.max_tokens:
        raise _invalid(
            f"{where}: its tokens are not a prompt and a completion within the bound.",
            f"{len(given.tokens)} tokens, response_length {length}",
            f"response_length below the number of tokens, and at most {limits.max_tokens} tokens",
        )
    if max(given.tokens) >= limits.vocab_size:
        raise _invalid(
            f"{where}: the model has no such token.", f"token {max(given.tokens)}", f"0 to {limits.vocab_size - 1}"
        )
    mask_length = length if given.loss_mask is None else len(given.loss_mask)
    if len(given.log_probs) != length or mask_length != length:
        raise _invalid(
            f"{where}: its lists do not line up.",
            f"{len(given.log_probs)} log_probs, {mask_length} entries of loss_mask",
            f"{length} of each, one for each token of the completion",
        )
    values = given.log_probs
    # One by one costs four times as much, and a sum of finite values is not finite only where it overflows.
    is_fine = max(values) <= MOST_LOG_PROB and math.isfinite(sum(values))
    wrong = None if is_fine else next((one for one in values if not -math.inf < one <= MOST_LOG_PROB), None)
    if wrong is not None:
        raise _invalid(f"{where}: a log-probability is impossible.", str(wrong), "finite, and not above 0")
    if not abs(given.reward) <= LARGEST_REWARD:
        raise _invalid(f"{where}: the reward is no number.", str(given.reward), "a finite number")
    fault = tiling_fault(_spans(given), length)
    if fault is not None:
        raise _invalid(
            f"{where}: {fault[:300]}.", f"versions {given.versions[:8]}", f"[start, end, version] over [0, {length})"
        )


def _invalid(what: str, got: str, expected: str) -> Refusal:
    return Refusal(
        422, "invalid", what, got=got, expected=expected, next_action="Correct the call; nothing of it was stored."
    )


def _refuse_late(error: TransitionError) -> NoReturn:
    raise Refusal(
        409,
        "lease_lost",
        "the lease has ended.",
        got=str(error),
        expected="a lease that the producer still has",
        next_action="Discard the work of this lease; heartbeats keep a lease alive.",
    ) from error
