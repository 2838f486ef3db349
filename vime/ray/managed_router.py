"""The routers of a run: so many addresses in front of all engines that serve, whichever process plays each at the
time."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from ray import ObjectRef
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from vime.backends.vllm_utils.router import CHANGE_S, RouterLostError
from vime.config.parse import Config
from vime.observability.events import EventKind
from vime.ray.actor import Actor, Options, start_actor
from vime.ray.engine_actors import RouterActor
from vime.ray.losses import Losses
from vime.ray.waits import START_GRACE_S, ready, wait_for
from vime.types import ClusterError, EngineAddress, VimeError, WaitTimeoutError

MAX_CALLS = 4  # at a time in an actor


class Emit(Protocol):
    """Write an event of the driver."""

    def __call__(self, kind: EventKind, **facts: str | float | None) -> None: ...


class ManagedRouter:
    """One router. Owned by `Routers`."""

    def __init__(self, name: str, start: Callable[[str], Actor[RouterActor]]) -> None:
        self.name, self._start_actor = name, start
        self.losses = Losses(name)
        self.actor: Actor[RouterActor] | None = start(name)
        self.port: int | None = None
        self.starting: ObjectRef[tuple[str, int]] | None = None  # until it responds
        self.began = 0.0
        self.engines: list[EngineAddress] = []  # to which it sends, or will when it is ready
        self.is_up = False

    def begin(self, engines: Sequence[EngineAddress], deadline_s: float) -> ObjectRef[tuple[str, int]]:
        """Start it in front of `engines`. It is not ready before each of them responds."""
        self.actor = self.actor or self._start_actor(self.name)
        self.engines, self.began = list(engines), time.monotonic()
        self.starting = self.actor.ask(RouterActor.start, self.engines, deadline_s, self.port)
        return self.starting

    def respond(self, port: int) -> None:
        """Note where it listens, now and after every loss."""
        self.starting, self.is_up, self.port = None, True, port

    def lose(self) -> float:
        """End what is left of it. Returns the seconds until it is to be started again."""
        self.end()
        return self.losses.add()

    def end(self) -> None:
        """End its processes, at once."""
        if self.actor is not None:
            self.actor.kill()
        self.actor = self.starting = None
        self.is_up, self.engines = False, []

    def change(self, method: Callable[[RouterActor, str], None], address: EngineAddress) -> ObjectRef[None]:
        """Ask it to treat an engine otherwise."""
        assert self.actor is not None, "it is up"
        return self.actor.ask(method, address.url)

    @property
    def is_due(self) -> bool:
        """Whether it was lost and is to be started now."""
        is_lost = self.losses.first_at is not None and self.starting is None
        return is_lost and time.monotonic() >= self.losses.start_at


class Routers:
    """All routers of a run, on the node `node_id` beside those who talk to them. Owned by the driver's `Engines`.

    Each is started again alone at its address: up to --max-restarts times in a row without a version in between, and as
    often as it takes while another one is up. `serving` returns the engines that they are to send to; `judge` hears of
    an engine or a router, by its name, that is not well.
    """

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        node_id: str,
        *,
        serving: Callable[[], Sequence[EngineAddress]],
        judge: Callable[[str, VimeError], None],
        emit: Emit,
        tell: Callable[[str], None],
    ) -> None:
        self._config, self._serving, self._judge, self._emit, self._tell = config, serving, judge, emit, tell
        beside = NodeAffinitySchedulingStrategy(node_id, soft=False)
        options: Options = {"num_cpus": 0, "max_concurrency": MAX_CALLS, "scheduling_strategy": beside}

        def start(name: str) -> Actor[RouterActor]:
            return start_actor(RouterActor, options, config, str(run_dir), name)

        self.each = [ManagedRouter(name, start) for name in router_names(config.engine.vllm_router_count)]
        self._deadline_s = 0.0  # of a start
        self._num_lost = 0  # since `take_lost`

    def wait_ready(
        self, engines: Sequence[EngineAddress], deadline_s: float, on_poll: Callable[[], None] | None = None
    ) -> Config:
        """Start all in front of `engines`. Returns the configuration with the address of the first, whose port those of
        the others follow."""
        self._deadline_s = deadline_s
        if len(self.each) > 1:
            self._choose_ports(on_poll)
        listen = wait_for(
            [router.begin(engines, deadline_s) for router in self.each],
            name="router to start",
            owner="vllm-router",
            deadline_s=deadline_s + START_GRACE_S,
            on_poll=on_poll,
            parties=[router.name for router in self.each],
        )
        for router, (_, port) in zip(self.each, listen, strict=True):
            router.respond(port)
        (host, first), *_ = listen
        section = dataclasses.replace(self._config.engine, vllm_router_ip=host, vllm_router_port=first)
        return dataclasses.replace(self._config, engine=section)

    def _choose_ports(self, on_poll: Callable[[], None] | None) -> None:
        first, chooser = self._config.engine.vllm_router_port, self.each[0]
        if first is None:
            assert chooser.actor is not None, "it was started with this object"
            [first] = wait_for(
                [chooser.actor.ask(RouterActor.free_ports, len(self.each))],
                name="ports for the routers",
                owner="vllm-router",
                deadline_s=self._deadline_s,
                on_poll=on_poll,
                parties=[chooser.name],
            )
        for number, router in enumerate(self.each):
            router.port = first + number

    def up(self) -> dict[str, Actor[RouterActor]]:
        """Return the actors of the routers that can be asked how they are."""
        return {router.name: router.actor for router in self.each if router.actor is not None and router.is_up}

    def serve(self) -> None:
        """A version is served: those that are up are well."""
        for router in self.each:
            if router.is_up:
                router.losses.end()

    def take_lost(self) -> int:
        """Return how often one was lost since the last call."""
        lost, self._num_lost = self._num_lost, 0
        return lost

    def take_in(self, address: EngineAddress) -> bool:
        """Let every router send to this engine. One that is away will be told when it is back. Returns whether the
        engine is well."""
        return self._take_in([router for router in self.each if router.is_up], address)

    def _take_in(self, routers: Sequence[ManagedRouter], address: EngineAddress) -> bool:
        told = [router for router in routers if address not in router.engines]
        asked = [router.change(RouterActor.take_in, address) for router in told]
        refusal: VimeError | None = None
        for router, ref in zip(told, asked, strict=True):
            try:
                self._wait_changed(router, ref, address)
            except RouterLostError as error:
                self._judge(router.name, error)
            except VimeError as error:
                refusal = error
            else:
                router.engines.append(address)
        if refusal is not None:
            self._judge(address.name, refusal)
        return refusal is None

    def leave_out(self, address: EngineAddress) -> None:
        """Let no router send to this engine any more, also none that starts and waits for it: that one starts anew, in
        front of those that serve."""
        told = [router for router in self.each if router.is_up and address in router.engines]
        asked = [router.change(RouterActor.leave_out, address) for router in told]
        for router in self.each:
            if router.starting is not None and address in router.engines:
                router.end()
                router.begin(self._serving(), self._deadline_s)
        for router, ref in zip(told, asked, strict=True):
            try:
                router.engines.remove(address)
                self._wait_changed(router, ref, address)
            except VimeError as error:
                self._judge(router.name, error)

    def _wait_changed(self, router: ManagedRouter, ref: ObjectRef[None], address: EngineAddress) -> None:
        try:
            wait_for(
                [ref],
                name=f"the router to change how it treats {address.name}",
                owner="vllm-router",
                deadline_s=CHANGE_S + START_GRACE_S,
                parties=[router.name],
            )
        except (ClusterError, WaitTimeoutError) as error:  # its actor is gone or hangs
            raise RouterLostError(str(error)) from error

    def lose(self, name: str, error: VimeError) -> None:
        """Have a router started again at its address: until it responds, requests go to the others, or are sent again
        where there is none. Raises `error` after too many starts."""
        router = next(each for each in self.each if each.name == name)
        allowed = self._config.cluster.max_restarts
        others = [each for each in self.each if each is not router]
        if router.losses.count >= allowed and not any(each.is_up or each.losses.count <= allowed for each in others):
            raise error
        start_in_s = router.lose()
        self._num_lost += 1
        self._emit(EventKind.ROUTER_LOST, router=name, error=str(error), start_in_s=start_in_s)
        left = f"; {len(self.up())} of {len(self.each)} are up" if others else ""
        self._tell(f"{self._called(router)} is lost and is started again{left}. {error}")

    def go_on(self) -> None:
        """Start what was lost and whose time has come, and look whether what starts is ready."""
        for router in self.each:
            if router.starting is not None and router.losses.count:
                self._look_at(router)
            elif router.is_due:
                router.begin(self._serving(), self._deadline_s)

    def _look_at(self, router: ManagedRouter) -> None:
        assert router.starting is not None, "it starts"
        try:
            listens = ready(router.starting, router.name, began=router.began, deadline_s=self._deadline_s)
        except VimeError as error:
            self._judge(router.name, error)
            return
        if listens is None:
            return
        router.respond(listens[1])
        away_s = router.losses.back()
        self._emit(EventKind.ROUTER_READY, router=router.name, lost_s=away_s)
        self._tell(f"{self._called(router)} responds again, {away_s:.0f} s after its loss.")
        for address in self._serving():
            if router.is_up:
                self._take_in([router], address)

    def _called(self, router: ManagedRouter) -> str:
        return router.name if len(self.each) > 1 else "the router"


def router_names(count: int) -> list[str]:
    """Return how a run's routers are called in events, logs and waits."""
    return [f"router-{number}" for number in range(count)] if count > 1 else ["router"]
