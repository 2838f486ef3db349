"""The coordinator of rounds in mode `streaming`: which finished groups a round trains, and where their rows are.

It leases groups from the ledger and knows their numbers (`data/rows.py`) but no token, so its work does not depend on
the length of completions. `worker.RolloutWorker` generates beside it; ranks read rows by key, using the ticket that is
made from what `take` returns.
"""

from __future__ import annotations

import functools
import logging
import statistics
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from vime.config.deadlines import rollout_deadline_s
from vime.config.parse import Args
from vime.data.rows import GroupFacts, check_versions, decode_facts
from vime.handoff.group_store import StoredGroup, chunk_keys
from vime.handoff.ledger import Ledger, LedgerPort, LedgerStatus
from vime.handoff.ledger_types import EXTERNAL, LeasedGroup, LeaseResult, RoundLease, Task
from vime.handoff.round_ledger import RoundLedger
from vime.observability.events import span
from vime.rollout.convert import mark_removed, set_custom_rewards
from vime.rollout.early_batches import EarlyBatches
from vime.rollout.group_worker import WorkerStats
from vime.rollout.metrics import completion_metrics, drop_metrics, num_removed, version_metrics
from vime.rollout.progress import BOARD, RoundProgress
from vime.types import Sample, StaleError, WaitTimeoutError
from vime.utils.failpoints import Point, failpoint
from vime.utils.waits import waiting

logger = logging.getLogger(__name__)
NEWS_S = 2.0
"""How long one wait for a change lasts before the coordinator checks that the workers are still alive."""


class Workers(Protocol):
    """The rollout workers of a run: one in this process (`worker.RolloutWorker`), or several in processes of their own
    (`ray/workers.py`)."""

    @property
    def stats(self) -> WorkerStats:
        """Counts since the last `take_stats`, still growing."""
        ...

    @property
    def num_running(self) -> int: ...
    @property
    def waits_for(self) -> str: ...
    @property
    def spool_bytes(self) -> int: ...
    def is_ours(self, producer: str) -> bool:
        """Return whether a worker of this start of the run, dead or alive, has this name."""
        ...

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def raise_if_failed(self) -> None: ...
    def take_stats(self) -> WorkerStats: ...
    def samples(self, groups: Sequence[StoredGroup]) -> list[list[Sample]]: ...
    def restore(self, groups: Sequence[StoredGroup]) -> None: ...
    def put_again(self, unread: Mapping[Task, int | None]) -> list[Task]: ...
    def release(self, tasks: Sequence[Task]) -> None: ...
    def forget(self, tasks: Sequence[Task]) -> None: ...
    def compact(self, needed: Mapping[Task, int | None]) -> int: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenGroup:
    """A leased group as the coordinator knows it."""

    task: Task
    checksum: int
    facts: GroupFacts

    @property
    def handles(self) -> list[str]:
        return chunk_keys(self.task, self.facts.num_chunks)

    @property
    def record(self) -> StoredGroup:
        """What identifies its payload in a spool."""
        return StoredGroup(self.task, self.checksum, self.facts.notes.producer)


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenRound:
    """The groups of a round in the order of their numbers. `begun`: numbers of those that the trainers already have."""

    lease: RoundLease
    groups: Sequence[TakenGroup]
    begun: frozenset[int] = frozenset()

    @property
    def left(self) -> list[TakenGroup]:
        return [group for group in self.groups if group.task.group not in self.begun]


class RoundCoordinator:
    """Used by the RolloutManager, one round at a time; `claim_early_batch` may be called during `take`."""

    def __init__(
        self, args: Args, *, ledger: LedgerPort, workers: Workers, early_batches: EarlyBatches | None = None
    ) -> None:
        self._args, self._ledger, self.workers = args, ledger, workers
        self.early_batches = early_batches or EarlyBatches()
        self._claiming = threading.Lock()  # protects `_begun`
        self._begun: dict[int, TakenGroup] = {}  # groups in early batches of the round, by number
        self._round_id = -1
        self._take_time_s = 0.0
        self._too_old = 0  # the part of the ledger's count that earlier rounds have reported
        self._status: LedgerStatus | None = None  # as it was at the last attempt to lease
        self._leases: dict[int, RoundLease] = {}  # of this round and the one before
        self._is_closed = threading.Event()
        self._beat = threading.Thread(target=self._heartbeat, name="vime-lease-heartbeat", daemon=True)

    def begin(self, round_id: int) -> None:
        """Set the round that the next `take` returns."""
        self._round_id, self._begun = round_id, {}
        self.early_batches.open(round_id)

    def take(self, num_groups: int) -> TakenRound:
        """Return the groups of the round. Waits for: `num_groups` ready groups. Unblocked by: the workers' commits.
        Asking again for a round returns the same groups."""
        failpoint(Point.LEASE)
        limit_s, round_id = rollout_deadline_s(self._args.config), self._round_id
        leased: Sequence[LeasedGroup] = ()
        try:
            with (
                span("lease_round", rollout_id=round_id),
                waiting(f"the groups of round {round_id}", deadline_s=limit_s),
            ):
                lease = self._wait_for_lease(num_groups)
            leased = lease.groups
        finally:
            is_as_begun = self.early_batches.close(leased)
        failpoint(Point.LEASED)
        began = time.monotonic()
        with self._claiming:
            begun = self._begun if is_as_begun else {}
        with span("transferqueue_get_groups", rollout_id=round_id, num_groups=len(leased) - len(begun)):
            groups = [*begun.values(), *self._taken([group for group in leased if group.task.group not in begun])]
        groups.sort(key=lambda group: group.task.group)
        fresh = [group for group in groups if group.task.group not in begun]
        facts = [group.facts for group in fresh]
        samples = functools.cache(lambda: self.samples(fresh))  # both plug-ins see what the first one did to them
        mark_removed(self._args, facts, samples)
        self._check_marks(facts, round_id)
        set_custom_rewards(self._args, facts, samples)
        self._take_time_s = time.monotonic() - began
        return TakenRound(lease=lease, groups=groups, begun=frozenset(begun))

    def _check_marks(self, facts: Sequence[GroupFacts], round_id: int) -> None:
        """Refuse a row that is too old: it was removed when the group was stored, and the marks take it in again."""
        try:
            check_versions(facts, round_id, self._args.transferqueue_max_staleness)
        except StaleError as error:
            raise StaleError(
                f"{error} A sample that a generate function had removed was taken in again by "
                "--rollout-sample-filter-path: let it set remove_sample only where it is not set."
            ) from error

    def claim_early_batch(self) -> list[TakenGroup]:
        """Return finished groups of the round that is being waited for, so that the trainers can start with them. Empty
        when the round became complete meanwhile."""
        with self._claiming:
            groups = self._taken(self.early_batches.claim())
            self._begun |= {group.task.group: group for group in groups}
        return groups

    def samples(self, groups: Sequence[TakenGroup]) -> list[list[Sample]]:
        """Return the completions themselves, read from where they are stored, for callers that need them. They carry
        the marks of --rollout-sample-filter-path."""
        found = self.workers.samples([group.record for group in groups])
        for group, samples in zip(groups, found, strict=True):
            for sample, is_removed in zip(samples, group.facts.rows["is_removed"].tolist(), strict=True):
                sample.rollout_id, sample.remove_sample = self._round_id, bool(is_removed)
        return found

    def metrics(self, taken: TakenRound) -> dict[str, float]:
        """Return the statistics of the round's completions, the state of the queue, and what happened since the round
        before (docs/metrics.md)."""
        status = self._status
        assert status is not None
        completions = [completion for group in taken.groups for completion in group.facts.completions()]
        stats = self.workers.take_stats()
        num_too_old, self._too_old = max(0, status.too_old - self._too_old), status.too_old
        lags = [
            taken.lease.version - completion.newest_version
            for completion in completions
            if completion.newest_version >= 0
        ]
        puts = stats.put_times_s
        before_filter = {"rollout/reward_mean_before_filter": statistics.fmean(stats.rewards)} if stats.rewards else {}
        return {
            **completion_metrics(completions, "rollout"),
            **version_metrics(completions, "rollout"),
            **drop_metrics(stats.dropped),
            **(stats.partial.metrics() if self._args.partial_rollout else {}),
            **stats.prompts.metrics(),
            **_job_metrics(taken),
            **before_filter,
            "rollout/num_groups": float(len(taken.groups)),
            "rollout/removed_samples": float(num_removed(completions)),
            "transferqueue/ready_groups": float(status.ready),
            "transferqueue/inflight_groups": float(sum(status.producers.values())),
            "transferqueue/retry_groups": float(status.retry),
            "transferqueue/dropped_groups": float(sum(stats.dropped.values())),
            "transferqueue/stale_dropped_groups": float(num_too_old),
            "transferqueue/late_groups": float(stats.late_groups),
            "transferqueue/get_latency": self._take_time_s,
            "transferqueue/put_latency": statistics.fmean(puts) if puts else 0.0,
            "transferqueue/producer_lag": statistics.fmean(lags) if lags else 0.0,
            "transferqueue/spool_bytes": float(self.workers.spool_bytes),
        }

    def _taken(self, leased: Sequence[LeasedGroup]) -> list[TakenGroup]:
        """Return the numbers of leased groups. Their rows are in the queue when this returns: groups that were stored
        before a restart are put back, because the earlier queue is gone."""
        groups = [
            TakenGroup(
                task=group.task,
                checksum=group.payload.checksum,
                facts=decode_facts(group.task.group, group.payload.facts),
            )
            for group in leased
        ]
        check_versions([group.facts for group in groups], self._round_id, self._args.transferqueue_max_staleness)
        gone = [group.record for group in groups if not self.workers.is_ours(group.facts.notes.producer)]
        if gone:
            self.workers.restore(gone)
        return groups

    def _wait_for_lease(self, num_groups: int) -> RoundLease:
        args, name = self._args, f"round {self._round_id}"
        limit_s, began, seen = rollout_deadline_s(args.config), time.monotonic(), -1
        while True:
            result: LeaseResult = self._ledger.call(
                RoundLedger.lease, self._round_id, version=self._round_id, holder="trainer", count=num_groups
            )
            if result.too_old:
                self.workers.forget(result.too_old)
            self._status = self._ledger.call(Ledger.status)
            self._post_progress(num_groups, self._status, result, time.monotonic() - began)
            if result.lease is not None:
                self._keep_alive(result.lease)
                return result.lease
            self.workers.raise_if_failed()
            if time.monotonic() - began > limit_s:
                raise WaitTimeoutError(
                    f"{name}: {result.waits_for}; the producer works on {self.workers.num_running} groups"
                    f"{' and waits for ' + self.workers.waits_for if self.workers.waits_for else ''}",
                    limit_s,
                    "vLLM engines and reward function",
                    "Raise --rollout-timeout-secs, shorten completions, or relax the filter.",
                )
            seen = self._ledger.wait_for_news(seen, NEWS_S, **self._worth_asking(num_groups))

    def _keep_alive(self, lease: RoundLease) -> None:
        """Renew the lease from now on. Under train_async.py the round waits here for as long as the one before is
        trained, saved, published and evaluated; when the one after it is asked for, it is trained."""
        known = {round_id: held for round_id, held in self._leases.items() if round_id == lease.round_id - 1}
        self._leases = known | {lease.round_id: lease}
        if self._beat.ident is None:  # the first lease
            self._beat.start()

    def _heartbeat(self) -> None:
        """Renew the leases. Waits for: the clock, or `close`. A lost lease is reported when the round is trained."""
        while not self._is_closed.wait(self._args.transferqueue_lease_timeout_secs / 3):
            for lease in self._leases.values():
                try:
                    self._ledger.call(RoundLedger.heartbeat, lease.round_id, lease.fence)
                except Exception as error:  # boundary: the next beat may do better
                    logger.warning("round %d: %s", lease.round_id, error)

    def close(self) -> None:
        """Let leases end. Calling it again does nothing."""
        self._is_closed.set()

    def _worth_asking(self, num_groups: int) -> dict[str, int]:
        """Return what the ledger must have (`Ledger.has`) before it is worth asking again. Offers an early batch if
        there is one."""
        early_batches = self.early_batches
        if not early_batches.minimum:
            return {"round_of": num_groups}
        ready = self._ledger.call(RoundLedger.ready, version=self._round_id, count=num_groups, of_round=True)
        if len(ready) < num_groups:
            early_batches.offer(ready)
        wanted = min(num_groups, max(len(ready) + 1, len(early_batches.claimed) + early_batches.minimum))
        return {"round_of": num_groups, "at_least": wanted}

    def _post_progress(self, num_groups: int, status: LedgerStatus, result: LeaseResult, elapsed_s: float) -> None:
        stats = self.workers.stats
        BOARD.post(
            RoundProgress(
                name=f"round {self._round_id}",
                kept_groups=len(result.lease.groups) if result.lease else min(status.ready, num_groups),
                wanted_groups=num_groups,
                in_flight_groups=sum(status.producers.values()),
                dropped_groups=sum(stats.dropped.values()),
                response_tokens=stats.response_tokens,
                elapsed_s=elapsed_s,
            )
        )


def _job_metrics(taken: TakenRound) -> dict[str, float]:
    """Return how many groups of the round came from each job outside, and how far it was behind."""
    groups: dict[str, list[GroupFacts]] = {}
    for group in taken.groups:
        producer = group.facts.notes.producer.partition(".")[0]
        if producer.startswith(EXTERNAL):
            groups.setdefault(producer.removeprefix(EXTERNAL), []).append(group.facts)
    found: dict[str, float] = {}
    for name, facts in groups.items():
        newest = [completion.newest_version for each in facts for completion in each.completions()]
        found[f"producers/{name}/groups"] = float(len(facts))
        found[f"producers/{name}/lag"] = taken.lease.version - statistics.fmean(newest)
    return found
