"""The router of a run: one address, whichever process plays it at the time."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path

from ray import ObjectRef
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from vime.config.parse import Config
from vime.ray.actor import Actor, Options, start_actor
from vime.ray.engine_actors import RouterActor
from vime.ray.losses import Losses
from vime.types import EngineAddress

MAX_CALLS = 4  # at a time in an actor


class ManagedRouter:
    """Owned by the driver's `Engines`. Runs on the node `node_id`, beside those who talk to it."""

    def __init__(self, config: Config, run_dir: Path, node_id: str) -> None:
        self._config, self._run_dir = config, run_dir
        beside = NodeAffinitySchedulingStrategy(node_id, soft=False)
        self._options: Options = {"num_cpus": 0, "max_concurrency": MAX_CALLS, "scheduling_strategy": beside}
        self.losses = Losses("router")
        self.actor: Actor[RouterActor] | None = self._start_actor()
        self.starting: ObjectRef[tuple[str, int]] | None = None  # until it responds
        self.began = 0.0
        self.engines: list[EngineAddress] = []  # those it was started with
        self.is_up = False

    def _start_actor(self) -> Actor[RouterActor]:
        return start_actor(RouterActor, self._options, self._config, str(self._run_dir))

    def begin(self, engines: Sequence[EngineAddress], deadline_s: float) -> ObjectRef[tuple[str, int]]:
        """Start it in front of `engines`. It is not ready before each of them responds."""
        self.actor = self.actor or self._start_actor()
        self.engines, self.began = list(engines), time.monotonic()
        self.starting = self.actor.ask(RouterActor.start, self.engines, deadline_s)
        return self.starting

    def respond(self, host: str, port: int) -> Config:
        """Note where it listens, now and after every loss. Returns the configuration with that address."""
        self.starting, self.is_up = None, True
        section = dataclasses.replace(self._config.engine, vllm_router_ip=host, vllm_router_port=port)
        self._config = dataclasses.replace(self._config, engine=section)
        return self._config

    def lose(self) -> float:
        """End what is left of it. Returns the seconds until it is to be started again."""
        self.end()
        return self.losses.add()

    def end(self) -> None:
        """End its processes, at once."""
        if self.actor is not None:
            self.actor.kill()
        self.actor = self.starting = None
        self.is_up = False
