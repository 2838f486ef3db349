"""The further nodes of an engine that is on several: an actor on each, watched by the one with the engine's server.

For the run the engine is one thing, and that one actor is asked how it is. It starts the followers, so they are its
children in Ray: when it ends, however it ends, Ray ends them, and their guards end vLLM's processes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import ray
from ray import ObjectRef

from vime.backends.vllm_utils.access import EngineKeys
from vime.backends.vllm_utils.engine import EngineProcess, FollowerProcess
from vime.backends.vllm_utils.launch import Part
from vime.config.parse import Config
from vime.observability.logs import setup_logging
from vime.ray.actor import Actor, Options, start_actor
from vime.ray.cluster import keep_collectives_on_interface, listen_host, yield_to_trainers
from vime.ray.waits import wait_for
from vime.types import EngineLostError, VimeError
from vime.utils.device import see_only
from vime.utils.waits import waiting

WATCH_S = 10.0
POLL_S = 0.1
STOP_S = 25.0


class FollowerActor:
    """Owns the child with an engine's workers of one further node. The child dies with this actor."""

    def __init__(self, config: Config, index: int, part: Part, run_dir: str, keys: EngineKeys) -> None:
        self._config = config
        keep_collectives_on_interface(config)
        setup_logging(Path(run_dir), f"engine-{index}-part-{part.number}")
        see_only(ray.get_gpu_ids())
        host = listen_host(config)
        self._process = FollowerProcess(config, index=index, part=part, run_dir=Path(run_dir), keys=keys, host=host)

    def start(self) -> None:
        """Returns at once: the workers wait for those of the other nodes."""
        self._process.start()
        yield_to_trainers(self._config)
        yield_to_trainers(self._config, session=self._process.pid)

    def watch(self, within_s: float) -> None:
        """Return after this time. EngineLostError, with the last log lines, as soon as the child has ended."""
        ends = time.monotonic() + within_s
        while time.monotonic() < ends:
            self._process.check()
            time.sleep(POLL_S)

    def stop(self) -> None:
        self._process.stop()


class Followers:
    """What the actor of the engine's server knows of the others; it may be none."""

    def __init__(self, config: Config, index: int, run_dir: str, keys: EngineKeys, places: Sequence[Options]) -> None:
        self._told, self._places, self._name = (config, index, run_dir, keys), places, f"engine-{index}"
        self._actors: list[Actor[FollowerActor]] = []
        self._watches: dict[ObjectRef[None], Actor[FollowerActor]] = {}

    def start(self, engine: EngineProcess) -> None:
        config, index, run_dir, keys = self._told
        for number, place in enumerate(self._places, start=1):
            actor = start_actor(FollowerActor, place, config, index, engine.part(number), run_dir, keys)
            self._actors.append(actor)
            self._watches[actor.ask(FollowerActor.start)] = actor

    def check(self) -> None:
        """Return at once. EngineLostError when a follower, or its actor, has ended."""
        if not self._watches:
            return
        done, _ = ray.wait(list(self._watches), num_returns=len(self._watches), timeout=0)
        for ref in done:
            actor = self._watches[ref]
            try:
                wait_for([ref], name=f"a part of {self._name} to say how it is", owner=self._name, deadline_s=10)
            except EngineLostError:
                raise
            except VimeError as error:
                raise EngineLostError(f"{self._name} has lost a part: {error}") from error
            del self._watches[ref]
            self._watches[actor.ask(FollowerActor.watch, WATCH_S)] = actor

    def begin_stop(self) -> list[ObjectRef[None]]:
        """Let all of them stop, side by side. Nothing watches them any more."""
        self._watches.clear()
        return [actor.ask(FollowerActor.stop) for actor in self._actors]

    def end_stop(self, stopping: Sequence[ObjectRef[None]]) -> None:
        """Wait for them, and end those that do not stop."""
        if stopping:
            with waiting(f"the parts of {self._name} to stop", deadline_s=STOP_S):
                ray.wait(list(stopping), num_returns=len(stopping), timeout=STOP_S)
        for actor in self._actors:
            actor.kill()
        self._actors.clear()
