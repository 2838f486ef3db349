"""The driver's handle on all engines and routers: what starts, what serves, what is lost and starts again."""

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
from vime.backends.vllm_utils.launch import awaiting_update
from vime.config.colocation import shared_ranks
from vime.config.deadlines import health_deadline_s, start_deadline_s, update_deadline_s
from vime.config.parse import Config
from vime.observability.events import EventKind, EventLog
from vime.ray.actor import Actor
from vime.ray.engine_actors import EngineActor, ServerActor
from vime.ray.managed_engine import Changes, EngineState, ManagedEngine, find_nodes, start_engine
from vime.ray.managed_router import Routers
from vime.ray.placement import ANYWHERE, EnginePlace, Places
from vime.ray.waits import START_GRACE_S, ready, wait_for
from vime.types import (
    ConfigError,
    EngineAddress,
    EngineLostError,
    EngineReport,
    PublishLostError,
    Version,
    VimeError,
    WaitTimeoutError,
    may_pass,
)
from vime.utils.waits import waiting

logger = logging.getLogger(__name__)

STOP_S, AT_START_STOP_S = 30.0, 3.0
ASKED_TIMEOUT_S = 60.0  # a busy engine is asked while it generates
GRACE_S = 30.0  # beyond a health check's own deadline, for an actor to say what it found
POLL_S = 0.25
NODES_S = 2.0  # between two looks whether there is a node for an engine that starts again

T = TypeVar("T")


@dataclass(slots=True)
class _Check:
    """A question to one engine or router how it is."""

    ref: ObjectRef[str | None]
    asked: float
    num_updates: int  # begun or ended before it
    is_over: bool = False


class Engines:
    """The driver's handle: start all, watch all, start again what is lost, stop all. Makes the engines' keys.

    An engine that is lost while another serves is started again, up to --max-restarts times in a row without a version
    that it confirmed; the update that brings it one readmits it (decision 0039). Routers are started again too
    (managed_router.py). `tell` shows a message to the user.

    `rank_gpus`: with --colocate, the GPUs that Ray gave to each rank of the policy. Engines sleep between `sleep` and
    `wake_up` of both parts of their memory; a lost one is started again only while all are awake, when the trainers
    hold no device memory.

    `awaits_update`: the run's trainers bring each engine its weights before its first prompt.
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
        awaits_update: bool = False,
    ) -> None:
        self._engine_config = awaiting_update(config) if awaits_update else config
        self._config, self._run_dir, self._keys = config, run_dir, run_keys(config)
        self._events, self._tell, self._rank_gpus = events, tell, rank_gpus
        self._asleep: tuple[str, ...] = ()  # parts of the engines' memory, in the order in which they wake up
        self._is_discarded = False  # no engine has weights until an update brings them
        self._is_stopped = False
        self._deadline_s, self._health_s = start_deadline_s(config), health_deadline_s(config)
        self._routers: Routers | None = None
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
        """Wait for engines and routers, which start on the node `node_id`. Returns the configuration with the first
        router's address filled in."""
        self._routers = Routers(
            self._config,
            self._run_dir,
            node_id,
            serving=self._to_ask,
            judge=self._judge,
            emit=self._emit,
            tell=self._tell,
        )
        addresses = wait_for(
            [engine.starting for engine in self._engines if engine.starting is not None],
            name="engines to start",
            owner="vLLM",
            deadline_s=self._deadline_s + START_GRACE_S,
            on_poll=on_poll,
            parties=[engine.name for engine in self._engines],
        )
        for engine, address in zip(self._engines, addresses, strict=True):
            engine.respond(address)

        def poll() -> None:
            """A router waits for every engine, also for one that has ended."""
            if on_poll is not None:
                on_poll()
            self._check_all()

        return self._routers.wait_ready(addresses, self._deadline_s, poll)

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

    def _on_all(self, call: Callable[[FleetControl], object], why: str, timeout_s: float | None = None) -> None:
        """Make a call of every engine that responds; one that is lost in it is left out, as in an update. `timeout_s`
        None: the deadline of one."""
        asked = [engine for engine in self._engines if engine.address is not None]
        deadline_s = timeout_s or update_deadline_s(self._config)
        fleet = FleetControl(
            [engine.address for engine in asked if engine.address is not None],
            timeout_s=deadline_s,
            lose_after_s=deadline_s if len(asked) > 1 else None,
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

    def update(self, send: Callable[[list[EngineAddress]], T]) -> T:
        """Return what `send` returns, which brings an update to the engines it is given. `served` ends it.

        Over `gloo` an engine that is lost in an update fails it for all. Those that are left then get the same version
        again, over a group of their own; each try has fewer engines than the one before. Not an adapter: an engine that
        has it already would refuse it.
        """
        engines = self.begin_update()
        is_sent_again = self._config.weights.update_weight_transport == "gloo" and not self._config.lora.trains_adapter
        while True:
            try:
                return send(engines)
            except PublishLostError as error:
                before = engines
                if not is_sent_again or len(before) < 2:
                    raise
                self._on_all(lambda fleet: fleet.is_paused(), f"was lost in an update: {error}", self._health_s)
                engines = self._updated = self.addresses
                if not any(address not in engines for address in before):
                    raise
                self._tell(f"The weight update is sent again to the {len(engines)} engines that are left.")

    def new(self, reports: Sequence[EngineReport]) -> list[EngineAddress]:
        """Return the engines of these reports that no prompt went to yet since their start: until `served`."""
        confirmed = {report.engine for report in reports}
        return [
            each.address
            for each in self._engines
            if each.address is not None and each.name in confirmed and each.state is EngineState.READY
        ]

    def served(self, version: Version, reports: Sequence[EngineReport]) -> None:
        """The engines of these reports have confirmed `version`: prompts go to them. One that was to get the update and
        is not among them is lost."""
        self._num_updates += 1
        self._serving, self._is_discarded = version, False
        self._started_routers.serve()
        confirmed = {report.engine for report in reports}
        asked = set(self._updated)
        updated = [engine for engine in self._engines if engine.address in asked]
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
        if self._routers is not None and (num_routers_lost := self._routers.take_lost()):
            told["engines/router_lost"] = num_routers_lost
        self._num_lost = self._num_readmitted = 0
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

    def add(self, place: EnginePlace) -> ManagedEngine:
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
        """Let the routers send nothing more to this engine. Until `release` it gets updates, for the requests that it
        has. ConfigError when there is none of this name, it is drained already, or no other serves."""
        engine = self.find(name)
        if engine.state is EngineState.DRAINING:
            raise ConfigError(f"{name} is being drained already. Wait for it (`vime engines RUN`).")
        if not self._others(engine):
            raise ConfigError(
                f"{name} cannot be drained: no other engine serves, and the run could not go on. Expected at least one "
                "that does. Add one first (`vime engines RUN add`), or wait until another serves."
            )
        engine.state = EngineState.DRAINING
        self._emit(EventKind.ENGINE_DRAINING, engine=name)
        self._tell(f"{name} gets no new requests: it is to be stopped.")
        if engine.address is not None:
            self._started_routers.leave_out(engine.address)
        return engine

    def release(self, engine: ManagedEngine, reason: str) -> Actor[EngineActor] | None:
        """Have this engine no more: nothing asks it, nothing starts it again. Returns its actor, for the caller to
        stop."""
        actor, engine.actor, engine.gone = engine.actor, None, reason
        engine.losses.end()
        engine.end_search()
        self._engines.remove(engine)
        self._checks.pop(engine.name, None)
        self._emit(EventKind.ENGINE_STOPPED, engine=engine.name, reason=reason)
        return actor

    def _others(self, engine: ManagedEngine) -> list[ManagedEngine]:
        """Return the other engines that serve."""
        return [each for each in self._engines if each is not engine and each.state is EngineState.SERVING]

    def stop(self, grace_s: float = STOP_S) -> None:
        """Stop the routers first, then the engines; an actor that is gone took its child with it. `grace_s` 0, after a
        failed start: actors that are not up yet are not waited for, but all running servers together get a moment, so
        that none outlives the run."""
        self._is_stopped = True
        self._close_fleet()
        for engine in self._engines:
            engine.losses.end()
        all_routers = self._routers.each if self._routers is not None else []
        for router in all_routers:
            router.losses.end()
        routers: list[Actor[ServerActor]] = [router.actor for router in all_routers if router.actor is not None]
        engines: list[Actor[ServerActor]] = [engine.actor for engine in self._engines if engine.actor is not None]
        for engine in self._engines:
            if engine.actor is not None and not engine.losses.has_node:  # it would not answer
                engine.actor.kill()
                engines.remove(engine.actor)
        for actors in (routers, engines) if grace_s else ([*routers, *engines],):
            if not actors:
                continue
            refs = [actor.ask(ServerActor.stop) for actor in actors]
            deadline_s = grace_s or AT_START_STOP_S
            with waiting("servers to stop", "router", "engine", deadline_s=deadline_s):
                ray.wait(refs, num_returns=len(refs), timeout=deadline_s)
        for actor in [*routers, *engines]:
            actor.kill()
        for engine in self._engines:
            engine.leave_nodes()
        if self.changes is not None:
            self.changes.close()

    def _close_fleet(self) -> None:
        if self._fleet is not None:
            self._fleet.close()

    def _watched(self) -> dict[str, Actor[ServerActor]]:
        """Return the actors that can be asked how they are: of the engines that respond, and of the routers."""
        found: dict[str, Actor[ServerActor]] = {
            engine.name: engine.actor for engine in self._engines if engine.actor and engine.address
        }
        return found if self._routers is None else {**found, **self._routers.up()}

    def _check_all(self, *, is_updating: bool = False) -> None:
        """Read what has arrived of the questions before, and ask those who have responded again when it is time."""
        section, now = self._config.engine, time.monotonic()
        open_checks = {check.ref: name for name, check in self._checks.items() if not check.is_over}
        if open_checks:
            done, _ = ray.wait(list(open_checks), num_returns=len(open_checks), timeout=0)
            for ref in done:
                name = open_checks[ref]
                if name in self._checks and self._checks[name].ref == ref:  # else it was lost while another was read
                    self._read(name, is_updating=is_updating)
        engines = {engine.name for engine in self._engines}
        for name, actor in self._watched().items():  # without those that were lost a moment ago
            check = self._checks.get(name)
            deadline_s = self._health_s if name in engines else section.engine_health_timeout_secs
            if check is None or (check.is_over and now - check.asked >= section.engine_health_interval_secs):
                ref = actor.ask(ServerActor.check, deadline_s, is_updating)
                self._checks[name] = _Check(ref, now, self._num_updates)
            elif not check.is_over and now - check.asked > deadline_s + GRACE_S:
                asked = f"{name} to say how it is"
                self._judge(name, WaitTimeoutError(asked, now - check.asked, "its actor", "See RUN_DIR/logs."))

    def _read(self, name: str, *, is_updating: bool) -> None:
        """Take what an engine or a router said of itself."""
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
        """Return the engine of this name; None: it is a router."""
        return next((engine for engine in self._engines if engine.name == name), None)

    def _judge(self, name: str, error: VimeError) -> None:
        """Lose the engine or router, or raise what ends the run."""
        if not may_pass(error):
            raise error
        engine = self._named(name)
        if engine is None:
            self._started_routers.lose(name, error)
            self._checks.pop(name, None)
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
        address = engine.address
        start_in_s = engine.lose()
        self._checks.pop(engine.name, None)
        self._num_lost += 1
        self._emit(EventKind.ENGINE_LOST, engine=engine.name, error=str(error), start_in_s=start_in_s)
        back = "started again" if engine.external is None else "waited for: its owner starts it"
        self._tell(f"{engine.name} is lost and is {back}; {len(others)} of {len(self)} serve. {error}")
        if address is not None:
            self._started_routers.leave_out(address)

    def _give_up(self, engine: ManagedEngine, error: VimeError) -> None:
        """Have an engine no more that is lost, and that the run can do without: one that was to be stopped anyway, or
        that was added and has never served."""
        address = engine.address
        actor = self.release(engine, f"lost: {error}")
        if actor is not None:
            actor.kill()
        if address is not None:
            self._started_routers.leave_out(address)

    @property
    def _started_routers(self) -> Routers:
        assert self._routers is not None, "nothing is lost before their first start"
        return self._routers

    def _start(self, engine: ManagedEngine) -> None:
        ranks = shared_ranks(self._config, engine.index) if self._rank_gpus else ()
        shared = [gpu for rank in ranks for gpu in self._rank_gpus[rank]]
        actor = start_engine(self._engine_config, engine, self._run_dir, self._keys, shared)
        engine.begin(actor, actor.ask(EngineActor.start, self._deadline_s))

    def _go_on_starting(self) -> None:
        """Start what was lost and whose time has come, and look whether what starts is ready."""
        if self._routers is not None:
            self._routers.go_on()
        for engine in [*self._engines]:  # one that was added and does not start is taken out
            may_start = not self._asleep and time.monotonic() >= engine.losses.start_at
            if engine.state is EngineState.LOST and may_start:
                self._start(engine)
                self._emit(EventKind.ENGINE_STARTING, engine=engine.name)
            elif engine.state is EngineState.STARTING and not self._waits_for_node(engine):
                self._look_at_start(engine)

    def _waits_for_node(self, engine: ManagedEngine) -> bool:
        """Return whether no node has room for an engine that starts again, whose time to start then begins later."""
        now, losses = time.monotonic(), engine.losses
        if losses.count and now - engine.looked >= NODES_S:
            engine.looked, had_node = now, losses.has_node
            losses.see(has_node=find_nodes(self._config, engine))
            if losses.has_node and engine.actor is None:  # it has left a node that has died
                self._start(engine)
            if had_node and not losses.has_node:
                self._emit(EventKind.ENGINE_WITHOUT_NODE, engine=engine.name)
                self._tell(f"No node of the cluster has room for {engine.name}: it starts when one has.")
            elif losses.has_node and not had_node:
                self._emit(EventKind.ENGINE_STARTING, engine=engine.name)
        if not losses.has_node:
            engine.began = now
        return not losses.has_node

    def _look_at_start(self, engine: ManagedEngine) -> None:
        assert engine.starting is not None, "it starts"
        try:
            address = ready(engine.starting, engine.name, began=engine.began, deadline_s=self._deadline_s)
        except VimeError as error:
            self._judge(engine.name, error)
            return
        if address is None:
            return
        engine.respond(address)
        if engine.losses.first_at is not None:
            self._emit(EventKind.ENGINE_READY, engine=engine.name)

    def _readmit(self, engine: ManagedEngine, version: Version) -> None:
        """Let the routers send to it, those that do not yet."""
        assert engine.address is not None, "it confirmed a version"
        if not self._started_routers.take_in(engine.address):
            return
        away_s = engine.serve()
        if away_s is not None:
            self._num_readmitted += 1
            self._longest_away_s = max(self._longest_away_s, away_s)
            self._emit(EventKind.ENGINE_READMITTED, engine=engine.name, version=version, lost_s=away_s)
            self._tell(f"{engine.name} serves again, {away_s:.0f} s after its loss.")

    def _emit(self, kind: EventKind, **facts: str | float | None) -> None:
        if self._events is not None:
            self._events.emit(kind, ago_s=0.0, **facts)
