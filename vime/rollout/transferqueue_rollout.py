"""The rollout function of mode `streaming`: a round is the next finished groups, as the ledger leases them.

Prompts are answered by `producer.GroupProducer`, beside this. A round waits until enough groups are ready; evaluation
is the same as in every mode.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Sequence
from typing import Any

from vime.handoff.group_store import GroupStore
from vime.handoff.ledger import Ledger, LedgerStatus
from vime.handoff.ledger_port import LedgerPort
from vime.handoff.ledger_rounds import RoundDesk
from vime.handoff.ledger_types import LeaseAnswer, LeasedGroup, RoundLease
from vime.observability.events import span
from vime.rollout import vllm_rollout
from vime.rollout.groups import mark_samples
from vime.rollout.metrics import drop_metrics, sample_metrics, version_metrics
from vime.rollout.portions import Portions
from vime.rollout.producer import GroupProducer
from vime.rollout.progress import BOARD, RoundProgress
from vime.rollout.read_ahead import ReadAhead
from vime.types import HandoffError, RolloutFnEvalOutput, RolloutFnTrainOutput, Sample, Version, WaitTimeoutError
from vime.utils.failpoints import Point, failpoint
from vime.utils.waits import waiting

NEWS_S = 2.0
"""How long one wait for news lasts before the producer is asked whether it still lives."""


def generate_rollout(
    args: Any, rollout_id: int, data_source: TransferQueueDataSource, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """The groups of round `rollout_id` in the order of their numbers, or one evaluation."""
    if evaluation:
        return vllm_rollout.generate_rollout(args, rollout_id, data_source, evaluation=True)
    data_source.begin(rollout_id)
    groups = data_source.get_samples(args.rollout_batch_size)
    mark_samples(args, groups)
    return RolloutFnTrainOutput(samples=groups, metrics=data_source.metrics(groups))


class TransferQueueDataSource:
    """A data source of finished groups. Used by the RolloutManager, one round at a time.

    `get_samples` leases the round that `begin` named, and `lease` then says what was leased; `ack_samples` says that a
    round's groups are converted and need not be kept in the queue any more.
    """

    def __init__(
        self,
        args: Any,
        *,
        prompts: Any,
        ledger: LedgerPort,
        store: GroupStore,
        producer: GroupProducer,
        ahead: ReadAhead,
        portions: Portions | None = None,
    ) -> None:
        self._args, self._prompts = args, prompts
        self._ledger, self._store, self._producer, self._ahead = ledger, store, producer, ahead
        self.portions = portions or Portions()
        self._claiming = threading.Lock()  # of `_begun`
        self._begun: dict[int, list[Sample]] = {}  # samples of the groups in portions of the round, by group index
        self._round_id = -1
        self._get_time_s = 0.0
        self._too_old = 0  # of the ledger's count, what the rounds before have reported
        self._status: LedgerStatus | None = None  # as it was after the last question for a lease
        self.lease: RoundLease | None = None

    def begin(self, round_id: int) -> None:
        """The next `get_samples` answers the groups of this round."""
        self._round_id, self.lease, self._begun = round_id, None, {}
        self._ahead.start()
        self.portions.open(round_id)

    def get_samples(self, num_groups: int) -> list[list[Sample]]:
        """Waits for: `num_groups` ready groups. Unblocked by: the producer's commits. Asking again for a round gives
        the same groups."""
        failpoint(Point.LEASE)
        limit_s, round_id = self._args.rollout_timeout_secs, self._round_id
        leased: Sequence[LeasedGroup] = ()
        try:
            with (
                span("lease_round", rollout_id=round_id),
                waiting(f"the groups of round {round_id}", deadline_s=limit_s),
            ):
                lease = self._wait_for_lease(num_groups)
            leased = lease.groups
        finally:
            is_as_begun = self.portions.close(leased)
        failpoint(Point.LEASED)
        began = time.monotonic()
        with self._claiming:
            self._begun = self._begun if is_as_begun else {}
        rest = [group for group in leased if group.task.group not in self._begun]
        with span("transferqueue_get_groups", rollout_id=round_id, num_groups=len(rest)):
            groups = [*self._begun.values(), *self._read(rest, next_version=round_id + 1)]
        self.lease, self._get_time_s = lease, time.monotonic() - began
        return sorted(groups, key=lambda samples: samples[0].group_index)

    def claim_portion(self) -> list[list[Sample]]:
        """Finished groups of the round that is being waited for: the trainers begin with them. Empty when the round
        became whole meanwhile."""
        with self._claiming:
            groups = self.portions.claim()
            samples = self._read(groups, next_version=self._round_id)
            self._begun |= {group.task.group: found for group, found in zip(groups, samples, strict=True)}
        return samples

    @property
    def begun_groups(self) -> frozenset[int]:
        """Group indices in portions of the leased round; empty when the lease turned out to be another than guessed."""
        return frozenset(self._begun)

    def ack_samples(self, lease: RoundLease) -> None:
        """The queue may forget the round's payloads; the spool keeps them until a checkpoint carries the round."""
        with span("transferqueue_ack_groups", rollout_id=lease.round_id, num_groups=len(lease.groups)):
            self._store.forget([group.task for group in lease.groups])

    def add_samples(self, groups: list[list[Sample]]) -> None:
        if groups:
            raise HandoffError(f"{len(groups)} groups cannot be put back: the ledger decides what is trained when.")

    def save(self, rollout_id: int) -> dict[str, Any]:
        """The prompts' own state, to recognise them; the cursor is the ledger's."""
        state: dict[str, Any] = self._prompts.save(rollout_id)
        return state

    def load(self, state: dict[str, Any]) -> None:
        self._prompts.load(state)

    def __len__(self) -> int:
        return len(self._prompts)

    def metrics(self, groups: Sequence[Sequence[Sample]]) -> dict[str, float]:
        """What the round's samples are like, how the queue stands, and what happened since the round before
        (docs/metrics.md)."""
        status = self._status
        assert self.lease is not None
        assert status is not None
        samples = [sample for group in groups for sample in group]
        stats = self._producer.take_stats()
        num_too_old, self._too_old = max(0, status.too_old - self._too_old), status.too_old
        lags = [self.lease.version - max(sample.weight_versions) for sample in samples if sample.weight_versions]
        puts = stats.put_times_s
        rewards = stats.rewards or [0.0]
        return {
            **sample_metrics(self._args, samples, "rollout"),
            **version_metrics(samples, "rollout"),
            **drop_metrics(stats.dropped),
            **(stats.partial.metrics() if self._args.partial_rollout else {}),
            "rollout/reward_mean_before_filter": statistics.fmean(rewards),
            "rollout/num_groups": float(len(groups)),
            "rollout/removed_samples": float(sum(sample.remove_sample for sample in samples)),
            "transferqueue/ready_groups": float(status.ready),
            "transferqueue/inflight_groups": float(sum(status.producers.values())),
            "transferqueue/retry_groups": float(status.retry),
            "transferqueue/dropped_groups": float(sum(stats.dropped.values())),
            "transferqueue/stale_dropped_groups": float(num_too_old),
            "transferqueue/late_groups": float(stats.late_groups),
            "transferqueue/get_latency": self._get_time_s,
            "transferqueue/put_latency": statistics.fmean(puts) if puts else 0.0,
            "transferqueue/producer_lag": statistics.fmean(lags) if lags else 0.0,
            "transferqueue/spool_bytes": float(self._store.spool_bytes),
        }

    def _read(self, groups: Sequence[LeasedGroup], *, next_version: Version) -> list[list[Sample]]:
        found = self._ahead.take(groups, next_version=next_version)
        for samples in found:
            for sample in samples:
                sample.rollout_id = self._round_id
        return found

    def _wait_for_lease(self, num_groups: int) -> RoundLease:
        args, name = self._args, f"round {self._round_id}"
        limit_s, began, seen = args.rollout_timeout_secs, time.monotonic(), -1
        while True:
            answer: LeaseAnswer = self._ledger.call(
                RoundDesk.lease, self._round_id, version=self._round_id, holder="trainer", count=num_groups
            )
            self._status = self._ledger.call(Ledger.status)
            self._post_progress(num_groups, self._status, answer, time.monotonic() - began)
            if answer.lease is not None:
                return answer.lease
            self._producer.raise_if_failed()
            if time.monotonic() - began > limit_s:
                raise WaitTimeoutError(
                    f"{name}: {answer.waits_for}; the producer works on {self._producer.num_running} groups"
                    f"{' and waits for ' + self._producer.waits_for if self._producer.waits_for else ''}",
                    limit_s,
                    "vLLM engines and reward function",
                    "Raise --rollout-timeout-secs, shorten answers, or relax the filter.",
                )
            seen = self._ledger.wait_for_news(seen, NEWS_S, **self._worth_asking(num_groups))

    def _worth_asking(self, num_groups: int) -> dict[str, int]:
        """What the ledger must have (`Ledger.has`) before it is worth asking again. Offers a portion, if there is."""
        portions = self.portions
        if not portions.minimum:
            return {"round_of": num_groups}
        ready = self._ledger.call(RoundDesk.ready, version=self._round_id, count=num_groups, of_round=True)
        if len(ready) < num_groups:
            portions.offer(ready)
        wanted = min(num_groups, max(len(ready) + 1, len(portions.claimed) + portions.minimum))
        return {"round_of": num_groups, "at_least": wanted}

    def _post_progress(self, num_groups: int, status: LedgerStatus, answer: LeaseAnswer, elapsed_s: float) -> None:
        BOARD.post(
            RoundProgress(
                name=f"round {self._round_id}",
                kept_groups=len(answer.lease.groups) if answer.lease else min(status.ready, num_groups),
                wanted_groups=num_groups,
                in_flight_groups=sum(status.producers.values()),
                dropped_groups=sum(self._producer.peek.dropped.values()),
                response_tokens=self._producer.peek.response_tokens,
                elapsed_s=elapsed_s,
            )
        )
