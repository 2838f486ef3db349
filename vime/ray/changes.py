"""Engines that a user adds to a live run or drains, by `vime engines RUN add|drain`: training never stops for it.

`FleetChanges` belongs to the driver's `Engines`, which calls it in every wait of the driver. It consumes the requests
in RUN_DIR/requests, takes a step of each that is open, and returns at once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import ray
from ray import ObjectRef

from vime.config.deadlines import generate_deadline_s
from vime.config.parse import Config
from vime.observability.requests import (
    Answer,
    AnswerState,
    FleetRequest,
    answer,
    open_requests,
    take,
    waiting_requests,
)
from vime.ray.actor import Actor
from vime.ray.engine_actors import EngineActor
from vime.ray.engines import STOP_S, Engines
from vime.ray.managed_engine import EngineState, ManagedEngine
from vime.ray.placement import EnginePlace, ExtraPlace, leave_place
from vime.ray.waits import said_meanwhile
from vime.types import ClusterError, ConfigError, DataError
from vime.utils.waits import DIRECTORY as WAITS
from vime.utils.waits import Stretch, waiting

logger = logging.getLogger(__name__)
LOOK_S = 0.5
"""Between two looks at the requests. An engine without a request in two looks has none: one that the router had chosen
it for before it was told arrives within milliseconds."""
MAX_ADDED = 1024  # in one request


class _Change(Protocol):
    """A request that is open."""

    def go_on(self) -> Answer:
        """Take a step; returns at once."""

    def close(self) -> None:
        """The run stops: end what only this change knows of."""


class FleetChanges:
    """The open requests of one run. Made by the driver when the engines are up."""

    def __init__(self, config: Config, run_dir: Path, engines: Engines, tell: Callable[[str], None]) -> None:
        self._config, self._run_dir, self._engines, self._tell = config, run_dir, engines, tell
        self._open: dict[str, _Change] = {}
        self._rooms, self._looked = _Rooms(config), 0.0
        open_requests(run_dir)

    def go_on(self) -> None:
        """Take what was asked, and a step of each open change. Raises what ends the run."""
        now = time.monotonic()
        if now - self._looked < LOOK_S:
            return
        self._looked = now
        for name in waiting_requests(self._run_dir):
            self._begin(name)
        for name, change in [*self._open.items()]:
            said = change.go_on()
            answer(self._run_dir, name, said)
            if said.state is not AnswerState.WORKING:
                del self._open[name]
                self._tell(said.said)

    def close(self) -> None:
        """The engines are stopped, with the run or before all of its parts start again."""
        over = Answer(AnswerState.FAILED, "the run stopped its engines before it was done. Ask again if it goes on.")
        for change in self._open.values():
            change.close()
        for name in [*self._open, *waiting_requests(self._run_dir)]:
            answer(self._run_dir, name, over)
        self._open.clear()
        self._rooms.give_back()

    def _begin(self, name: str) -> None:
        try:
            request = take(self._run_dir, name)
            if request is None:
                return
            if self._config.cluster.colocate:
                raise ConfigError(
                    f"{request.command} with --colocate: engines and trainers share GPUs, so that no engine can be "
                    "stopped or added alone. Start the run again with other numbers."
                )
            if request.command == "drain":
                within_s = request.within_s or generate_deadline_s(self._config)
                self._open[name] = _Drain(
                    self._run_dir, self._engines, self._rooms, self._engines.drain(request.engine), within_s
                )
            else:
                self._open[name] = _Add(self._run_dir, self._engines, self._rooms, request)
        except (ConfigError, DataError) as error:
            answer(self._run_dir, name, Answer(AnswerState.REFUSED, str(error)))


class _Rooms:
    """Where added engines lie. The place of a drained engine that the run began with is kept for the next one: Ray
    takes no single bundle back. One that an added engine had is given back, and that of a divided one."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._kept: list[EnginePlace] = []
        self._of: dict[str, ExtraPlace] = {}

    def ask(self) -> ExtraPlace:
        return ExtraPlace(self._config, self._kept.pop() if self._kept else None)

    def use(self, place: ExtraPlace, engine: str) -> None:
        self._of[engine] = place

    def leave(self, place: ExtraPlace) -> None:
        """It was asked for, and is not needed."""
        if place.kept is not None:
            self._kept.append(place.kept)
        place.give_back()

    def left(self, engine: str, options: EnginePlace) -> None:
        """An engine is no more that was started with these options."""
        place = self._of.pop(engine, None)
        if len(options) > 1:  # a divided engine has a group of its own, which is another one when it has moved
            leave_place(options)
        elif place is not None:
            self.leave(place)
        elif options:
            self._kept.append(options)

    def give_back(self) -> None:
        for place in self._of.values():
            place.give_back()
        self._of.clear()


class _Drain:
    """One engine that is to be stopped: its requests end, then its server and its actor."""

    def __init__(self, run_dir: Path, engines: Engines, rooms: _Rooms, engine: ManagedEngine, within_s: float) -> None:
        self._engines, self._rooms, self._engine, self._within_s = engines, rooms, engine, within_s
        self._began = time.monotonic()
        wait = waiting(f"requests of {engine.name} to end before it is stopped", deadline_s=within_s)
        self._wait: Stretch | None = wait.__enter__()
        self._asked: ObjectRef[int | None] | None = None
        self._num_requests: int | None = None  # that it said last
        self._num_empty = 0  # looks in a row in which it had none
        self._cut = ""  # what became of requests that had not ended
        self._end = _End(run_dir, engine.name)

    def go_on(self) -> Answer:
        name = self._engine.name
        if self._wait is not None:
            if not (self._engine.gone or self._is_empty() or self._is_late()):
                count = "its requests" if self._num_requests is None else f"{self._num_requests} requests"
                return Answer(AnswerState.WORKING, f"{name} gets no new requests; {count} to end")
            if not self._engine.gone and self._engines.is_updating:
                return Answer(AnswerState.WORKING, f"{name} has no requests; a weight update has to end")
            self._let_go()
        if not self._end.is_done():
            return Answer(AnswerState.WORKING, f"{name} is stopping")
        self._rooms.left(name, self._engine.place)
        after_s = time.monotonic() - self._began
        left = f"{self._engines.num_serving} of {len(self._engines)} serve"
        return Answer(AnswerState.DONE, f"{name} is stopped after {after_s:.0f} s{self._cut}; {left}.")

    def close(self) -> None:
        """An engine that the run still has is stopped with the others."""
        self._leave_wait()
        self._end.now()

    def _is_empty(self) -> bool:
        """Whether it had no request for two looks; asks it again when it has said how many it has."""
        if self._engine.address is None:  # it does not respond yet, or was lost and is not back
            return True
        if self._asked is not None and self._num_empty < 2:
            done, _ = ray.wait([self._asked], timeout=0)
            if not done:
                return False
            self._num_requests = said_meanwhile(self._asked, within_s=1)
            self._num_empty = self._num_empty + 1 if self._num_requests == 0 else 0
        is_empty = self._num_empty >= 2
        if self._engine.actor is not None and not is_empty:  # else it is stopped while it is asked
            self._asked = self._engine.actor.ask(EngineActor.num_requests)
        return is_empty

    def _is_late(self) -> bool:
        if time.monotonic() - self._began < self._within_s:
            return False
        self._cut = f", {self._num_requests or 'its'} requests had not ended and are sent to others"
        return True

    def _let_go(self) -> None:
        self._leave_wait()
        if self._engine.gone:
            self._cut = f" ({self._engine.gone.splitlines()[0]})"
            self._end.begin(None)
        else:
            self._end.begin(self._engines.release(self._engine, f"drained{self._cut}"))

    def _leave_wait(self) -> None:
        if self._wait is not None:
            self._wait.__exit__(None, None, None)
        self._wait = None


class _End:
    """The end of an actor that the run has no more: its server stops, its process ends, its waits are nobody's."""

    def __init__(self, run_dir: Path, name: str) -> None:
        self._run_dir, self._name = run_dir, name
        self._actor: Actor[EngineActor] | None = None
        self._stopping: ObjectRef[None] | None = None
        self._until = 0.0
        self._is_killed = False

    def begin(self, actor: Actor[EngineActor] | None) -> None:
        self._actor, self._until = actor, time.monotonic() + STOP_S
        self._stopping = None if actor is None else actor.ask(EngineActor.stop)
        self._is_killed = actor is None

    def is_done(self) -> bool:
        """Whether nothing of it is left; asked again and again after `begin`."""
        if not self._is_killed:
            assert self._stopping is not None, "it has begun"
            done, _ = ray.wait([self._stopping], timeout=0)
            if done or time.monotonic() > self._until:
                self.now()
            return False  # by the next look its process has ended, and writes no file again
        for name in (self._name, f"{self._name}-part-*"):
            for file in (self._run_dir / WAITS).glob(f"{name}.*.json"):  # else `vime why-stuck` takes it for dead
                file.unlink(missing_ok=True)
        return True

    def now(self) -> None:
        """End its process at once."""
        if self._actor is not None and not self._is_killed:
            self._actor.kill()
            self._is_killed = True


class _Add:
    """Engines that are to be added: room for all of them, then the start, then the next update of weights."""

    def __init__(self, run_dir: Path, engines: Engines, rooms: _Rooms, request: FleetRequest) -> None:
        if not 1 <= request.count <= MAX_ADDED:
            raise ConfigError(f"{request.count} engines to add: expected 1 to {MAX_ADDED}.")
        self._engines, self._run_dir, self._rooms, self._began = engines, run_dir, rooms, time.monotonic()
        self._places = [rooms.ask() for _ in range(request.count)]
        self._added: list[ManagedEngine] = []

    def go_on(self) -> Answer:
        if not self._added:
            try:
                found = [place.find() for place in self._places]
                if any(each is None for each in found):
                    return Answer(AnswerState.WORKING, "Ray looks for room")
                self._added = [self._engines.add(each) for each in found if each is not None]
            except (ClusterError, ConfigError) as error:
                for place in self._places:
                    self._rooms.leave(place)
                return Answer(AnswerState.REFUSED, f"no engine was added: {error}")
            for engine, place in zip(self._added, self._places, strict=True):
                self._rooms.use(place, engine.name)
        if any(engine.is_new and not engine.gone for engine in self._added):
            states = ", ".join(f"{engine.name} {self._described(engine)}" for engine in self._added)
            return Answer(AnswerState.WORKING, states)
        return self._ended()

    def close(self) -> None:
        """Rooms and engines are the run's, which ends them."""

    def _ended(self) -> Answer:
        lost = [engine for engine in self._added if engine.is_new]
        for engine in lost:
            self._rooms.left(engine.name, engine.place)
            end = _End(self._run_dir, engine.name)
            end.begin(None)
            end.is_done()
        after_s = time.monotonic() - self._began
        serve = ", ".join(engine.name for engine in self._added if engine not in lost)
        said = [f"{serve} added: prompts go there after {after_s:.0f} s, with confirmed weights."] if serve else []
        said += [f"{engine.name} was not added: {engine.gone}" for engine in lost]
        return Answer(AnswerState.FAILED if lost else AnswerState.DONE, " ".join(said))

    @staticmethod
    def _described(engine: ManagedEngine) -> str:
        if engine.gone:
            return "is lost"
        if not engine.is_new:
            return "serves"
        return "starts" if engine.state is EngineState.STARTING else "gets weights with the next update"
