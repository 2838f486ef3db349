"""The machine that train.py and train_async.py drive: all parts of one run behind eight verbs.

`open_machine` starts the parts in the one order that works (queue, then actors, engines before the first weights) and
stops them in reverse, whatever happens. The verbs are the stations of a round; the rhythm is the caller's.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from vime.config.parse import Config
from vime.observability.events import EventKind, EventLog
from vime.observability.metrics import Tracker
from vime.observability.screen import Screen
from vime.ray.carriers import connect_carrier, start_queue
from vime.ray.checkpoint import RunState, find_latest, read_run_state, save_checkpoint
from vime.ray.cluster import MANAGER_CPUS, start_ray, stop_ray
from vime.ray.engines import Engines
from vime.ray.interrupts import Interrupts
from vime.ray.probe import check_engines_agree
from vime.ray.rollout_manager import GeneratedRound, ManagerInfo, RolloutManager
from vime.ray.trainers import Trainers
from vime.ray.waits import wait_for
from vime.seams import Carrier
from vime.weights.versions import VersionLedger

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Parts:
    """The live objects of a run. `trainers` or `engines` is None in the half-machine debug modes."""

    manager: Any
    trainers: Trainers | None
    engines: Engines | None
    carrier: Carrier
    num_rollout: int


class Machine:
    """One run. Created by `open_machine`; owned by the driver's main thread."""

    def __init__(
        self, config: Config, run_dir: Path, parts: Parts, screen: Screen, interrupts: Interrupts, start: int
    ) -> None:
        self.config, self.run_dir = config, run_dir
        self.versions = VersionLedger()
        self.screen = screen
        self._parts, self._interrupts = parts, interrupts
        self._events = EventLog(run_dir, "driver")
        self._tracker = Tracker(config.tracking, run_dir, config.to_dict())
        self._start = start
        self._trained_round = start - 1
        self._saved_round = start - 1
        self._saved_path: Path | None = None
        self._metrics: dict[str, float] = {}
        self._round_started = time.monotonic()

    def rounds(self) -> Iterator[int]:
        """The rollout ids of this run, from the first one not trained yet. Ends a round's books after each."""
        for rollout_id in range(self._start, self._parts.num_rollout):
            self._interrupts.raise_if_asked("the next round")
            yield rollout_id
            self._finish_round(rollout_id)

    @property
    def last_round(self) -> int:
        return self._parts.num_rollout - 1

    def start_generation(self, rollout_id: int) -> Any:
        """Begin a round of generation and answer at once."""
        return self._parts.manager.generate.remote(rollout_id)

    def finish_generation(self, pending: Any) -> GeneratedRound:
        """Wait until the round is generated, scored and put."""
        started = time.monotonic()
        [generated] = self._wait(
            [pending], "a round of generation", self.config.rollout.rollout_timeout_secs + 60, interruptible=True
        )
        self._metrics |= generated.metrics
        self._metrics["perf/rollout_wait_time"] = time.monotonic() - started
        self._events.emit(EventKind.ROUND_GENERATED, rollout_id=generated.rollout_id)
        return generated

    def generate(self, rollout_id: int) -> GeneratedRound:
        return self.finish_generation(self.start_generation(rollout_id))

    def wait_until_generated(self, pending: Any) -> None:
        """Let a prefetched round finish, so that no weight moves under it."""
        self._wait([pending], "the prefetched round", self.config.rollout.rollout_timeout_secs + 60, interruptible=True)

    def train(self, generated: GeneratedRound) -> None:
        """One round of optimiser steps on every rank; then the carrier's copy is cleared."""
        if self._parts.trainers is None:
            return
        rollout_id, started = generated.rollout_id, time.monotonic()
        self.screen.activity("training")
        trained = self._parts.trainers.train(
            rollout_id, generated.ticket, self.versions.trained, self._watch(interruptible=False)
        )
        self.versions.advance()
        self._trained_round = rollout_id
        self._parts.carrier.clear(generated.ticket)
        self._events.emit(EventKind.ROUND_TRAINED, rollout_id=rollout_id, version=self.versions.trained)
        self._metrics |= trained
        self._metrics["perf/train_time"] = time.monotonic() - started

    def publish(self) -> None:
        """Bring the newest weights to every engine: pause, transfer, confirm by hash, resume."""
        trainers, engines = self._parts.trainers, self._parts.engines
        due = (self.versions.trained % self.config.weights.update_weights_interval) == 0
        if trainers is None or engines is None or not (due or self.versions.serving is None):
            return
        self.screen.activity("moving weights to the engines")
        report = trainers.publish(self.versions.trained, engines.addresses, self._watch(interruptible=False))
        self.versions.confirm(report.engine_reports, report.content_hash)
        self._events.emit(
            EventKind.WEIGHTS_CONFIRMED,
            version=report.version,
            content_hash=report.content_hash,
            engines=[address.name for address in engines.addresses],
        )
        if self.config.weights.check_weight_update_equal:
            check_engines_agree(self.config, trainers, engines.addresses, self.versions.trained)
        self._metrics |= report.metrics()

    def evaluate(self, rollout_id: int) -> None:
        """Evaluate the serving weights on the evaluation data. `rollout_id` names the round before which it runs."""
        if self._parts.engines is None or not self.config.eval.eval_prompt_data:
            return
        self.screen.activity("evaluating")
        [metrics] = self._wait(
            [self._parts.manager.evaluate.remote(rollout_id)],
            "evaluation",
            self.config.rollout.rollout_timeout_secs + 60,
            interruptible=True,
        )
        self._tracker.log(rollout_id, metrics)
        self.screen.note_eval(rollout_id, metrics)
        self._events.emit(EventKind.EVAL_DONE, rollout_id=rollout_id, **metrics)

    def evaluate_first(self) -> None:
        """The initial weights, once, unless --skip-eval-before-train."""
        if self._start == 0 and not self.config.eval.skip_eval_before_train:
            self.evaluate(0)

    def evaluate_if_due(self, rollout_id: int) -> None:
        interval = self.config.eval.eval_interval
        if interval and ((rollout_id + 1) % interval == 0 or rollout_id == self.last_round):
            self.evaluate(rollout_id + 1)

    def save_if_due(self, rollout_id: int) -> None:
        interval = self.config.model.save_interval
        if interval and ((rollout_id + 1) % interval == 0 or rollout_id == self.last_round):
            self.save()

    def save(self) -> Path | None:
        """Checkpoint the last trained round: model, optimizer, random states, data cursor, version.

        Answers where it is, or None when nothing was trained.
        """
        trainers, rollout_id = self._parts.trainers, self._trained_round
        if trainers is None or rollout_id < 0 or rollout_id == self._saved_round:
            return self._saved_path
        self.screen.activity("saving a checkpoint")
        [data_source] = self._wait(
            [self._parts.manager.state_after.remote(rollout_id)], "the data cursor", 30, interruptible=False
        )
        state = RunState(rollout_id=rollout_id, version=self.versions.trained, data_source=data_source)
        root = Path(self.config.model.save) if self.config.model.save else self.run_dir / "checkpoints"
        path = save_checkpoint(root, state, trainers.save)
        self._saved_round, self._saved_path = rollout_id, path
        if self.config.model.save_hf:
            trainers.save_hf(Path(self.config.model.save_hf.format(rollout_id=rollout_id)))
        self._events.emit(EventKind.CHECKPOINT_SAVED, rollout_id=rollout_id, path=str(path))
        return path

    def restore(self, state: RunState, checkpoint: Path) -> None:
        """Continue after the checkpoint: model on every rank, data cursor in the manager, version in the books."""
        if self._parts.trainers is not None:
            self._parts.trainers.load(checkpoint / "model")
        self._wait(
            [self._parts.manager.load_state.remote(state.rollout_id, state.data_source)],
            "the data cursor to be restored",
            60,
            interruptible=False,
        )
        self.versions.restore(state.version)

    def weights_hash(self) -> str:
        """Content hash of the trained weights, for tests and reports."""
        return self._parts.trainers.weights_hash() if self._parts.trainers is not None else ""

    def close(self) -> None:
        self._tracker.close()

    def _finish_round(self, rollout_id: int) -> None:
        now = time.monotonic()
        self._metrics["perf/step_time"] = now - self._round_started
        self._metrics["weights/version"] = float(self.versions.trained)
        tokens = self._metrics.get("rollout/num_tokens", 0.0)
        self._metrics["perf/tokens_per_sec"] = tokens / max(1e-9, now - self._round_started)
        self._tracker.log(rollout_id, self._metrics)
        self.screen.round_done(rollout_id, self._metrics)
        self._metrics, self._round_started = {}, now

    def _wait(self, refs: list[Any], name: str, deadline_s: float, *, interruptible: bool) -> list[Any]:
        return wait_for(
            refs, name=name, owner="RolloutManager", deadline_s=deadline_s, on_poll=self._watch(interruptible)
        )

    def _watch(self, interruptible: bool) -> Callable[[], None]:
        """What runs while the driver waits: engines' health, the user's Ctrl-C, progress on the screen."""

        def poll() -> None:
            if interruptible:
                self._interrupts.raise_if_asked("the wait")
                self._show_progress()
            if self._parts.engines is not None:
                self._parts.engines.check()

        return poll

    def _show_progress(self) -> None:
        done, _ = ray.wait([self._parts.manager.progress.remote()], timeout=0.2)
        if done:
            self.screen.activity(ray.get(done[0]))


@contextlib.contextmanager
def open_machine(config: Config, run_dir: Path, screen: Screen, interrupts: Interrupts) -> Iterator[Machine]:
    """Start every part, give the machine, stop every part in reverse order."""
    with contextlib.ExitStack() as stack:
        screen.stage("starting Ray")
        stack.callback(stop_ray)
        start_ray(config)
        if config.queue.transferqueue_mode == "buffer":
            screen.stage("starting TransferQueue")
        queue = start_queue(config)
        if queue is not None:
            stack.callback(queue.close)
        address = queue.address if queue is not None else None
        parts, checkpoint = _start_parts(config, run_dir, address, screen, interrupts, stack)
        start = 0
        state = read_run_state(checkpoint) if checkpoint is not None else None
        if state is not None:
            start = state.rollout_id + 1
            screen.stage(f"resuming after round {state.rollout_id} from {checkpoint}")
        machine = Machine(config, run_dir, parts, screen, interrupts, start)
        stack.callback(machine.close)
        if state is not None and checkpoint is not None:
            machine.restore(state, checkpoint)
        machine.publish()
        screen.begin(start, parts.num_rollout)
        yield machine


def _start_parts(
    config: Config,
    run_dir: Path,
    queue_address: Any,
    screen: Screen,
    interrupts: Interrupts,
    stack: contextlib.ExitStack,
) -> tuple[Parts, Path | None]:
    """All processes start side by side; the cheap refusals (data, plug-ins) are waited for first."""
    checkpoint = find_latest(Path(config.model.load)) if config.model.load else None
    deadline_s = config.cluster.start_timeout_secs
    poll = lambda: interrupts.raise_if_asked("start-up")  # noqa: E731
    manager = RolloutManager.options(num_cpus=MANAGER_CPUS).remote(config, str(run_dir), queue_address)
    stack.callback(_stop_manager, manager)
    engines = None if config.debug.debug_train_only else Engines(config, run_dir)
    if engines is not None:
        stack.callback(engines.stop)
    trainers = None if config.debug.debug_rollout_only else Trainers(config, run_dir, queue_address)
    if trainers is not None:
        stack.callback(trainers.stop)
    screen.stage("reading prompts and plug-ins")
    [info] = wait_for(
        [manager.prepare.remote()], name="prompts to load", owner="RolloutManager", deadline_s=deadline_s, on_poll=poll
    )
    num_rollout = _num_rollout(config, info)
    if trainers is not None:
        screen.stage(f"building the model on {len(trainers)} trainer rank(s)")
        trainers.start(total_steps=num_rollout * (config.batch.num_steps_per_rollout or 1))
    if engines is not None:
        screen.stage(f"starting {len(engines)} vLLM engine(s), about half a minute")
        ready = engines.wait_ready(poll)
        wait_for([manager.connect.remote(ready)], name="the router's address", owner="RolloutManager", deadline_s=30)
    if trainers is not None:
        trainers.wait_ready(poll)
    carrier = connect_carrier(config, queue_address)
    return Parts(manager, trainers, engines, carrier, num_rollout), checkpoint


def _num_rollout(config: Config, info: ManagerInfo) -> int:
    if config.rollout.num_rollout is not None:
        return config.rollout.num_rollout
    per_epoch = max(1, info.num_prompts // config.rollout.rollout_batch_size)
    return per_epoch * (config.rollout.num_epoch or 1)


def _stop_manager(manager: Any) -> None:
    ray.wait([manager.close.remote()], timeout=10)
    ray.kill(manager)
