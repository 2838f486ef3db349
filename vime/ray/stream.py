"""The driver's side of mode `streaming`: it opens the ledger and tells it what trainers, engines and checkpoints did.

lease(r)  [the RolloutManager, from `generate`]
trained(r)     the optimizer has stepped
release(v)     every engine confirmed version v: the slots of the rounds behind it are free
saving / saved  a checkpoint will be visible soon / is visible: its rounds are durable, their payloads may be deleted
"""

from __future__ import annotations

import logging
import uuid
from pathlib import Path

from ray import ObjectRef

from vime.config.parse import Config
from vime.handoff.ledger import Ledger
from vime.handoff.ledger_types import LedgerMark, LedgerRules, RestoreReport, RoundLease, RoundOrder, StalePolicy
from vime.handoff.queue_view import copy_queue
from vime.handoff.round_ledger import RoundLedger
from vime.handoff.spool import Fsync
from vime.observability.events import span
from vime.ray.actor import Actor, Options
from vime.ray.ledger_actor import LedgerClient
from vime.ray.ledger_choice import ORIGIN_NAME, LedgerChoice
from vime.ray.rollout_manager import RolloutManager
from vime.ray.waits import Result, wait_for
from vime.rollout.abort_scope import KEEP_S
from vime.rollout.partial import oldest_allowed
from vime.rollout.worker import STOP_S
from vime.sessions.store import AGENTS_ELSEWHERE, keep_sessions
from vime.types import Version, VimeError
from vime.utils.failpoints import Point, failpoint

logger = logging.getLogger(__name__)
CLOSE_S = 2 * KEEP_S + STOP_S  # beyond the producer's own deadlines


def ledger_rules(config: Config, num_rollout: int) -> LedgerRules:
    """Return the bounds of this run, as the ledger counts them."""
    queue, batch = config.queue, config.rollout.rollout_batch_size
    staleness = queue.transferqueue_max_staleness
    assert queue.transferqueue_round_order is not None, "config/checks.py fills it in"
    return LedgerRules(
        max_slots=(staleness + 1) * batch,
        max_staleness=staleness,
        lease_timeout_s=queue.transferqueue_lease_timeout_secs,
        stale_policy=StalePolicy(queue.stale_policy),
        round_order=RoundOrder(queue.transferqueue_round_order),
        max_groups=queue.transferqueue_max_groups,
        max_tokens=queue.transferqueue_max_tokens,
        max_bytes=queue.transferqueue_max_bytes,
        num_rounds=num_rollout,
        groups_per_round=batch,
        partition=queue.transferqueue_partition,
    )


class Stream:
    """Owned by the driver. The RolloutManager keeps the leases of the rounds in hand alive, from their grant on."""

    def __init__(self, config: Config, run_dir: Path, ledger: LedgerClient, manager: Actor[RolloutManager]) -> None:
        self._config, self._run_dir, self.ledger, self._manager = config, run_dir, ledger, manager
        self._leases: dict[int, RoundLease] = {}
        self._is_closed = False

    @classmethod
    def open(
        cls,
        config: Config,
        run_dir: Path,
        manager: Actor[RolloutManager],
        *,
        num_rollout: int,
        checkpoint_round: int | None,
        choice: LedgerChoice,
        home: Options,
    ) -> Stream:
        """Start the ledger on its file, at `home`, go back to the checkpoint, and connect the RolloutManager.

        When the ledger is that of another run directory, its queue is copied first, as it stands.
        """
        if choice.origin is not None:
            (run_dir / ORIGIN_NAME).write_text(str(choice.origin))
            num_payloads = copy_queue(choice.origin, run_dir)
            logger.info("queue of %s copied: the ledger and %d payloads", choice.origin, num_payloads)
        ledger = LedgerClient.start(
            run_dir,
            ledger_rules(config, num_rollout),
            run_id=uuid.uuid4().hex[:8],
            deadline_s=config.queue.transferqueue_timeout_secs,
            home=home,
        )
        report: RestoreReport = ledger.restore(
            checkpoint_round, choice.mark, may_be_torn=config.queue.transferqueue_fsync == Fsync.NEVER
        )
        if report.replayed_rounds or report.reissued or report.regenerated:
            logger.info(
                "queue restored: rounds %s are trained again as they were, %d prompts in flight and %d lost groups are "
                "generated again",
                list(report.replayed_rounds),
                len(report.reissued),
                len(report.regenerated),
            )
        reached = report.reached or 0
        keep_sessions(run_dir / AGENTS_ELSEWHERE, newest=reached, oldest=oldest_allowed(config.flat, reached))
        stream = cls(config, run_dir, ledger, manager)
        stream._ask(manager.ask(RolloutManager.open_stream, ledger), "the queue to be opened")
        return stream

    def begin(self) -> None:
        """Begin generation: the first weights are confirmed."""
        self._ask(self._manager.ask(RolloutManager.produce, True), "the producer to start")

    def leased(self, lease: RoundLease) -> None:
        """Note under which lease this round is trained."""
        self._leases[lease.round_id] = lease

    def trained(self, round_id: int, receipt: str) -> None:
        """Record that the optimizer has stepped on the round; `receipt`: the link of what it stepped on. Raises
        LeaseLostError when the lease ended meanwhile."""
        lease = self._leases[round_id]
        with span("note_trained", rollout_id=round_id):
            self.ledger.call(RoundLedger.trained, round_id, lease.fence, receipt)
        del self._leases[round_id]

    def release(self, version: Version) -> None:
        """Free slots: every engine confirmed `version`."""
        with span("release_slots", version=version):
            self.ledger.call(RoundLedger.release, version)

    def saving(self) -> LedgerMark:
        """Put what the checkpoint contains into the ledger's file before the checkpoint is visible. The checkpoint
        keeps the returned mark."""
        mark: LedgerMark = self.ledger.call(Ledger.sync)
        return mark

    def saved(self, rollout_id: int) -> None:
        """Mark rounds durable: the checkpoint is visible. A failure loses nothing: the next restore marks them."""
        failpoint(Point.DURABLE)
        try:
            self.ledger.call(RoundLedger.durable, rollout_id)
            failpoint(Point.COMPACT)
            self._ask(self._manager.ask(RolloutManager.compact), "the spool to be compacted")
        except VimeError as error:
            logger.warning("rounds up to %d are saved, but not marked durable: %s", rollout_id, error)

    def close(self) -> None:
        """End generation while the engines still respond. Calling it again does nothing."""
        is_first, self._is_closed = not self._is_closed, True
        if is_first and self._config.rollout.partial_rollout:
            stopped = self._manager.ask(RolloutManager.produce, False)
            try:
                wait_for([stopped], name="completions in flight to be kept", owner="RolloutManager", deadline_s=CLOSE_S)
            except VimeError as error:  # they are generated again
                logger.warning("completions in flight are not kept: %s", error)

    def end(self) -> None:
        """Close the ledger's file. Called when every process that calls it has ended; a kill before costs nothing."""
        try:
            self.ledger.close()
        except VimeError as error:
            logger.warning("the ledger's log stays beside its file: %s", error)

    def _ask(self, ref: ObjectRef[Result], name: str) -> Result:
        deadline_s = self._config.queue.transferqueue_timeout_secs
        [result] = wait_for([ref], name=name, owner="RolloutManager", deadline_s=deadline_s)
        return result
