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
import re
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn, Protocol

import msgspec

from vime.gateway import messages as m
from vime.gateway.evaluation import Evaluations
from vime.gateway.refusal import OWN_LATE, STOPPING, Refusal, lease_lost, own_refusal, shown
from vime.gateway.samples import (
    CheckedRows,
    Limits,
    Rows,
    by_index,
    check_samples,
    fill,
    invalid,
    mask_mixed,
    own_content,
    own_prompts,
    refuse_mixed,
)
from vime.gateway.weights import Weights
from vime.handoff.group_store import EncodedGroup, GroupStore
from vime.handoff.ledger import Ledger, LedgerPort
from vime.handoff.ledger_types import (
    EVAL_PREFIX,
    EXTERNAL,
    CapacityError,
    IssuedPrompt,
    OwnGrant,
    OwnOutcome,
    Payload,
    PromptGrant,
    Task,
    TransitionError,
)
from vime.handoff.prompt_ledger import PromptLedger
from vime.types import HandoffError, Sample
from vime.utils.waits import waiting

SAMPLE_MARK = b"vime-gateway-sample-2\n"  # begins the record of a single sample in the spool
_LEASE = re.compile(r"(.+)/(\d{1,15})#(\d{1,9})\.([A-Za-z0-9_-]{32})")
NO_PAYLOAD = Payload(checksum=0, num_bytes=0, num_tokens=0, num_rows=0, min_version=0, max_version=0)
"""The ledger refuses to commit it: it only asks whether an attempt is committed already."""


MOST_REASONS, OTHER = 64, "other"
STOP_POLL_S = 1.0
RATE_S = 180.0


class Prompts(Protocol):
    """A data source that returns any group by its number: samples with index, prompt, label and metadata."""

    def group_at(self, group_index: int) -> list[Sample]: ...


class Writer(Protocol):
    """What is used of `vime.rollout.group_writer.GroupWriter`."""

    async def put(self, task: Task, group: EncodedGroup, payload: Payload) -> float:
        """Store and commit. Raises TransitionError for a group that comes too late."""
        ...


Encode = Callable[[str, list[Sample]], tuple[EncodedGroup, Payload]]
"""(producer, samples of one group) -> its stored form, as a rollout worker of the run makes it. On the loop: it takes
as long as reading the call did, and a thread of its own would wait for the same interpreter."""


@dataclass(slots=True)
class Job:
    """What is known of a producer since the gateway started; nothing depends on it."""

    called: float = 0.0
    said: m.Register = field(default_factory=m.Register)
    evaluates: bool = False  # it has asked for prompts of evaluations, and was not told that there will be no more
    is_told: bool = False  # its last lease or heartbeat said that no prompt is left
    began: float = field(default_factory=time.monotonic)
    committed: int = 0
    commits: deque[float] = field(default_factory=deque)  # when; of the last RATE_S
    dropped: Counter[str] = field(default_factory=Counter)  # reason -> groups
    refused: Counter[str] = field(default_factory=Counter)

    def note_commit(self) -> None:
        self.committed += 1
        self.commits.append(time.monotonic())
        self.forget_old_commits()

    def note_drop(self, reason: str) -> None:
        """Reasons are the job's own text: those of the first groups are told apart."""
        self.dropped[reason if reason in self.dropped or len(self.dropped) < MOST_REASONS else OTHER] += 1

    def forget_old_commits(self) -> None:
        while self.commits and self.commits[0] < time.monotonic() - RATE_S:
            self.commits.popleft()

    @property
    def groups_per_s(self) -> float:
        """Groups a second over the last RATE_S, or since the first call."""
        self.forget_old_commits()
        return len(self.commits) / max(1.0, min(RATE_S, time.monotonic() - self.began))


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
        self.evaluations = Evaluations(weights, self._lease)
        self.is_stopping = False  # set from any thread: calls that wait end within STOP_POLL_S
        self.jobs: dict[str, Job] = {}
        self.rewards: list[float] = []  # of the samples of committed groups; the run takes them away
        self.masked_tokens = 0  # of committed groups
        self._samples: dict[Task, dict[int, Rows]] = {}  # of groups that are not whole, by index
        self._owner: dict[Task, str] = {}  # of these groups
        self._partial: dict[str, dict[Task, int]] = {}  # producer -> bytes in the spool of groups that are not whole
        self._locks: weakref.WeakValueDictionary[object, asyncio.Lock] = weakref.WeakValueDictionary()

    def job(self, producer: str) -> Job:
        return self.jobs.setdefault(producer, Job())

    async def register(self, producer: str, said: m.Register) -> m.Registered:
        """What an earlier process of the same producer had leased goes to others: nobody works on it any more, and
        heartbeats of this one would renew it for ever."""
        limits, self.job(producer).said = self.limits, said
        await asyncio.to_thread(self.weights.register, producer, said.engines)
        await self.leave(producer, m.Leave())
        return m.Registered(
            producer=producer,
            protocol=m.PROTOCOL,
            serving=self.weights.serving,
            samples_per_prompt=limits.samples_per_prompt,
            max_staleness=limits.max_staleness,
            temperature=limits.temperature,
            reward_key=limits.reward_key,
            extra_fields=[*limits.extra_fields],
            evaluates=limits.evaluates,
            lease_timeout_s=limits.lease_timeout_s,
            max_body_bytes=limits.max_body_bytes,
        )

    async def heartbeat(self, producer: str, said: m.Heartbeat) -> m.Alive:  # noqa: ARG002  it has no fields
        held = await self._ledger.call_async(PromptLedger.heartbeat, _ledger_name(producer))
        status = await self._ledger.call_async(Ledger.status)
        self.job(producer).is_told = status.is_over
        self.evaluations.renew(producer)
        return m.Alive(
            leases=[self._lease(producer, task) for task in sorted(held)],
            serving=self.weights.serving,
            lags=self.weights.lag(producer),
            is_exhausted=status.is_over,
        )

    async def leave(self, producer: str, said: m.Leave) -> m.Left:  # noqa: ARG002  it has no fields
        given_back = await self._ledger.call_async(PromptLedger.abandon, _ledger_name(producer))
        return m.Left(given_back=given_back + self.evaluations.abandon(producer))

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
                    raise STOPPING
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
            prompts = self._prompts.group_at(task.group)
            checked = self._check(producer, by_index(call.samples), prompts, is_whole=True)
            await self._commit(producer, task, [(prompt, checked[prompt.index]) for prompt in prompts])
        return m.Put(group=task.group, attempt=task.attempt, is_committed=True)

    async def put_own_group(self, producer: str, call: m.PutOwnGroup) -> m.Put:
        """A group for a prompt of the job's own takes the next number of the run, in place of a prompt of its data
        (docs/decisions/0035-groups-of-a-jobs-own.md). What the key names is looked up before the content is checked: a
        job that was started again may have confirmed no weights yet."""
        name, content = _ledger_name(producer), own_content(call)
        async with self._lock((producer, call.key)):
            grant = await self._ledger.call_async(PromptLedger.known_own, name, call.key, content)
            if grant is None or grant.outcome is OwnOutcome.ISSUED:
                wanted = range(self.limits.samples_per_prompt)
                checked = self._check(producer, by_index(call.samples), wanted, is_whole=True)
                grant = await self._own_slot(name, call, content)
            task = grant.task
            if task is None or grant.outcome is OwnOutcome.OTHER_CONTENT:
                raise own_refusal(call, grant)
            is_repeated = grant.outcome is OwnOutcome.COMMITTED
            if not is_repeated:
                places = self._prompts.group_at(task.group)
                prompts = [(prompt, checked[place]) for place, prompt in enumerate(own_prompts(call, places))]
                try:
                    await self._commit(producer, task, prompts)
                except Refusal as error:
                    if error.code == "lease_lost":  # its time was over before it was stored: the key is free again
                        raise OWN_LATE from error
                    if not error.body.may_repeat:  # it will not come again as it was
                        await self._ledger.call_async(PromptLedger.drop, task, error.body.code)
                    raise
        return m.Put(group=task.group, attempt=task.attempt, is_committed=True, repeated=is_repeated)

    async def _own_slot(self, name: str, call: m.PutOwnGroup, content: str) -> OwnGrant:
        """Waits for: a slot, `wait_s` at most. Unblocked by: a round that is served, or a dropped group."""
        ends, seen = time.monotonic() + call.wait_s, -1
        with waiting("a slot for a group of an external job's own", "driver", deadline_s=call.wait_s):
            while True:
                grant = await self._ledger.call_async(PromptLedger.issue_own, name, call.key, content)
                left = ends - time.monotonic()
                if grant.outcome is not OwnOutcome.WAITS or left <= 0:
                    return grant
                if self.is_stopping:
                    raise STOPPING
                seen = await self._ledger.wait_for_news_async(seen, min(left, STOP_POLL_S), slots=1)

    async def put_sample(self, producer: str, call: m.PutSample) -> m.Put:
        task, given = self._task(producer, call.lease), [call.sample, *call.more_rows]
        index = call.sample.index
        async with self._lock(task):
            if await self._is_committed(producer, task):
                return m.Put(group=task.group, attempt=task.attempt, is_committed=True, repeated=True)
            have = await self._samples_of(producer, task)
            is_repeated, prompts = index in have, self._prompts.group_at(task.group)
            if is_repeated and have[index] != given:
                raise Refusal(
                    409,
                    "other_sample",
                    f"sample {index} of this lease is stored already, with other content.",
                    got=shown(given),
                    expected=f"the same call again: {shown(have[index])}",
                    next_action="Go on with the other samples, or give the lease back to begin anew.",
                )
            if not is_repeated:
                self._check(producer, by_index(given), prompts, is_whole=False)
                if any(row.index != index for row in given):
                    raise invalid("the rows are of several samples.", str([row.index for row in given][:8]), f"{index}")
                record = SAMPLE_MARK + msgspec.msgpack.encode(given)
                await self._take_room(producer, task, len(record))
                try:
                    await asyncio.to_thread(self._store.keep, task, record)
                except BaseException:
                    self._partial[producer][task] -= len(record)
                    raise
                have[index] = given
            missing = [prompt.index for prompt in prompts if prompt.index not in have]
            if not missing:
                checked = self._check(producer, have, prompts, is_whole=True)  # a restart forgets what was confirmed
                await self._commit(producer, task, [(prompt, checked[prompt.index]) for prompt in prompts])
        return m.Put(
            group=task.group,
            attempt=task.attempt,
            is_committed=not missing,
            missing=missing,
            repeated=is_repeated and bool(missing),
        )

    def not_told(self, since: float) -> list[str]:
        """Return the jobs that have called since `since` (of `time.monotonic`) and do not know that the run is over."""
        jobs = [(name, job) for name, job in list(self.jobs.items()) if job.called >= since]
        return [name for name, job in jobs if not job.is_told or job.evaluates]

    async def lease_evaluation(self, producer: str, call: m.LeaseEvaluation) -> m.EvalPrompts:
        """Waits for: an evaluation, `wait_s` at most. Unblocked by: the driver, before some rounds and after the last;
        and by leases whose time is over."""
        ends, job, evaluations = time.monotonic() + call.wait_s, self.job(producer), self.evaluations
        job.evaluates = True
        with waiting("an evaluation for an external job", "driver", deadline_s=call.wait_s):
            while True:
                found = evaluations.lease(producer, call)
                left = ends - time.monotonic()
                if found.prompts or found.lags or found.is_over or left <= 0:
                    break
                if self.is_stopping:
                    raise STOPPING
                await asyncio.sleep(min(left, STOP_POLL_S))  # an evaluation comes from another thread
        job.evaluates = not found.is_over
        return found

    async def put_evaluated(self, producer: str, call: m.PutEvaluated) -> m.Evaluated:
        """The first result of a prompt counts, also when the time of its lease is over."""
        return self.evaluations.put(producer, self._task(producer, call.lease, is_evaluated=True), call)

    async def drop(self, producer: str, call: m.EndLease) -> m.Ended:
        """The group will never be trained."""
        ended = await self._end(producer, call, PromptLedger.drop)
        if not ended.repeated:
            self.job(producer).note_drop(call.reason)
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
                    behind=self.weights.behind(name),
                    groups_per_s=round(job.groups_per_s, 4),
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

    async def _commit(self, producer: str, task: Task, prompts: Sequence[tuple[Sample, CheckedRows]]) -> None:
        """Store and commit a group, in the steps of `RolloutWorker.keep`. `prompts`: each with what the job made."""
        is_masked = self.limits.mixed_versions == "mask"
        every_row = [row for _, rows in prompts for row in rows]
        num_masked = mask_mixed(every_row, self.limits.max_staleness) if is_masked else 0
        samples = fill(prompts, task.attempt)
        try:
            group, payload = self._encode(_ledger_name(producer), samples)
        except HandoffError as error:
            raise invalid("the group cannot be trained on.", str(error), "rows whose lists line up") from error
        if self.limits.has_capacity:
            await self._admit(task, payload)
        try:
            await self._writer.put(task, group, payload)
        except TransitionError as error:
            await asyncio.to_thread(self._store.forget, [task])
            _refuse_late(error)
        self._forget(task)
        self._partial.get(producer, {}).pop(task, None)
        self.job(producer).note_commit()
        self.masked_tokens += num_masked
        self.rewards += {sample.index: sample.scalar_reward(self.limits.reward_key) for sample in samples}.values()

    async def _admit(self, task: Task, payload: Payload) -> None:
        """Refuse a group for which the queue has no room now, or never will."""
        try:
            admission = await self._ledger.call_async(
                PromptLedger.admit, task, num_tokens=payload.num_tokens, num_bytes=payload.num_bytes
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
                got=f"a group of {payload.num_tokens} tokens, {payload.num_bytes} bytes",
                expected=admission.waits_for,
                next_action="Repeat the same call after Retry-After; send heartbeats meanwhile.",
                retry_after_s=1,
            )

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

    async def _samples_of(self, producer: str, task: Task) -> dict[int, Rows]:
        """The samples of a group so far; after a restart of the gateway from the spool."""
        if task not in self._samples:
            records = await asyncio.to_thread(self._store.kept, task)
            found = [
                msgspec.msgpack.decode(record[len(SAMPLE_MARK) :], type=Rows)
                for record in records
                if record.startswith(SAMPLE_MARK)
            ]
            self._samples[task] = {rows[0].index: rows for rows in found}
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

    def _check(
        self, producer: str, given: Mapping[int, Rows], wanted: Sequence[Sample | int], *, is_whole: bool
    ) -> dict[int, CheckedRows]:
        weights = self.weights
        checked = check_samples(
            given,
            [place.index if isinstance(place, Sample) else place for place in wanted],
            self.limits,
            has_confirmed=lambda version: weights.has_confirmed(producer, version),
            newest=weights.newest(producer),
            is_whole=is_whole,
        )
        if self.limits.mixed_versions == "reject":
            refuse_mixed(checked)
        return checked

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

    def _lock(self, name: object) -> asyncio.Lock:
        """Calls for one attempt, or one key, run one after the other: a call and its repetition may arrive together."""
        return self._locks.setdefault(name, asyncio.Lock())

    def _lease(self, producer: str, task: Task) -> str:
        digest = hmac.digest(self._lease_key, f"{producer}\n{task}".encode(), hashlib.sha256)[:24]
        return f"{task}.{base64.urlsafe_b64encode(digest).decode()}"

    def _task(self, producer: str, lease: str, *, is_evaluated: bool = False) -> Task:
        """Return the attempt that a lease names. A lease of another producer is refused as one that never existed."""
        match = _LEASE.fullmatch(lease)
        if match is not None:
            task = Task(match[1], int(match[2]), int(match[3]))
            is_signed = hmac.compare_digest(self._lease(producer, task).encode(), lease.encode())
            if is_signed and task.partition.startswith(EVAL_PREFIX) is is_evaluated:
                return task
        raise Refusal(
            404,
            "unknown_lease",
            "this producer has no such lease.",
            got=repr(lease[:80]),
            expected=f"a lease as POST /v1/{'evaluation/' * is_evaluated}leases returned it to the same token",
            next_action="Discard the work and lease new prompts.",
        )


def _ledger_name(producer: str) -> str:
    """The producer's name in the ledger and in the audit: no worker of the run has it."""
    return f"{EXTERNAL}{producer}"


def _refuse_late(error: TransitionError) -> NoReturn:
    raise lease_lost(str(error)) from error
