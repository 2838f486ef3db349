"""The driver's handle on all engines and the router: what starts, what serves, what is lost and starts again."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import ray
from ray import ObjectRef

from vime.backends.vllm_utils.control import KV_CACHE, WEIGHTS, FleetControl
from vime.backends.vllm_utils.external import run_keys
from vime.backends.vllm_utils.router import CHANGE_S, RouterLostError
from vime.config.colocation import shared_ranks
from vime.config.deadlines import health_deadline_s, start_deadline_s, update_deadline_s
from vime.config.parse import Config
from vime.observability.events import EventKind, EventLog
from vime.ray.actor import Actor, Options
from vime.ray.engine_actors import EngineActor, RouterActor, ServerActor
from vime.ray.managed_engine import Changes, EngineState, ManagedEngine, start_engine
from vime.ray.managed_router import ManagedRouter
from vime.ray.placement import ANYWHERE, Places
from vime.ray.waits import wait_for
from vime.types import (
    ClusterError,
    ConfigError,
    EngineAddress,
    EngineLostError,
    EngineReport,
    Version,
    VimeError,
    WaitTimeoutError,
    may_pass,
)
from vime.utils.waits import waiting

logger = logging.getLogger(__name__)

Started = TypeVar("Started")

STOP_S, AT_START_STOP_S = 30.0, 3.0
ASKED_TIMEOUT_S = 60.0  # a busy engine is asked while it generates
GRACE_S = 30.0  # beyond a health check's own deadline, for an actor to say what it found
POLL_S = 0.25


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
    that it confirmed; the update that brings it one readmits it (decision 0039). The router is started again at its
    address, up to as often without a version in between. `tell` shows a message to the user.

    `rank_gpus`: with --colocate, the GPUs that Ray gave to each rank of the policy. Engines sleep between `sleep` and
    `wake_up` of both parts of their memory; a lost one is started again only while all are awake, when the trainers
    hold no device memory.
    """

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        events: EventLog | None = None,
        tell: Callable[[str], None] = logger.warning,
        *,
        places: Places = ANYWHERE,
        rank_gpus: Sequence[Sequence[str]] = (),
    ) -> None:
        self._config, self._run_dir, self._keys = config, run_dir, run_keys(config)
        self._events, self._tell, self._rank_gpus = events, tell, rank_gpus
        self._asleep: tuple[str, ...] = ()  # parts of the engines' memory, in the order in which they wake up
        self._is_discarded = False  # no engine has weights until an update brings them
        self._is_stopped = False
        self._deadline_s, self._health_s = start_deadline_s(config), health_deadline_s(config)
        self._router: ManagedRouter | None = None
        outside = config.cluster.rollout_external_engine_addrs
        self._engines = [
            ManagedEngine(n, place=places.of_engine(n), external=outside[n] if outside else None)
            for n in range(config.cluster.num_engines)
        ]
        self._num_ever = len(self._engines)  # each number is given once
        self.changes: Changes | None = None
        self._checks: dict[str, _Check] = {}  # the last of each
        self._num_updates = 0
        self._updated: list[EngineAddress] = []  # to which the update under way, or the last one, goes
        self._serving: Version | None = None
        self._fleet: FleetControl | None = None
        self._end: VimeError | None = None  # what ends the run at the next check
        self._num_lost = self._num_readmitted = self._num_router_lost = 0  # since the last round
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
        addresses = tuple(self._to_ask())
        if self._fleet is None or self._fleet.addresses != addresses:
            self._close_fleet()
            self._fleet = FleetControl(addresses, timeout_s=max(ASKED_TIMEOUT_S, self._health_s))
        return self._fleet

    def _to_ask(self) -> list[EngineAddress]:
        """Return the addresses of the engines that serve, or before the first version of all."""
        serving = [each.address for each in self._engines if each.state is EngineState.SERVING and each.address]
        return serving or self.addresses

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
        self._router = router = ManagedRouter(self._config, self._run_dir, node_id)
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
            [router.begin(addresses, self._deadline_s)],
            name="router to start",
            owner="vllm-router",
            deadline_s=self._deadline_s + 30,
            on_poll=poll,
            parties=["router"],
        )
        for engine in self._engines:
            engine.is_routed = True
        return router.respond(host, port)

    def check(self, *, is_updating: bool = False) -> None:
        """Called while the driver waits for something else. Starts again what is lost; raises the VimeError of what
        ends the run: the last engine, or what was started again too often.

        Asks everybody how it is every --engine-health-interval-secs and waits for no response. An actor that hangs with
        its engine is lost too, or ends the run, with WaitTimeoutError.
        """
        if self._end is not None:
            raise self._end
        self._check_all(is_updating=is_updating)
        self._go_on_starting()
        if self.changes is not None:
            self.changes.go_on()

    def tend(self) -> None:
        """As `check`, for a wait that the engines must not end: what ends the run is raised by the next check."""
        if self._end is None:
            try:
                self.check()
            except VimeError as error:
                self._end = error

    @property
    def is_asleep(self) -> bool:
        """Whether prompts would wait."""
        return bool(self._asleep)

    def sleep(self, level: int) -> None:
        """Let every engine free its GPUs. Waits for: engines that are being started, then requests that still run.
        Level 2 discards the weights: an update has to come before the engines take prompts again."""
        if self._asleep or self._is_stopped:
            return
        self._wait_until_started()
        self._on_all(lambda fleet: fleet.sleep(level), "was lost while it was to sleep")
        self._asleep, self._is_discarded = (WEIGHTS, KV_CACHE), level > 1

    def wake_up(self, part: str) -> None:
        """Let every engine take memory for WEIGHTS, or KV_CACHE, of which the last lets it take prompts. Does nothing
        where that is awake."""
        if part not in self._asleep or self._is_stopped:
            return
        assert part == self._asleep[0], "weights first: an update needs no cache"
        is_last = self._asleep == (part,)
        assert not (is_last and self._is_discarded), "an update comes before prompts"
        self._on_all(lambda fleet: fleet.wake_up(part, is_last=is_last), "was lost while it was to wake up")
        self._asleep = self._asleep[1:]

    def _on_all(self, call: Callable[[FleetControl], None], why: str) -> None:
        """Make a call of every engine that responds; one that is lost in it is left out, as in an update."""
        asked = [engine for engine in self._engines if engine.address is not None]
        fleet = FleetControl(
            [engine.address for engine in asked if engine.address is not None],
            timeout_s=update_deadline_s(self._config),
            may_lose=len(asked) > 1,
        )
        try:
            call(fleet)
            answered = set(fleet.addresses)
        finally:
            fleet.close()
        for engine in asked:
            if engine.address not in answered:
                self._lose(engine, EngineLostError(f"{engine.name} {why}."))

    def _wait_until_started(self) -> None:
        """Wait for lost engines that are being started again: one that takes its memory later would find it gone."""
        ends = time.monotonic() + self._deadline_s + GRACE_S
        while starting := [engine for engine in self._engines if engine.state is EngineState.STARTING]:
            names = [engine.name for engine in starting]
            if time.monotonic() >= ends:
                raise WaitTimeoutError(
                    "engines to start again", self._deadline_s, ", ".join(names), "See RUN_DIR/logs."
                )
            with waiting("engines to start again before trainers take the GPUs", *names, deadline_s=self._deadline_s):
                ray.wait([engine.starting for engine in starting if engine.starting is not None], timeout=POLL_S)
            for engine in starting:
                self._look_at_start(engine)

    def begin_update(self) -> list[EngineAddress]:
        """Return the engines that an update goes to. `served` ends it."""
        self._num_updates += 1
        self._updated = self.addresses
        return self._updated

    def served(self, version: Version, reports: Sequence[EngineReport]) -> None:
        """The engines of these reports have confirmed `version`: prompts go to them. One that was to get the update and
        is not among them is lost."""
        self._num_updates += 1
        self._serving, self._is_discarded = version, False
        if self._router is not None and self._router.is_up:
            self._router.losses.end()
        confirmed = {report.engine for report in reports}
        updated = [engine for engine in self._engines if engine.address in self._updated]
        for engine in updated:
            if engine.name in confirmed and engine.state is not EngineState.DRAINING:
                self._readmit(engine, version)
        for engine in updated:
            if engine.name not in confirmed:
                self._lose(engine, EngineLostError(f"{engine.name} was lost in the update to version {version}."))

    def take_metrics(self) -> dict[str, float]:
        """Return what was lost and came back since the last call. A run that had one engine only ends with it."""
        told: dict[str, float] = {}
        if self._num_ever > 1:
            told["engines/serving"] = self.num_serving
            told["engines/lost"] = self._num_lost
            told["engines/readmitted"] = self._num_readmitted
        if self._num_readmitted:
            told["engines/away_time"] = self._longest_away_s
        if self._num_router_lost:
            told["engines/router_lost"] = self._num_router_lost
        self._num_lost = self._num_readmitted = self._num_router_lost = 0
        self._longest_away_s = 0.0
        return {name: float(value) for name, value in told.items()}

    @property
    def is_updating(self) -> bool:
        """Whether an update is on its way to the engines: it needs those that it began with."""
        return self._num_updates % 2 == 1

    def find(self, name: str) -> ManagedEngine:
        """Return the engine of this name. ConfigError when there is none."""
        engine = self._named(name)
        if engine is None:
            known = ", ".join(each.name for each in self._engines)
            raise ConfigError(f"{name!r}: this run has no such engine. Expected one of {known}.")
        return engine

    def add(self, place: Options) -> ManagedEngine:
        """Start one more engine there. The next update brings it the weights; prompts go to it when it has confirmed
        them. ConfigError before the first version is served."""
        if self._serving is None:
            raise ConfigError("no engine serves a version yet, so one more could not get it. Ask again in a while.")
        engine = ManagedEngine(self._num_ever, place=place, is_new=True)
        self._num_ever += 1
        self._engines.append(engine)
        self._start(engine)
        self._emit(EventKind.ENGINE_ADDED, engine=engine.name)
        return engine

    def drain(self, name: str) -> ManagedEngine:
        """Let the router send nothing more to this engine. Until `release` it gets updates, for the requests that it
        has. ConfigError when there is none of this name, it is drained already, or no other serves."""
        engine = self.find(name)
        if engine.state is EngineState.DRAINING:
            raise ConfigError(f"{name} is being drained already. Wait for it (`vime engines RUN`).")
        if not self._others(engine):
            raise ConfigError(
                f"{name} cannot be drained: no other engine serves, and the run could not go on. Expected at least one "
                "that does. Add one first (`vime engines RUN add`), or wait until another serves."
            )
        was_routed, address = engine.is_routed, engine.address
        engine.state, engine.is_routed = EngineState.DRAINING, False
        self._emit(EventKind.ENGINE_DRAINING, engine=name)
        self._tell(f"{name} gets no new requests: it is to be stopped.")
        if address is not None:
            self._leave_out(address, is_routed=was_routed)
        return engine

    def release(self, engine: ManagedEngine, reason: str) -> Actor[EngineActor] | None:
        """Have this engine no more: nothing asks it, nothing starts it again. Returns its actor, for the caller to
        stop."""
        actor, engine.actor, engine.gone = engine.actor, None, reason
        engine.losses.end()
        self._engines.remove(engine)
        self._checks.pop(engine.name, None)
        self._emit(EventKind.ENGINE_STOPPED, engine=engine.name, reason=reason)
        return actor

    def _others(self, engine: ManagedEngine) -> list[ManagedEngine]:
        """Return the other engines that serve."""
        return [each for each in self._engines if each is not engine and each.state is EngineState.SERVING]

    def stop(self, grace_s: float = STOP_S) -> None:
        """Stop the router first, then the engines; an actor that is gone took its child with it. `grace_s` 0, after a
        failed start: actors that are not up yet are not waited for, but all running servers together get a moment, so
        that none outlives the run."""
        self._is_stopped = True
        self._close_fleet()
        for engine in self._engines:
            engine.losses.end()
        if self._router is not None:
            self._router.losses.end()
        routers: list[Actor[ServerActor]] = [self._router.actor] if self._router and self._router.actor else []
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
        if self.changes is not None:
            self.changes.close()

    def _close_fleet(self) -> None:
        if self._fleet is not None:
            self._fleet.close()

    def _watched(self) -> dict[str, Actor[ServerActor]]:
        """Return the actors that can be asked how they are: of the engines that respond, and of the started router."""
        found: dict[str, Actor[ServerActor]] = {
            engine.name: engine.actor for engine in self._engines if engine.actor and engine.address
        }
        router = self._router
        return {**found, "router": router.actor} if router and router.actor and router.is_up else found

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
            deadline_s = self._health_s if self._named(name) else section.engine_health_timeout_secs
            if check is None or (check.is_over and now - check.asked >= section.engine_health_interval_secs):
                ref = actor.ask(ServerActor.check, deadline_s, is_updating)
                self._checks[name] = _Check(ref, now, self._num_updates)
            elif not check.is_over and now - check.asked > deadline_s + GRACE_S:
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
        """Lose the engine or the router, or raise what ends the run."""
        if not may_pass(error):
            raise error
        engine = self._named(name)
        if engine is None:
            self._lose_router(error)
        else:
            self._lose(engine, error)

    def _lose(self, engine: ManagedEngine, error: VimeError) -> None:
        """Take an engine out and have it started again; raise `error` when no other serves, or after too many starts.

        Its processes are ended before anything else: one that hangs would keep its requests until their deadline.
        """
        if engine.is_new or engine.state is EngineState.DRAINING:
            self._give_up(engine, error)
            return
        others = self._others(engine)
        is_too_often = engine.losses.count >= self._config.cluster.max_restarts
        if not others or (is_too_often and engine.external is None):  # an owner may take as long as he likes
            raise error
        if engine.actor is not None:
            engine.actor.kill()
        was_routed, address = engine.is_routed, engine.address
        start_in_s = engine.lose()
        self._checks.pop(engine.name, None)
        self._num_lost += 1
        self._emit(EventKind.ENGINE_LOST, engine=engine.name, error=str(error), start_in_s=start_in_s)
        back = "started again" if engine.external is None else "waited for: its owner starts it"
        self._tell(f"{engine.name} is lost and is {back}; {len(others)} of {len(self)} serve. {error}")
        if address is not None:
            self._leave_out(address, is_routed=was_routed)

    def _give_up(self, engine: ManagedEngine, error: VimeError) -> None:
        """Have an engine no more that is lost, and that the run can do without: one that was to be stopped anyway, or
        that was added and has never served."""
        was_routed, address = engine.is_routed, engine.address
        actor = self.release(engine, f"lost: {error}")
        if actor is not None:
            actor.kill()
        if address is not None:
            self._leave_out(address, is_routed=was_routed)

    def _leave_out(self, address: EngineAddress, *, is_routed: bool) -> None:
        """Let the router no longer send to a lost engine, also one that starts and waits for it."""
        router = self._started_router
        if is_routed:
            try:
                self._ask_router(RouterActor.leave_out, address)
            except VimeError as error:
                self._judge("router", error)
        elif address in router.engines and router.starting is not None:
            router.end()
            router.begin(self._to_ask(), self._deadline_s)

    def _lose_router(self, error: VimeError) -> None:
        """Have the router started again at its address: requests are sent again until it responds. Raises `error` after
        too many starts."""
        router = self._started_router
        if router.losses.count >= self._config.cluster.max_restarts:
            raise error
        start_in_s = router.lose()
        for engine in self._engines:
            engine.is_routed = False
        self._checks.pop("router", None)
        self._num_router_lost += 1
        self._emit(EventKind.ROUTER_LOST, error=str(error), start_in_s=start_in_s)
        self._tell(f"the router is lost and is started again. {error}")

    @property
    def _started_router(self) -> ManagedRouter:
        assert self._router is not None, "nothing is lost before its first start"
        return self._router

    def _start(self, engine: ManagedEngine) -> None:
        ranks = shared_ranks(self._config, engine.index) if self._rank_gpus else ()
        shared = [gpu for rank in ranks for gpu in self._rank_gpus[rank]]
        actor = start_engine(self._config, engine, self._run_dir, self._keys, shared)
        engine.begin(actor, actor.ask(EngineActor.start, self._deadline_s))

    def _go_on_starting(self) -> None:
        """Start what was lost and whose time has come, and look whether what starts is ready."""
        router = self._router
        if router is not None and router.starting is not None and router.losses.count:
            self._look_at_router(router)
        elif router is not None and router.losses.first_at is not None and time.monotonic() >= router.losses.start_at:
            router.begin(self._to_ask(), self._deadline_s)
        for engine in [*self._engines]:  # one that was added and does not start is taken out
            may_start = not self._asleep and time.monotonic() >= engine.losses.start_at
            if engine.state is EngineState.LOST and may_start:
                self._start(engine)
                self._emit(EventKind.ENGINE_STARTING, engine=engine.name)
            elif engine.state is EngineState.STARTING:
                self._look_at_start(engine)

    def _look_at_start(self, engine: ManagedEngine) -> None:
        assert engine.starting is not None, "it starts"
        address = self._started(engine.name, engine.starting, engine.began)
        if address is None:
            return
        engine.respond(address)
        if engine.losses.first_at is not None:
            self._emit(EventKind.ENGINE_READY, engine=engine.name)

    def _look_at_router(self, router: ManagedRouter) -> None:
        assert router.starting is not None, "it starts"
        listens = self._started("router", router.starting, router.began)
        if listens is None:
            return
        router.respond(*listens)
        away_s = router.losses.back()
        self._emit(EventKind.ROUTER_READY, lost_s=away_s)
        self._tell(f"the router responds again, {away_s:.0f} s after its loss.")
        for engine in self._engines:
            if engine.state is EngineState.SERVING and engine.address is not None:
                engine.is_routed = engine.address in router.engines
                self._take_in(engine)

    def _started(self, name: str, starting: ObjectRef[Started], began: float) -> Started | None:
        """Return what an actor says when its server is ready; None when it is not yet, or was lost."""
        what, asked_s = f"{name} to start", time.monotonic() - began
        done, _ = ray.wait([starting], timeout=0)
        if not done and asked_s <= self._deadline_s + GRACE_S:
            return None
        try:
            if not done:
                raise WaitTimeoutError(what, asked_s, "its actor", "See RUN_DIR/logs.")
            found: list[Started] = wait_for(done, name=what, owner="vLLM", deadline_s=10, parties=[name])
        except VimeError as error:
            self._judge(name, error)
            return None
        return found[0]

    def _readmit(self, engine: ManagedEngine, version: Version) -> None:
        """Let the router send to it, if it does not yet."""
        if not self._take_in(engine):
            return
        away_s = engine.serve()
        if away_s is not None:
            self._num_readmitted += 1
            self._longest_away_s = max(self._longest_away_s, away_s)
            self._emit(EventKind.ENGINE_READMITTED, engine=engine.name, version=version, lost_s=away_s)
            self._tell(f"{engine.name} serves again, {away_s:.0f} s after its loss.")

    def _take_in(self, engine: ManagedEngine) -> bool:
        """Tell the router of an engine that may serve. While the router is away, it will be told when it is back.
        Returns whether the engine is well."""
        assert engine.address is not None, "it responded"
        if engine.is_routed or not self._started_router.is_up:
            return True
        try:
            self._ask_router(RouterActor.take_in, engine.address)
        except RouterLostError as error:
            self._judge("router", error)
        except VimeError as error:
            self._judge(engine.name, error)
            return False
        else:
            engine.is_routed = True
        return True

    def _ask_router(self, method: Callable[[RouterActor, str], None], address: EngineAddress) -> None:
        actor = self._started_router.actor
        assert actor is not None, "it is up"
        try:
            wait_for(
                [actor.ask(method, address.url)],
                name=f"the router to change how it treats {address.name}",
                owner="vllm-router",
                deadline_s=CHANGE_S + GRACE_S,
                parties=["router"],
            )
        except (ClusterError, WaitTimeoutError) as error:  # its actor is gone or hangs
            raise RouterLostError(str(error)) from error

    def _emit(self, kind: EventKind, **facts: str | float | None) -> None:
        if self._events is not None:
            self._events.emit(kind, ago_s=0.0, **facts)
