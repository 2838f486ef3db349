"""The components that train.py and train_async.py drive: one method for each step of a round.

A method does the step; the caller decides the schedule (when, and what overlaps). `ray/startup.py` starts and stops
the parts behind them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path

from ray import ObjectRef

from vime.config.deadlines import rollout_deadline_s, update_deadline_s
from vime.config.parse import Config
from vime.config.queue_checks import EXTERNAL
from vime.handoff.receipts import ReceiptFile
from vime.handoff.ticket import RoundTicket
from vime.observability.events import EventKind, EventLog, span
from vime.observability.screen import Screen
from vime.ray.actor import Actor
from vime.ray.checkpoint import RunState, Start, checkpoint_root
from vime.ray.checkpoint_identity import facts_of
from vime.ray.engines import Engines
from vime.ray.interrupts import Interrupts
from vime.ray.mismatch_guard import MismatchGuard
from vime.ray.probe import check_engines_agree
from vime.ray.queue_keeper import QueueKeeper
from vime.ray.rollout_manager import GeneratedRound, RolloutManager
from vime.ray.round_metrics import RoundMetrics
from vime.ray.saver import Saver
from vime.ray.stream import Stream
from vime.ray.trainers import Trainers
from vime.ray.turns import Turns
from vime.ray.waits import Result, said_meanwhile, wait_for
from vime.types import EngineAddress, EngineLostError, EngineReport, MismatchError, Version
from vime.utils.failpoints import Point, failpoint
from vime.weights.versions import VersionLedger

GRACE_S = 60  # beyond a step's own deadline, so that its more detailed error arrives first
PROGRESS_S = 1.0
"""Seconds between two checks of a round's progress, and before the first: each is a call to another process."""


class Doing(Enum):
    """What the trainers are doing. When it is still set after a failure, it says what the trainers can still do."""

    TRAINING = auto()
    SAVING = auto()
    PUBLISHING = auto()


@dataclass(slots=True)
class Parts:
    """The live objects of a run. `trainers` or `engines` is None in the debug modes that run only one half."""

    manager: Actor[RolloutManager]
    trainers: Trainers | None
    engines: Engines | None
    num_rollout: int
    stream: Stream | None = None  # mode streaming
    queue: QueueKeeper | None = None  # mode streaming


@dataclass(slots=True)
class Watchers:
    """What observes the run: the user's screen and signals, the event log, the metrics of a round."""

    screen: Screen
    interrupts: Interrupts
    events: EventLog
    round_metrics: RoundMetrics


class Components:
    """One run. Made by `start_components`; owned by the driver's main thread."""

    def __init__(
        self, config: Config, run_dir: Path, parts: Parts, watchers: Watchers, versions: VersionLedger, start: Start
    ) -> None:
        self.config, self.run_dir, self.parts, self.watchers = config, run_dir, parts, watchers
        self.versions = versions
        self._start = start
        self.loaded = start.checkpoint
        self.checkpoint_root = checkpoint_root(config, run_dir)
        self.trained_round = start.rollout_id - 1
        self._cursor: dict[str, object] = {}  # the data cursor after the last trained round
        self.open_round: int | None = None  # its line is not written yet
        self.doing: Doing | None = None
        self.receipts = ReceiptFile(run_dir, start_round=start.rollout_id, link=start.receipt)
        self.saver = Saver(
            self.checkpoint_root,
            is_async=config.model.async_save,
            keep=config.model.keep_checkpoints,
            protected=start.checkpoint,
            deadline_s=config.cluster.train_timeout_secs + GRACE_S,
            on_saved=self._note_saved,
        )
        self.turns: Turns | None = None
        if config.cluster.colocate and parts.trainers is not None and parts.engines is not None:
            self.turns = Turns(config, parts.trainers, parts.engines, watchers.round_metrics)
        self._mismatch = MismatchGuard(
            config,
            run_dir,
            trainers=parts.trainers,
            manager=parts.manager,
            engines=parts.engines,
            screen=watchers.screen,
            events=watchers.events,
        )

    @property
    def last_round(self) -> int:
        return self.parts.num_rollout - 1

    def rounds(self) -> Iterator[int]:
        """The rollout ids of this run, from the first one not trained yet. Writes the numbers of a round after each."""
        self.watchers.round_metrics.begin()
        for rollout_id in range(self._start.rollout_id, self.parts.num_rollout):
            self.watchers.interrupts.raise_if_asked("the pause between rounds")
            self.saver.poll()
            self.open_round = rollout_id
            yield rollout_id
            if self.parts.engines is not None:
                self.watchers.round_metrics.add(self.parts.engines.take_metrics())
            if self.parts.queue is not None:
                self.watchers.round_metrics.add(self.parts.queue.take_metrics())
            self.watchers.round_metrics.finish(rollout_id, self.versions.trained)
            self.open_round = None

    def start_generation(self, rollout_id: int) -> ObjectRef[GeneratedRound]:
        """Begin a round of generation and return at once."""
        self._let_engines_work()
        return self.parts.manager.ask(RolloutManager.generate, rollout_id)

    def finish_generation(self, pending: ObjectRef[GeneratedRound]) -> GeneratedRound:
        """Wait until the round is generated, scored and put."""
        with self.watchers.round_metrics.timed("perf/wait_time"):
            generated = self._wait_for_manager(pending, "a round of generation")
            self._mismatch.after_generation(generated, self.versions)
        self.watchers.round_metrics.add(generated.metrics)
        if self.parts.stream is not None and generated.lease is not None:
            self.parts.stream.leased(generated.lease)
        self.watchers.events.emit(EventKind.ROUND_GENERATED, rollout_id=generated.rollout_id)
        return generated

    def generate(self, rollout_id: int, pending: ObjectRef[GeneratedRound] | None = None) -> GeneratedRound:
        """Wait for a round of generation, or for the rest of one that was started. With --train-early-groups the
        trainers begin with it meanwhile."""
        pending = pending or self.start_generation(rollout_id)
        if self.config.queue.train_early_groups:
            self._begin_training(rollout_id)
        return self.finish_generation(pending)

    def wait_until_generated(self, pending: ObjectRef[GeneratedRound]) -> None:
        """Let a prefetched round finish, so that weights do not change while it is generated. In mode streaming they
        may change: each token's version is known, and the ledger enforces the staleness bound."""
        if self.parts.stream is not None:
            return
        with self.watchers.round_metrics.timed("perf/wait_time"):
            generated = self._wait_for_manager(pending, "the prefetched round")
            self._mismatch.after_generation(generated, self.versions)

    def train(self, generated: GeneratedRound) -> None:
        """Run one round of optimizer steps on every rank; then remove the round's rows from the store.

        Only the trainers and the queue can end it: an engine that dies meanwhile is started again, or ends the run at
        the next wait, when the round is whole and can be saved.
        """
        if self.parts.trainers is None:
            return
        self.watchers.screen.activity("training")
        if self.turns is not None:
            self.turns.train()
        self.doing = Doing.TRAINING
        trainers, started = self.parts.trainers, time.monotonic()
        with self.watchers.round_metrics.timed("perf/train_time"):
            try:
                trained = self._mismatch.train(generated, self.versions.trained, self._tend)
            except MismatchError:
                self.doing = None  # no weight has moved: what was trained before can be saved
                raise
        metrics = dict(trained.metrics)
        if generated.work is not None:
            metrics |= generated.work.rates(
                time.monotonic() - started + self.watchers.round_metrics.spent("perf/early_train_time"),
                num_ranks=len(trainers),
                device_name=trainers.device_name,
                bf16=bool(self.config.parallel.bf16),
            )
        receipt = self.receipts.note(generated.rollout_id, self.versions.trained, trained.stepped)
        self.versions.advance()
        failpoint(Point.TRAINED)
        if self.parts.stream is not None:
            self.parts.stream.trained(generated.rollout_id, receipt)
        if self.parts.queue is not None:
            self.parts.queue.note_trained()
        self.trained_round, self._cursor = generated.rollout_id, generated.cursor
        self.doing = None
        self.watchers.events.emit(
            EventKind.ROUND_TRAINED,
            rollout_id=generated.rollout_id,
            version=self.versions.trained,
            receipt=receipt,
        )
        self.watchers.round_metrics.add(metrics)
        failpoint(Point.CLEAR)
        with span("transferqueue_ack_groups", rollout_id=generated.rollout_id):
            assert generated.ticket is not None, "it was trained"
            self._clear(generated.ticket)

    def publish(self) -> None:
        """Bring the newest weights to every engine: pause, transfer, confirm by hash, resume."""
        trainers, engines = self.parts.trainers, self.parts.engines
        is_external = self.config.queue.transferqueue_mode == EXTERNAL
        interval, is_last = self.config.weights.update_weights_interval, self.trained_round == self.last_round
        due = (
            is_last or self.versions.trained % interval == 0
        )  # the last: what is evaluated at the end is what was trained
        if trainers is None or not (engines or is_external) or not (due or self.versions.serving is None):
            return
        self.watchers.screen.activity("moving weights to the engines")
        self.doing = Doing.PUBLISHING
        if self.turns is not None:
            self.turns.update()
        with self.watchers.round_metrics.timed("perf/update_weights_time"):
            version, metrics = self.versions.trained, {"weights/version": float(self.versions.trained)}
            content_hash, reports = "", list[EngineReport]()
            if engines is not None:
                poll = self._poll(interruptible=False)
                report = engines.update(lambda addresses: trainers.publish(version, addresses, poll))
                content_hash, reports, metrics = report.content_hash, [*report.engine_reports], report.metrics()
            if is_external:  # the files have to have the hash of the engines
                content_hash = trainers.publish_files(version, self._poll(interruptible=False))
                reports.append(self._served_to_jobs(version))
            self.versions.confirm(reports, content_hash)
        self.doing = None
        between = None if self.turns is None else self.turns.generate
        new = list[EngineAddress]()
        if engines is not None:
            new = engines.new(reports)
            if between is None:  # else no prompt comes before its turn, and an engine wakes up after `served` alone
                with self.watchers.round_metrics.timed("perf/agreement_time"):
                    self._mismatch.after_first_update(version, new)
            engines.served(version, reports)
        with self.watchers.round_metrics.timed("perf/agreement_time"):  # before new prompts, which would delay it
            if between is not None:
                self._mismatch.after_first_update(version, new, between)
            compared = self._mismatch.after_publish(self.versions.trained, between)
            if engines is not None and self.config.weights.check_weight_update_equal:
                self._check_agreement(trainers, engines)
        failpoint(Point.RELEASE)
        if self.turns is not None:
            self.turns.generate()
        if self.parts.stream is not None:
            self.parts.stream.release(version)
        failpoint(Point.RELEASED)
        self.watchers.events.emit(
            EventKind.WEIGHTS_CONFIRMED,
            version=version,
            content_hash=content_hash,
            engines=[report.engine for report in reports],
        )
        self.watchers.round_metrics.add({**metrics, **compared})

    def _check_agreement(self, trainers: Trainers, engines: Engines) -> None:
        """--check-weight-update-equal. An engine that is lost meanwhile is for the next check of the engines."""
        try:
            between = None if self.turns is None else self.turns.generate
            check_engines_agree(self.config, trainers, engines.fleet, self.versions.trained, between=between)
        except EngineLostError as error:
            if engines.num_serving == 1:
                raise
            self.watchers.screen.warn(f"version {self.versions.trained}: engines and trainer are not compared. {error}")

    def _served_to_jobs(self, version: Version) -> EngineReport:
        """Let the gateway read the files back and offer them to the jobs outside. Its report is of what it has read."""
        [report] = wait_for(
            [self.parts.manager.ask(RolloutManager.serve_to_jobs, version)],
            name="weights for jobs outside to be read back",
            owner="gateway",
            deadline_s=update_deadline_s(self.config) + GRACE_S,
            on_poll=self._poll(interruptible=False),
        )
        return report

    def evaluate(self, rollout_id: int) -> None:
        """Evaluate the serving weights on the evaluation data. `rollout_id` names the round before which it runs."""
        by_jobs = self.config.queue.transferqueue_mode == EXTERNAL
        if not self.config.eval.has_sets or (self.parts.engines is None and not by_jobs):
            return
        self._let_engines_work()
        if self.parts.engines is None:
            self.watchers.screen.note(
                f"evaluation before round {rollout_id}: by jobs outside, with tokens of scope eval"
            )
        self.watchers.screen.activity("evaluating")
        with self.watchers.round_metrics.timed("perf/eval_time"):
            metrics = self._wait_for_manager(self.parts.manager.ask(RolloutManager.evaluate, rollout_id), "evaluation")
        self.watchers.round_metrics.log_eval(rollout_id, metrics)
        self.watchers.events.emit(EventKind.EVAL_DONE, rollout_id=rollout_id, metrics=metrics)

    def evaluate_if_due(self, rollout_id: int) -> None:
        if is_due(self.config.eval.eval_interval, rollout_id, self.last_round):
            self.evaluate(rollout_id + 1)

    def save_if_due(self, rollout_id: int) -> None:
        if is_due(self.config.model.save_interval, rollout_id, self.last_round):
            self.save()

    def save(self) -> None:
        """Checkpoint the last trained round, if not done: model, optimizer, random states, data cursor, version.

        With --async-save this returns when the state is copied; `saver.finish` waits for the rest.
        """
        trainers, rollout_id = self.parts.trainers, self.trained_round
        if trainers is None or self._is_saved():
            return
        self.watchers.screen.activity("saving a checkpoint")
        with self.watchers.round_metrics.timed("perf/save_time"):
            self.saver.finish()  # a failure of the save before does not keep this round from being saved
            self.receipts.sync()
            state = RunState(
                rollout_id=rollout_id,
                version=self.versions.trained,
                data_source=self._cursor,
                ledger=self.parts.stream.saving() if self.parts.stream is not None else None,
                receipt=self.receipts.link,
                written_with=facts_of(self.config),
                metrics=self.watchers.round_metrics.so_far() if self.open_round == rollout_id else None,
            )
            self.doing = Doing.SAVING
            self.saver.save(state, trainers)
            self.doing = None
            if self.config.model.save_hf:
                trainers.save_hf(Path(self.config.model.save_hf.format(rollout_id=rollout_id)))

    def _wait_for_manager(self, ref: ObjectRef[Result], name: str) -> Result:
        [result] = wait_for(
            [ref],
            name=name,
            owner="RolloutManager",
            deadline_s=rollout_deadline_s(self.config) + GRACE_S,
            on_poll=self._poll(interruptible=True),
        )
        return result

    def _poll(self, *, interruptible: bool) -> Callable[[], None]:
        """Do what must go on while the driver waits: watch for Ctrl-C, show progress, check the engines' health."""
        asked = time.monotonic()

        def poll() -> None:
            nonlocal asked
            self.saver.poll()
            self._look_at_queue()
            if interruptible:
                self.watchers.interrupts.raise_if_asked("generation")
            if interruptible and self.watchers.screen.is_live and time.monotonic() - asked >= PROGRESS_S:
                asked = time.monotonic()
                progress = said_meanwhile(self.parts.manager.ask(RolloutManager.progress), within_s=0.2)
                if progress is not None:
                    self.watchers.screen.activity(progress)
            if self.parts.engines is not None:
                self.parts.engines.check(is_updating=self.doing is Doing.PUBLISHING)

        return poll

    def _tend(self) -> None:
        """Look after the engines during a wait that they must not end. A queue that was not replaced does end it: ranks
        may wait for its rows."""
        self._look_at_queue()
        if self.parts.engines is not None:
            self.parts.engines.tend()

    def _look_at_queue(self) -> None:
        for line in [] if self.parts.queue is None else self.parts.queue.check():
            self.watchers.screen.warn(line)

    def has_work(self) -> bool:
        """Whether a stop now would save something: a round that is trained and not saved, or that is being trained,
        which nothing interrupts."""
        is_training = self.doing is Doing.TRAINING
        return self.parts.trainers is not None and (is_training or not self._is_saved())

    def _is_saved(self) -> bool:
        """Whether nothing was trained that is not in a checkpoint."""
        return self.trained_round in (self._start.rollout_id - 1, self.saver.newest_round)

    def _let_engines_work(self) -> None:
        """Free the trainers' device memory while the engines work (--offload-train); with --colocate they then take
        it. The trainers' next call wakes them up."""
        if self.turns is not None:
            self.turns.generate()
        elif self.config.cluster.offload_train and self.parts.trainers is not None:
            with self.watchers.round_metrics.timed("perf/offload_time"):
                self.parts.trainers.sleep()

    def _begin_training(self, rollout_id: int) -> None:
        """Let the trainers work through finished groups of a round until the rest is finished too. No weight moves."""
        parts, round_metrics = self.parts, self.watchers.round_metrics
        assert parts.trainers is not None, "mode streaming trains"
        while True:
            with round_metrics.timed("perf/wait_time"):
                ticket = self._wait_for_manager(
                    parts.manager.ask(RolloutManager.early_batch, rollout_id), "groups to begin a round with"
                )
            if ticket is None:
                return
            with round_metrics.timed("perf/early_train_time"):
                parts.trainers.begin(rollout_id, ticket, self.versions.trained)
            self._clear(ticket)

    def _clear(self, ticket: RoundTicket) -> None:
        """Have the RolloutManager remove from the queue what every rank has read. The driver is not a client of the
        queue, because a client imports torch, which would be most of its memory. Mode off: the objects are freed with
        their ticket."""
        queue = self.config.queue
        if queue.transferqueue_mode == "off":
            return
        wait_for(
            [self.parts.manager.ask(RolloutManager.clear, ticket)],
            name="a trained round to leave the queue",
            owner="RolloutManager",
            deadline_s=queue.transferqueue_timeout_secs + GRACE_S,
            on_poll=self._poll(interruptible=False),
        )

    def _note_saved(self, rollout_id: int, path: Path) -> None:
        """Called when a checkpoint has become visible."""
        self.watchers.events.emit(EventKind.CHECKPOINT_SAVED, rollout_id=rollout_id, path=str(path))
        if self.parts.stream is not None:
            self.parts.stream.saved(rollout_id)


def is_due(interval: int | None, rollout_id: int, last_round: int) -> bool:
    """Whether it is due: every `interval` rounds and after the last one; never without an interval."""
    return interval is not None and ((rollout_id + 1) % interval == 0 or rollout_id == last_round)
