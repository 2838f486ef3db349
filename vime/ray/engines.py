"""The driver's handle on all engines and the router: what starts, what serves, what is lost and starts again."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import ray
from ray import ObjectRef
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from vime.backends.vllm_utils.access import EngineKeys
from vime.backends.vllm_utils.control import FleetControl
from vime.backends.vllm_utils.router import CHANGE_S
from vime.config.parse import Config
from vime.observability.events import EventKind, EventLog
from vime.ray.actor import Actor, Options, start_actor
from vime.ray.cluster import ENGINE_CPUS
from vime.ray.engine_actors import EngineActor, RouterActor, ServerActor
from vime.ray.managed_engine import EngineState, ManagedEngine
from vime.ray.waits import wait_for
from vime.types import EngineAddress, EngineLostError, EngineReport, Version, VimeError, WaitTimeoutError, may_pass
from vime.utils.waits import waiting

logger = logging.getLogger(__name__)

STOP_S, AT_START_STOP_S = 30.0, 3.0
ASKED_TIMEOUT_S = 60.0  # a busy engine is asked while it generates
GRACE_S = 30.0  # beyond a health check's own deadline, for an actor to say what it found


MAX_CALLS = 4  # at a time in an actor


@dataclass(slots=True)
class _Check:
    """A question to one engine or the router how it is."""

    ref: ObjectRef[str | None]
    asked: float
    num_updates: int  # begun or ended before it
    is_over: bool = False


class Engines:
    """The driver's handle: start all, watch all, start again what is lost, stop all. Makes the engines' keys.

    An engine that is lost while another serves is started again, up to --max-restarts times in a row without a version
    that it confirmed; the update that brings it one readmits it (decision 0039). `tell` shows a message to the user.
    """

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        events: EventLog | None = None,
        tell: Callable[[str], None] = logger.warning,
    ) -> None:
        self._config, self._run_dir, self._keys = config, run_dir, EngineKeys.make()
        self._events, self._tell = events, tell
        self._deadline_s = config.cluster.start_timeout_secs
        self._router: Actor[RouterActor] | None = None
        self._is_routing = False  # the router has started
        self._engines = [ManagedEngine(index) for index in range(config.cluster.num_engines)]
        self._checks: dict[str, _Check] = {}  # the last of each
        self._num_updates = 0
        self._updated: list[EngineAddress] = []  # to which the update under way, or the last one, goes
        self._serving: Version | None = None
        self._fleet: FleetControl | None = None
        self._end: VimeError | None = None  # what ends the run at the next check
        self._num_lost = self._num_readmitted = 0  # since the last round
        self._longest_away_s = 0.0
        for engine in self._engines:
            self._start(engine)

    def __len__(self) -> int:
        return len(self._engines)

    @property
    def addresses(self) -> list[EngineAddress]:
        """Return the addresses of the engines that respond: an update goes to these."""
        return [engine.address for engine in self._engines if engine.address is not None]

    @property
    def fleet(self) -> FleetControl:
        """Return the driver's control of the engines that serve, or before the first version of all."""
        serving = [each.address for each in self._engines if each.state is EngineState.SERVING and each.address]
        addresses = tuple(serving or self.addresses)
        if self._fleet is None or self._fleet.addresses != addresses:
            self._close_fleet()
            self._fleet = FleetControl(addresses, timeout_s=ASKED_TIMEOUT_S)
        return self._fleet

    @property
    def num_serving(self) -> int:
        return sum(engine.state is EngineState.SERVING for engine in self._engines)

    @property
    def generate_key(self) -> str:
        """Return the key that requests for completions must carry."""
        return self._keys.generate

    def wait_ready(self, node_id: str, on_poll: Callable[[], None] | None = None) -> Config:
        """Wait for engines and router, which starts on the node `node_id`. Returns the configuration with the router's
        address filled in."""
        beside = NodeAffinitySchedulingStrategy(node_id, soft=False)
        options: Options = {"num_cpus": 0, "max_concurrency": MAX_CALLS, "scheduling_strategy": beside}
        router = start_actor(RouterActor, options, self._config, str(self._run_dir))
        self._router = router
        addresses = wait_for(
            [engine.starting for engine in self._engines if engine.starting is not None],
            name="engines to start",
            owner="vLLM",
            deadline_s=self._deadline_s + 30,
            on_poll=on_poll,
            parties=[engine.name for engine in self._engines],
        )
        for engine, address in zip(self._engines, addresses, strict=True):
            engine.respond(address)

        def poll() -> None:
            """The router waits for every engine, also for one that has ended."""
            if on_poll is not None:
                on_poll()
            self._check_all()

        [(host, port)] = wait_for(
            [router.ask(RouterActor.start, addresses, self._deadline_s)],
            name="router to start",
            owner="vllm-router",
            deadline_s=self._deadline_s + 30,
            on_poll=poll,
            parties=["router"],
        )
        self._is_routing = True
        for engine in self._engines:
            engine.is_routed = True
        section = dataclasses.replace(self._config.engine, vllm_router_ip=host, vllm_router_port=port)
        return dataclasses.replace(self._config, engine=section)

    def check(self, *, is_updating: bool = False) -> None:
        """Called while the driver waits for something else. Starts again what is lost; raises the VimeError of what
        ends the run: the router, the last engine, one that was started again too often.

        Asks everybody how it is every --engine-health-interval-secs and waits for no response. An actor that hangs with
        its engine is lost too, or ends the run, with WaitTimeoutError.
        """
        if self._end is not None:
            raise self._end
        self._check_all(is_updating=is_updating)
        self._go_on_starting()

    def tend(self) -> None:
        """As `check`, for a wait that the engines must not end: what ends the run is raised by the next check."""
        if self._end is None:
            try:
                self.check()
            except VimeError as error:
                self._end = error

    def begin_update(self) -> list[EngineAddress]:
        """Return the engines that an update goes to. `served` ends it."""
        self._num_updates += 1
        self._updated = self.addresses
        return self._updated

    def served(self, version: Version, reports: Sequence[EngineReport]) -> None:
        """The engines of these reports have confirmed `version`: prompts go to them. One that was to get the update and
        is not among them is lost."""
        self._num_updates += 1
        self._serving = version
        confirmed = {report.engine for report in reports}
        updated = [engine for engine in self._engines if engine.address in self._updated]
        for engine in updated:
            if engine.name in confirmed:
                self._readmit(engine, version)
        for engine in updated:
            if engine.name not in confirmed:
                self._lose(engine, EngineLostError(f"{engine.name} was lost in the update to version {version}."))

    def take_metrics(self) -> dict[str, float]:
        """Return what happened to engines since the last call; nothing in a run of one engine, which ends with it."""
        if len(self) == 1:
            return {}
        told = {
            "engines/serving": float(self.num_serving),
            "engines/lost": float(self._num_lost),
            "engines/readmitted": float(self._num_readmitted),
        }
        if self._num_readmitted:
            told["engines/away_time"] = self._longest_away_s
        self._num_lost, self._num_readmitted, self._longest_away_s = 0, 0, 0.0
        return told

    def stop(self, grace_s: float = STOP_S) -> None:
        """Stop the router first, then the engines; an actor that is gone took its child with it. `grace_s` 0, after a
        failed start: actors that are not up yet are not waited for, but all running servers together get a moment, so
        that none outlives the run."""
        self._close_fleet()
        for engine in self._engines:
            engine.forget()
        routers: list[Actor[ServerActor]] = [] if self._router is None else [self._router]
        engines: list[Actor[ServerActor]] = [engine.actor for engine in self._engines if engine.actor is not None]
        for actors in (routers, engines) if grace_s else ([*routers, *engines],):
            if not actors:
                continue
            refs = [actor.ask(ServerActor.stop) for actor in actors]
            deadline_s = grace_s or AT_START_STOP_S
            with waiting("servers to stop", "router", "engine", deadline_s=deadline_s):
                ray.wait(refs, num_returns=len(refs), timeout=deadline_s)
        for actor in [*routers, *engines]:
            actor.kill()

    def _close_fleet(self) -> None:
        if self._fleet is not None:
            self._fleet.close()

    def _watched(self) -> dict[str, Actor[ServerActor]]:
        """Return the actors that can be asked how they are: of the engines that respond, and of the started router."""
        found: dict[str, Actor[ServerActor]] = {
            engine.name: engine.actor for engine in self._engines if engine.actor and engine.address
        }
        return found if self._router is None or not self._is_routing else {**found, "router": self._router}

    def _check_all(self, *, is_updating: bool = False) -> None:
        """Read what has arrived of the questions before, and ask those who have responded again when it is time."""
        section, now = self._config.engine, time.monotonic()
        open_checks = {check.ref: name for name, check in self._checks.items() if not check.is_over}
        if open_checks:
            done, _ = ray.wait(list(open_checks), num_returns=len(open_checks), timeout=0)
            for ref in done:
                self._read(open_checks[ref], is_updating=is_updating)
        for name, actor in self._watched().items():  # without those that were lost a moment ago
            check = self._checks.get(name)
            if check is None or (check.is_over and now - check.asked >= section.engine_health_interval_secs):
                ref = actor.ask(ServerActor.check, section.engine_health_timeout_secs, is_updating)
                self._checks[name] = _Check(ref, now, self._num_updates)
            elif not check.is_over and now - check.asked > section.engine_health_timeout_secs + GRACE_S:
                asked = f"{name} to say how it is"
                self._judge(name, WaitTimeoutError(asked, now - check.asked, "its actor", "See RUN_DIR/logs."))

    def _read(self, name: str, *, is_updating: bool) -> None:
        """Take what an engine, or the router, said of itself."""
        check = self._checks[name]
        check.is_over = True
        asked = f"{name} to say how it is"
        try:
            [version] = wait_for([check.ref], name=asked, owner="vLLM", deadline_s=10, parties=[name])
        except VimeError as error:
            self._judge(name, error)
            return
        engine = self._named(name)
        is_known = not is_updating and check.num_updates == self._num_updates and version is not None
        if engine and engine.state is EngineState.SERVING and is_known and version != str(self._serving):
            other = f"{name} puts version {version} on its tokens, but version {self._serving} is served."
            self._judge(name, EngineLostError(other))

    def _named(self, name: str) -> ManagedEngine | None:
        """Return the engine of this name; None: it is the router."""
        return next((engine for engine in self._engines if engine.name == name), None)

    def _judge(self, name: str, error: VimeError) -> None:
        """Lose the engine, or raise what ends the run."""
        engine = self._named(name)
        if engine is None or not may_pass(error):
            raise error
        self._lose(engine, error)

    def _lose(self, engine: ManagedEngine, error: VimeError) -> None:
        """Take an engine out and have it started again; raise `error` when no other serves, or after too many starts.

        Its processes are ended before anything else: one that hangs would keep its requests until their deadline.
        """
        others = [each for each in self._engines if each is not engine and each.state is EngineState.SERVING]
        if not others or engine.num_losses >= self._config.cluster.max_restarts:
            raise error
        if engine.actor is not None:
            engine.actor.kill()
        if engine.is_routed and engine.address is not None:
            self._ask_router(RouterActor.leave_out, engine.address)
        start_in_s = engine.lose()
        self._checks.pop(engine.name, None)
        self._num_lost += 1
        self._emit(EventKind.ENGINE_LOST, engine, error=str(error), start_in_s=start_in_s)
        self._tell(f"{engine.name} is lost and is started again; {len(others)} of {len(self)} serve. {error}")

    def _start(self, engine: ManagedEngine) -> None:
        gpus = self._config.cluster.rollout_num_gpus_per_engine if self._config.cluster.device == "cuda" else 0
        options: Options = {"num_cpus": ENGINE_CPUS, "num_gpus": gpus, "max_concurrency": MAX_CALLS}
        actor = start_actor(EngineActor, options, self._config, engine.index, str(self._run_dir), self._keys)
        engine.begin(actor, actor.ask(EngineActor.start, self._deadline_s))

    def _go_on_starting(self) -> None:
        """Start the engines whose time has come, and look whether those that start are ready."""
        for engine in self._engines:
            if engine.state is EngineState.LOST and time.monotonic() >= engine.start_at:
                self._start(engine)
                self._emit(EventKind.ENGINE_STARTING, engine)
            elif engine.state is EngineState.STARTING:
                self._look_at_start(engine)

    def _look_at_start(self, engine: ManagedEngine) -> None:
        name, asked_s = f"{engine.name} to start", time.monotonic() - engine.began
        done, _ = ray.wait([engine.starting], timeout=0)
        if not done and asked_s <= self._deadline_s + GRACE_S:
            return
        try:
            if not done:
                raise WaitTimeoutError(name, asked_s, "its actor", "See RUN_DIR/logs.")
            [address] = wait_for(done, name=name, owner="vLLM", deadline_s=10, parties=[engine.name])
        except VimeError as error:
            self._judge(engine.name, error)
            return
        engine.respond(address)
        if engine.lost_at is not None:
            self._emit(EventKind.ENGINE_READY, engine)

    def _readmit(self, engine: ManagedEngine, version: Version) -> None:
        """Let the router send to it, if it does not yet."""
        assert engine.address is not None, "it got an update"
        if not engine.is_routed:
            try:
                self._ask_router(RouterActor.take_in, engine.address)
            except VimeError as error:
                self._judge(engine.name, error)
                return
        away_s = engine.serve()
        if away_s is not None:
            self._num_readmitted += 1
            self._longest_away_s = max(self._longest_away_s, away_s)
            self._emit(EventKind.ENGINE_READMITTED, engine, version=version, lost_s=away_s)
            self._tell(f"{engine.name} serves again, {away_s:.0f} s after its loss.")

    def _ask_router(self, method: Callable[[RouterActor, str], None], address: EngineAddress) -> None:
        assert self._router is not None, "engines are lost and readmitted when the run is up"
        wait_for(
            [self._router.ask(method, address.url)],
            name=f"the router to change how it treats {address.name}",
            owner="vllm-router",
            deadline_s=CHANGE_S + GRACE_S,
            parties=["router"],
        )

    def _emit(self, kind: EventKind, engine: ManagedEngine, **facts: str | float) -> None:
        if self._events is not None:
            self._events.emit(kind, ago_s=0.0, engine=engine.name, **facts)
