"""Engines and router: one Ray actor per vLLM server, one for the router, and the driver's handle on all of them."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Protocol

import ray
from ray import ObjectRef
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from vime.backends.vllm_utils.access import EngineKeys
from vime.backends.vllm_utils.control import FleetControl
from vime.backends.vllm_utils.engine import EngineProcess
from vime.backends.vllm_utils.router import RouterProcess
from vime.config.parse import Config
from vime.observability.logs import setup_logging
from vime.ray.actor import Actor, Options, start_actor
from vime.ray.cluster import ENGINE_CPUS, keep_collectives_on_interface, listen_host, yield_to_trainers
from vime.ray.waits import wait_for
from vime.types import EngineAddress, WaitTimeoutError
from vime.utils.waits import waiting

STOP_S, AT_START_STOP_S = 30.0, 3.0
ASKED_TIMEOUT_S = 60.0  # a busy engine is asked while it generates
GRACE_S = 30.0  # beyond a health check's own deadline, for an actor to say what it found


MAX_CALLS = 4  # at a time in an actor


class ServerActor(Protocol):
    """What the driver asks an engine and the router alike."""

    def check(self, deadline_s: float, is_updating: bool) -> None: ...
    def stop(self) -> None: ...


class EngineActor:
    """Owns one `vllm serve` child. The child dies with this actor."""

    def __init__(self, config: Config, index: int, run_dir: str, keys: EngineKeys) -> None:
        self._config = config
        keep_collectives_on_interface(config)
        setup_logging(Path(run_dir), f"engine-{index}")
        self._process = EngineProcess(config, index=index, run_dir=Path(run_dir), host=listen_host(config), keys=keys)

    def start(self, deadline_s: float) -> EngineAddress:
        self._process.start()
        self._process.wait_ready(deadline_s)
        # Not earlier: the whole run waits for the engines' start, which takes longest.
        yield_to_trainers(self._config)
        yield_to_trainers(self._config, session=self._process.pid)
        return self._process.address

    def check(self, deadline_s: float, is_updating: bool) -> None:
        """EngineLostError with the last log lines when the child has ended, or hangs for `deadline_s`."""
        self._process.check_health(deadline_s, is_updating=is_updating)

    def stop(self) -> None:
        self._process.stop()


class RouterActor:
    """Owns the router child: one address for N engines, data only. It listens on loopback, beside the RolloutManager,
    which alone talks to it: the router has no way to know its callers."""

    def __init__(self, config: Config, run_dir: str) -> None:
        yield_to_trainers(config)
        setup_logging(Path(run_dir), "router")
        self._config, self._run_dir = config, Path(run_dir)
        self._process: RouterProcess | None = None

    def start(self, engines: list[EngineAddress], deadline_s: float) -> tuple[str, int]:
        self._process = RouterProcess(self._config, engines, run_dir=self._run_dir)
        self._process.start()
        self._process.wait_ready(deadline_s)
        return self._process.host, self._process.port

    def check(self, deadline_s: float, is_updating: bool) -> None:  # noqa: ARG002 - asked like an engine
        if self._process is not None:
            self._process.check_health(deadline_s)

    def stop(self) -> None:
        if self._process is not None:
            self._process.stop()


class Engines:
    """The driver's handle: start all, watch all, stop all. Makes the engines' keys."""

    def __init__(self, config: Config, run_dir: Path) -> None:
        self._config, self._run_dir, self._keys = config, run_dir, EngineKeys.make()
        gpus = config.cluster.rollout_num_gpus_per_engine if config.cluster.device == "cuda" else 0
        options: Options = {"num_cpus": ENGINE_CPUS, "num_gpus": gpus, "max_concurrency": MAX_CALLS}
        count = config.cluster.num_engines
        self._actors = [
            start_actor(EngineActor, options, config, index, str(run_dir), self._keys) for index in range(count)
        ]
        self._router: Actor[RouterActor] | None = None
        self._deadline_s = config.cluster.start_timeout_secs
        self._starting = [actor.ask(EngineActor.start, self._deadline_s) for actor in self._actors]
        self._watched: dict[str, Actor[ServerActor]] = {  # and the started router
            f"engine-{index}": actor for index, actor in enumerate(self._actors)
        }
        self._checks: dict[ObjectRef[None], str] = {}  # begun and not finished yet, by name
        self._asked = -math.inf  # when the last check began
        self.addresses: list[EngineAddress] = []

    def __len__(self) -> int:
        return len(self._actors)

    @cached_property
    def fleet(self) -> FleetControl:
        """The driver's questions to the engines, when they are ready."""
        return FleetControl(self.addresses, timeout_s=ASKED_TIMEOUT_S)

    @property
    def generate_key(self) -> str:
        """Return the key that requests for completions must carry."""
        return self._keys.generate

    def wait_ready(self, node_id: str, on_poll: Callable[[], None] | None = None) -> Config:
        """Wait for engines and router, which starts on the node `node_id`. Returns the configuration with the router's
        address filled in."""
        beside = NodeAffinitySchedulingStrategy(node_id, soft=False)
        options: Options = {"num_cpus": 0, "max_concurrency": MAX_CALLS, "scheduling_strategy": beside}
        self._router = router = start_actor(RouterActor, options, self._config, str(self._run_dir))
        self.addresses = wait_for(
            self._starting,
            name="engines to start",
            owner="vLLM",
            deadline_s=self._deadline_s + 30,
            on_poll=on_poll,
            parties=[f"engine-{index}" for index in range(len(self))],
        )

        def poll() -> None:
            """The router waits for every engine, also for one that has ended."""
            if on_poll is not None:
                on_poll()
            self.check()

        [(host, port)] = wait_for(
            [router.ask(RouterActor.start, self.addresses, self._deadline_s)],
            name="router to start",
            owner="vllm-router",
            deadline_s=self._deadline_s + 30,
            on_poll=poll,
            parties=["router"],
        )
        self._watched["router"] = router
        engine = dataclasses.replace(self._config.engine, vllm_router_ip=host, vllm_router_port=port)
        return dataclasses.replace(self._config, engine=engine)

    def check(self, *, is_updating: bool = False) -> None:
        """Called while the driver waits for something else: EngineError when an engine or the router died or hangs.

        Never blocks: it reads results that have arrived and checks again every --engine-health-interval-secs. An actor
        that hangs with its engine is named too, by WaitTimeoutError.
        """
        engine, elapsed = self._config.engine, time.monotonic() - self._asked
        if self._checks:
            done, _ = ray.wait(list(self._checks), num_returns=len(self._checks), timeout=0)
            for ref in done:
                name = self._checks.pop(ref)
                wait_for([ref], name=f"{name} to say how it is", owner="vLLM", deadline_s=10, parties=[name])
            if self._checks and elapsed > engine.engine_health_timeout_secs + GRACE_S:
                silent = ", ".join(self._checks.values())
                raise WaitTimeoutError(f"{silent} to say how it is", elapsed, "its actor", "See RUN_DIR/logs.")
        elif elapsed >= engine.engine_health_interval_secs:
            self._asked = time.monotonic()
            deadline_s = engine.engine_health_timeout_secs
            self._checks = {
                actor.ask(ServerActor.check, deadline_s, is_updating): name for name, actor in self._watched.items()
            }

    def stop(self, grace_s: float = STOP_S) -> None:
        """Stop the router first, then the engines; an actor that is gone took its child with it. `grace_s` 0, after a
        failed start: actors that are not up yet are not waited for, but all running servers together get a moment, so
        that none outlives the run."""
        if self.addresses:
            self.fleet.close()
        routers: list[Actor[ServerActor]] = [] if self._router is None else [self._router]
        engines: list[Actor[ServerActor]] = [*self._actors]
        for actors in (routers, engines) if grace_s else ([*routers, *engines],):
            if not actors:
                continue
            refs = [actor.ask(ServerActor.stop) for actor in actors]
            deadline_s = grace_s or AT_START_STOP_S
            with waiting("servers to stop", "router", "engine", deadline_s=deadline_s):
                ray.wait(refs, num_returns=len(refs), timeout=deadline_s)
        for actor in [*routers, *engines]:
            actor.kill()
