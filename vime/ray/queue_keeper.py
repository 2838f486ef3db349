"""The driver's handle on TransferQueue: starts it, and in mode streaming another one when a part of it dies.

The new queue gets what trainers have still to read from the memory and the spools of those who stored it; then the
trainers read there. The run goes on meanwhile: decision 0047.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING, cast

import ray
from ray import ObjectRef

from vime.config.parse import Config
from vime.observability.events import EventKind, EventLog
from vime.ray.actor import Actor
from vime.ray.losses import Losses
from vime.ray.rollout_manager import RolloutManager
from vime.ray.stores import actors_of, ask_whether_it_lives, is_dead, start_queue, stop_queue
from vime.ray.trainers import Trainers
from vime.ray.waits import HANGS_S, Silence, wait_for
from vime.types import ClusterError, HandoffLostError, VimeError
from vime.utils.errors import first_line

if TYPE_CHECKING:
    from vime.handoff.queue_client import QueueAddress

POLL_S = 0.5
STOP_S = 5.0


class _QueueLostError(ClusterError):
    """An actor of the queue is dead or hangs."""


class QueueKeeper:
    """Made and asked by the driver's main thread; a thread of its own watches the actors and replaces them."""

    def __init__(self, config: Config, events: EventLog) -> None:
        self._config, self._events = config, events
        self.address: QueueAddress = start_queue(config)
        self._losses = Losses("the queue")
        self._num_lost = 0  # since the last round
        self._told: list[str] = []  # for the user
        self._end: Exception | None = None
        self._asked: dict[str, ObjectRef[int]] = {}
        self._silence: dict[str, Silence] = {}  # of each that was asked
        self._is_closed = threading.Event()
        self._watcher: threading.Thread | None = None

    def watch(self, manager: Actor[RolloutManager], trainers: Trainers | None) -> None:
        """Begin to look at the actors: everybody who stores and reads is up."""
        self._manager, self._trainers = manager, trainers
        self._watcher = threading.Thread(target=self._watch, name="vime-queue-watch", daemon=True)
        self._watcher.start()

    def check(self) -> list[str]:
        """Return what the user should see since the last call. Raises the error of a queue that was not replaced."""
        if self._end is not None:
            raise self._end
        return [self._told.pop(0) for _ in range(len(self._told))]

    def note_trained(self) -> None:
        """A round was read and trained: the next loss is the first in a row."""
        if self._losses.first_at is None:
            self._losses.end()

    def take_metrics(self) -> dict[str, float]:
        """Return how often the queue was lost since the last call, if it was."""
        num_lost = self._num_lost
        self._num_lost -= num_lost
        return {"transferqueue/lost": float(num_lost)} if num_lost else {}

    def close_watch(self) -> None:
        """Look no more: the parts are about to end."""
        self._is_closed.set()
        self._losses.end()
        if self._watcher is not None:
            self._watcher.join(STOP_S)

    def close(self) -> None:
        """End the queue, when everybody has left it."""
        stop_queue(self.address)

    def _watch(self) -> None:
        """Waits for: the clock, or `close_watch`."""
        while not self._is_closed.wait(POLL_S):
            try:
                try:
                    self._check(self.address)
                except ClusterError as lost:
                    self._replace(lost)
            except Exception as failure:  # boundary: raised where the driver waits
                if not self._is_closed.is_set():
                    self._end = failure
                return

    def _check(self, address: QueueAddress) -> None:
        """Ask each actor whether it lives, without waiting for it. _QueueLostError names one that is dead or
        hangs."""
        for name, actor in actors_of(address).items():
            if name not in self._asked:
                self._asked[name] = ask_whether_it_lives(actor)
                self._silence[name] = Silence()
            asked = self._asked[name]
            done, _ = ray.wait([asked], timeout=0)
            if done:
                del self._asked[name]
                try:
                    ray.get(done[0], timeout=STOP_S)
                except ray.exceptions.RayActorError as error:
                    raise _QueueLostError(f"The {name} died: {first_line(error)}") from error
            elif self._silence[name].is_too_long():
                raise _QueueLostError(f"The {name} lives, but has not responded for {HANGS_S:.0f} s.")

    def _replace(self, error: VimeError) -> None:
        """Start queues until one is filled and everybody uses it. Raises the last loss after too many in a row."""
        began = time.monotonic()
        while True:
            if self._losses.count >= self._config.cluster.max_restarts:
                raise HandoffLostError(str(error))
            start_in_s = self._losses.add()
            self._num_lost += 1
            self._events.emit(EventKind.QUEUE_LOST, error=str(error), start_in_s=start_in_s)
            self._told.append(f"the queue is lost; another one gets its groups from where they are stored. {error}")
            _kill(self.address)
            self._asked.clear()
            if self._is_closed.wait(start_in_s):
                return
            self.address = start_queue(self._config)
            try:
                self._bring(self.address)
            except VimeError as again:
                if not isinstance(again, _QueueLostError) and not is_dead(self.address):
                    raise
                error = again
                continue
            self._losses.back()
            away_s = time.monotonic() - began
            self._events.emit(EventKind.QUEUE_READY, lost_s=away_s)
            self._told.append(f"the queue works again, {away_s:.0f} s after its loss.")
            return

    def _bring(self, address: QueueAddress) -> None:
        """Let everybody use the new queue: those who store first, so that it is filled before anybody reads."""
        deadline_s = self._config.queue.transferqueue_timeout_secs

        def poll() -> None:
            self._check(address)  # it may be lost too

        wait_for(
            [self._manager.ask(RolloutManager.replace_queue, address)],
            name="finished groups to be put into another queue",
            owner="RolloutManager",
            deadline_s=deadline_s,
            on_poll=poll,
        )
        if self._trainers is not None:
            wait_for(
                self._trainers.replace_queue(address),
                name="trainer ranks to use another queue",
                owner="trainer",
                deadline_s=deadline_s,
                on_poll=poll,
            )


def _kill(address: QueueAddress) -> None:
    """End what is left of a queue: what it holds is not complete, and nobody may read there."""
    for actor in actors_of(address).values():
        with contextlib.suppress(ray.exceptions.RayError):
            ray.kill(cast("ray.actor.ActorHandle[object]", actor))
