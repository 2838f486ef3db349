"""The rollout worker of a job outside of the run: prompts come from the gateway, finished groups go to it.

What happens to a group in between is `GroupWorker`, as in the run itself: plug-ins, rewards, filters, versions.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from vime.config.parse import Args
from vime.gateway import messages as m
from vime.gateway.client import UNCONFIRMED, GatewayClient, RefusedError
from vime.handoff.ledger_types import Task
from vime.rollout.generation import eval_sampling_params
from vime.rollout.group_worker import UNUSABLE, Assignment, GroupWorker, generate_and_rm_group
from vime.rollout.loops import raise_first
from vime.rollout.partial import MIXED, oldest_allowed
from vime.rollout.reward_errors import ErrorShare, error_of
from vime.types import LARGEST_REWARD, EngineError, Sample, SampleStatus, Version, VimeError
from vime.utils.waits import waiting

logger = logging.getLogger(__name__)
PARTITION = "leased"  # of this job's own task names; the ledger's partition is in the lease
LEASE_WAIT_S, LEAVE_S, HEARTBEAT_S = 20.0, 5.0, 5.0
LOST = frozenset({"lease_lost", "unknown_lease", "wrong_hash"})
"""Work that is discarded: for a lease that the job has no more, or with weights that the run has no more."""


class Loader(Protocol):
    """What is used of `vime.ray.produce.Weights`."""

    async def bring(self, version: Version) -> None: ...
    async def report(self, version: Version) -> None: ...


async def renew(client: GatewayClient, registered: m.Registered) -> None:
    """Send heartbeats, where no worker does, until one is answered with the end of the run. Waits for: the clock."""
    while not (await client.call("/v1/producers/heartbeat", m.Heartbeat(), m.Alive)).is_exhausted:
        await asyncio.sleep(min(registered.lease_timeout_s / 3, HEARTBEAT_S))


class JobWorker(GroupWorker):
    """`weights`: what the engines of this job hold; the version that the gateway serves is loaded before prompts are
    taken."""

    def __init__(
        self,
        args: Args,
        client: GatewayClient,
        registered: m.Registered,
        weights: Loader,
        *,
        num_prompts: int,
    ) -> None:
        super().__init__(args, ErrorShare(args))
        self._client, self._registered, self._weights = client, registered, weights
        self._max_running = num_prompts
        self._version: Version = -1  # of the weights that were confirmed last
        self._leases: dict[Task, str] = {}
        self._being_put: set[Task] = set()
        self._lease_calls, self._lease_answers = 0, 0
        self._ended = asyncio.Event()
        self._is_ending = False
        self._over = asyncio.Event()  # the run has said that no prompt is left

    def end_soon(self) -> None:
        """Take no more prompts. Any thread."""
        self._is_ending = True

    def ended(self) -> None:
        self._ended.set()

    @property
    def is_exhausted(self) -> bool:
        return self._over.is_set()

    async def run(self) -> None:
        """Work, and evaluate beside it where the run leaves that to jobs, until both are over."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(super().run())
                if self._registered.evaluates:
                    tasks.create_task(self._evaluate())
        except BaseExceptionGroup as failures:
            raise_first(failures)

    async def _evaluate(self) -> None:
        """Waits for: evaluations. Unblocked by: the gateway, which says when the last one is over."""
        while not self._is_ending:
            call = m.LeaseEvaluation(request=uuid.uuid4().hex, count=self._max_running, wait_s=LEASE_WAIT_S)
            try:
                granted = await self._client.call("/v1/evaluation/leases", call, m.EvalPrompts, longer_s=LEASE_WAIT_S)
            except RefusedError as error:
                if error.code != "forbidden":
                    raise
                logger.warning("this job does not evaluate: %s", error)
                return
            if granted.is_over:
                return
            if granted.lags:
                await self._load(granted.serving)
            if granted.prompts:
                renewing = asyncio.create_task(renew(self._client, self._registered))
                try:
                    async with asyncio.TaskGroup() as tasks:
                        for prompt in granted.prompts:
                            tasks.create_task(self._evaluate_prompt(prompt, granted.before_round))
                finally:
                    renewing.cancel()

    async def _evaluate_prompt(self, prompt: m.EvalPrompt, before_round: int) -> None:
        """Generate one prompt of an evaluation, with its own sampling, and bring the result."""
        params = eval_sampling_params(self._args)
        params |= {"temperature": prompt.sampling.temperature, "top_p": prompt.sampling.top_p}
        params |= {"top_k": prompt.sampling.top_k, "max_tokens": prompt.sampling.max_tokens}
        samples = _samples_of(prompt)
        for sample in samples:
            sample.rollout_id = before_round
        samples = await generate_and_rm_group(self._args, samples, params, evaluation=True)
        error = error_of(samples) or _failed(samples)
        unusable = [sample.status for sample in samples if sample.status in UNUSABLE]
        if unusable and not error:
            raise EngineError(f"evaluation {prompt.set}, prompt {prompt.group}: ended {unusable[0]}.")
        given = [] if error else [self._given(sample, ()) for sample in samples]
        try:
            put = m.PutEvaluated(lease=prompt.lease, samples=given, error=error[:2000])
            await self._put("/v1/evaluation/groups", put, m.Evaluated)
        except RefusedError as refused:
            if refused.code not in LOST:
                raise
            logger.warning("evaluation %s, prompt %d: %s", prompt.set, prompt.group, refused)

    async def take(self) -> list[Assignment]:
        """Return the next prompts; none when the run is over. Its gateway may be gone then, so no call is waited for
        any longer."""
        taking, over = asyncio.create_task(self._take()), asyncio.create_task(self._over.wait())
        try:
            await asyncio.wait({taking, over}, return_when=asyncio.FIRST_COMPLETED)
            return [] if self.is_exhausted else taking.result()
        finally:
            taking.cancel()
            over.cancel()

    async def _take(self) -> list[Assignment]:
        """Waits for: weights, slots, and a place among the prompts in progress. Unblocked by: the gateway, and groups
        that end."""
        request = uuid.uuid4().hex  # one name until it gets something: it is one place in the line
        while not self._is_ending:
            wanted = self._max_running - len(self._running)
            if wanted < 1:
                self._ended.clear()
                with waiting("a prompt in progress to end", "engine", deadline_s=None):
                    await self._ended.wait()
                continue
            call = m.LeasePrompts(request=request, count=wanted, wait_s=LEASE_WAIT_S)
            self._lease_calls += 1
            granted = await self._client.call("/v1/leases", call, m.Prompts, longer_s=LEASE_WAIT_S)
            self._lease_answers += 1
            # Before the weights are loaded, which may take longer than two heartbeats.
            assignments = [self._assignment(prompt, granted.serving) for prompt in granted.prompts]
            if granted.is_exhausted:  # before the look at the weights: the gateway may be gone in a moment
                self._over.set()
                break
            if granted.serving != self._version or granted.lags:
                await self._load(granted.serving)
            if assignments:
                return assignments
        return []

    async def watch(self) -> None:
        """Renew the leases; stop work whose lease has gone to another producer, and give back leases that nobody works
        on. Waits for: the clock."""
        strays: set[str] = set()
        num_calls = 0  # calls for leases that had begun when `strays` were listed
        while True:  # the first at once: whoever sent them until now has ended
            known = dict(self._leases)  # a response may be older than a lease that arrives before it
            alive = await self._client.call("/v1/producers/heartbeat", m.Heartbeat(), m.Alive)
            if alive.is_exhausted:
                self._over.set()
            for task, work in list(self._running.items()):
                is_lost = task in known and known[task] not in alive.leases and not work.done()
                if task in self._being_put and not self.is_exhausted:
                    continue  # its lease may be over because the group counts already: the put says so
                if self.is_exhausted or is_lost:
                    work.cancel(f"group {task.group}: its lease has gone to another producer, or the run is over")
            unknown = set(alive.leases).difference(known.values(), self._leases.values())
            if self._lease_answers >= num_calls:  # else the response that brings them may still be on its way
                for lease in strays & unknown:
                    await self._return_stray(lease)
            strays, num_calls = unknown, self._lease_calls
            await asyncio.sleep(min(self._registered.lease_timeout_s / 3, HEARTBEAT_S))

    async def _return_stray(self, lease: str) -> None:
        """Heartbeats would renew it for ever, and nobody would make its group."""
        logger.warning("lease %s is given back: this job does not know it", lease)
        try:
            call = m.EndLease(lease=lease, reason="the job does not know this lease")
            await self._client.call("/v1/leases/give-back", call, m.Ended)
        except RefusedError as error:
            if error.code not in LOST:
                raise

    async def produce(self, assignment: Assignment) -> None:
        """Generate one group, then keep, drop or give it back. Work on a lost lease is discarded."""
        try:
            await super().produce(assignment)
        except RefusedError as error:
            if error.code not in LOST:
                raise
            logger.warning("group %d: %s", assignment.task.group, error)
            self.stats.late_groups += 1
        finally:
            self._being_put.discard(assignment.task)
            self._leases.pop(assignment.task, None)

    async def keep(self, assignment: Assignment, samples: list[Sample]) -> bool:
        """Put the group; it counts when this returns True."""
        given = [self._given(sample, self._registered.extra_fields) for sample in samples]
        self._being_put.add(assignment.task)
        try:
            await self._put("/v1/groups", m.PutGroup(lease=self._leases[assignment.task], samples=given), m.Put)
        except RefusedError as error:
            if error.code != MIXED:
                raise
            self._being_put.discard(assignment.task)
            await self.settle_mixed(assignment, samples)
            return False
        self.stats.committed_groups += 1
        return True

    async def _put(self, path: str, put: m.PutGroup | m.PutEvaluated, kind: type[m.Put] | type[m.Evaluated]) -> None:
        """A gateway that was started again asks what it forgot: every version whose tokens may still come."""
        try:
            await self._client.call(path, put, kind)
        except RefusedError as error:
            if error.code != UNCONFIRMED:
                raise
            for version in sorted({version for sample in put.samples for *_, version in sample.versions}):
                await self._weights.report(version)
            await self._client.call(path, put, kind)

    async def note_dropped(self, assignment: Assignment, reason: str) -> None:
        await self._end("/v1/leases/drop", assignment, reason)

    async def give_back(self, assignment: Assignment, samples: list[Sample], reason: str) -> None:  # noqa: ARG002
        self.stats.retried_groups += 1
        await self._end("/v1/leases/give-back", assignment, reason)

    def oldest(self, samples: Sequence[Sample]) -> Version:
        newest = max((version for sample in samples for version in sample.weight_versions), default=0)
        return oldest_allowed(self._args, newest)

    async def leave(self) -> None:
        """Give every lease to others at once. When no prompt is left the gateway may be gone, and is asked once."""
        try:
            async with asyncio.timeout(LEAVE_S):
                patience_s = 0.0 if self.is_exhausted else LEAVE_S
                await self._client.call("/v1/producers/leave", m.Leave(), m.Left, patience_s=patience_s)
        except (VimeError, TimeoutError) as error:  # a lease that is not renewed ends by itself
            level = logging.INFO if self.is_exhausted else logging.WARNING
            logger.log(level, "the job could not leave: %s", error)

    async def _load(self, version: Version) -> None:
        if version < 0:  # the trainer has not written the first weights
            await asyncio.sleep(1.0)
            return
        try:
            await self._weights.bring(version)
        except RefusedError as error:
            if error.code != "unknown_version":
                raise
            logger.info("a newer version replaced one while it was loaded: %s", error)  # the next call names it
        else:
            self._version = version

    async def _end(self, path: str, assignment: Assignment, reason: str) -> None:
        call = m.EndLease(lease=self._leases[assignment.task], reason=reason[:500])
        await self._client.call(path, call, m.Ended)

    def _assignment(self, prompt: m.Prompt, serving: Version) -> Assignment:
        task = Task(PARTITION, prompt.group, prompt.attempt)
        self._leases[task] = prompt.lease
        return Assignment(task=task, prompts=_samples_of(prompt), serving=serving)

    def _given(self, sample: Sample, extra_fields: Sequence[str]) -> m.GivenSample:
        return m.GivenSample(
            index=sample.index,
            tokens=_packed(sample.tokens, "<i4"),
            response_length=sample.response_length,
            log_probs=_packed(sample.rollout_log_probs, "<f4"),
            versions=[(span.start, span.end, span.version) for span in sample.token_policy_versions],
            reward=self._reward(sample),
            loss_mask=None if sample.loss_mask is None else _packed(sample.loss_mask, "u1"),
            status="truncated" if sample.status is SampleStatus.TRUNCATED else "completed",
            response=sample.response,
            extra={name: _extra(sample, name) for name in extra_fields},
        )

    def _reward(self, sample: Sample) -> float | dict[str, float]:
        """With entries where the run trains on one: the others become metrics of the run. Entries that are no finite
        numbers stay here, as a worker of the run leaves them out of its metrics."""
        key = self._registered.reward_key
        if not key or not isinstance(sample.reward, Mapping):
            return sample.scalar_reward(self._args.reward_key)
        sample.scalar_reward(key)  # raises where the run could not train on it
        numbers = {name: value for name, value in sample.reward.items() if isinstance(value, (int, float))}
        return {str(name): float(value) for name, value in numbers.items() if abs(value) <= LARGEST_REWARD}


def _packed(numbers: Sequence[float], kind: str) -> bytes:
    """A column as the protocol packs it, which the gateway reads in far less time than a list."""
    return np.asarray(numbers, kind).tobytes()


def _failed(samples: Sequence[Sample]) -> str:
    """Return why a sample of an evaluation has failed; empty when none has."""
    reasons = [str(each.metadata.get("session_reason", "")) for each in samples if each.status is SampleStatus.FAILED]
    return f"{m.SAMPLE_FAILED}{reasons[0] or 'its generate function says so'}" if reasons else ""


def _samples_of(prompt: m.Prompt | m.EvalPrompt) -> list[Sample]:
    return [
        Sample(
            group_index=prompt.group,
            index=each.index,
            session_id=f"group-{prompt.group}",
            prompt=prompt.prompt,
            tokens=list(prompt.tokens),
            label=prompt.label,
            metadata=dict(each.metadata),
        )
        for each in prompt.samples
    ]


def _extra(sample: Sample, name: str) -> object:
    """Return a column of --transfer-queue-extra-data-fields of the run, which the gateway checks: an attribute of the
    sample, or an entry of its metadata."""
    value: object = getattr(sample, name, None)
    value = sample.metadata.get(name) if value is None else value
    to_list = getattr(value, "tolist", None)  # of an array or a tensor
    return to_list() if callable(to_list) else value
