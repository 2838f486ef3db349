"""Engines and routers that are lost at the same moment, and parts that are lost again and again."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from vime.backends.vllm_utils.router import RouterLostError
from vime.config.parse import parse
from vime.ray import engines as engines_module
from vime.ray import managed_router
from vime.ray.engines import Engines, _Check
from vime.ray.losses import LONGEST_BACKOFF_S, Losses
from vime.ray.managed_engine import EngineState, ManagedEngine
from vime.ray.managed_router import ManagedRouter, Routers
from vime.types import EngineAddress, EngineLostError


class Server:
    """An actor of an engine or a router; what it is asked is the reference of the answer."""

    def __init__(self, name: str) -> None:
        self.name = name

    def ask(self, method: Any, *_: object) -> str:
        return f"{self.name}.{method.__name__}"

    def kill(self) -> None: ...


def fleet(monkeypatch: pytest.MonkeyPatch, answers: dict[str, str | Exception]) -> Engines:
    """Two engines behind one router, each asked how it is."""

    def wait_for(refs: Sequence[str], **_: object) -> list[str]:
        answer = answers[refs[0].partition(".")[0]]
        if isinstance(answer, Exception):
            raise answer
        return [answer]

    monkeypatch.setattr(engines_module, "wait_for", wait_for)
    monkeypatch.setattr(managed_router, "wait_for", wait_for)
    monkeypatch.setattr(engines_module, "ray", SimpleNamespace(wait=lambda refs, **_: (refs, [])))
    found: Any = object.__new__(Engines)
    found._config = parse([])
    found._events, found._tell, found.changes, found._end = None, lambda line: None, None, None
    found._num_updates, found._num_lost, found._health_s, found._serving, found._asleep = 2, 0, 60.0, 0, ()
    found._is_stopped = False
    found._engines = [ManagedEngine(number) for number in range(2)]
    for engine in found._engines:
        engine.actor, engine.state = Server(engine.name), EngineState.SERVING
        engine.address = EngineAddress(name=engine.name, url=f"http://h:{engine.index}")
    routers: Any = object.__new__(Routers)
    routers._config, routers._serving, routers._judge = found._config, found._to_ask, found._judge
    routers._emit, routers._tell, routers._num_lost, routers._deadline_s = (
        lambda *_, **__: None,
        found._tell,
        0,
        10.0,
    )
    router: Any = ManagedRouter("router", Server)
    router.is_up, router.port, router.engines = True, 1, [engine.address for engine in found._engines]
    routers.each, found._routers = [router], routers
    found._checks = {name: _Check(f"{name}.check", time.monotonic(), 2) for name in ("engine-0", "engine-1", "router")}
    return found


def test_an_engine_and_the_router_that_are_killed_at_once_are_both_lost_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To leave the engine out the router is called, and found dead: what it said of itself is not read any more."""
    dead = {"engine-0": EngineLostError("engine-0 is gone"), "router": RouterLostError("the router is gone")}
    found = fleet(monkeypatch, {**dead, "engine-1": "0"})
    found._check_all()
    assert [engine.state is EngineState.SERVING for engine in found._engines] == [False, True]
    assert not found._routers.each[0].is_up
    assert (found._num_lost, found._routers._num_lost) == (1, 1)
    for part in (found._engines[0], found._routers.each[0]):
        part.losses.end()


def test_a_part_may_be_lost_for_days() -> None:
    losses = Losses("router")
    waits = [losses.add() for _ in range(2000)]
    assert waits[:3] == [0.0, 2.0, 4.0]
    assert set(waits[10:]) == {LONGEST_BACKOFF_S}
    losses.end()
