"""Several routers as the driver keeps them, with actors that do nothing: who is lost, started again, told, given up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from vime.backends.vllm_utils.router import RouterLostError
from vime.config.parse import parse
from vime.ray import managed_router
from vime.ray.engine_actors import RouterActor
from vime.ray.managed_router import Routers
from vime.types import EngineAddress, EngineLostError, VimeError

FIRST, SECOND = (EngineAddress(name=f"engine-{number}", url=f"http://engine-{number}") for number in range(2))


class Cast:
    """The actors of the routers. What one is asked is written down, and answered by `answers` if it is there."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, tuple[object, ...]]] = []
        self.answers: dict[tuple[str, str], object] = {}
        self.killed: list[str] = []

    def start_actor(self, kind: type, options: object, *given: object) -> SimpleNamespace:
        assert kind is RouterActor
        name = str(given[-1])

        def ask(method: Callable[..., object], *arguments: object) -> object:
            self.asked.append((name, method.__name__, arguments))
            if method is RouterActor.start:
                return self.answers.get((name, "start"), ("127.0.0.1", arguments[2] or 8_000))
            return self.answers.get((name, method.__name__), 20_000 if method is RouterActor.free_ports else None)

        return SimpleNamespace(ask=ask, kill=lambda: self.killed.append(name))

    def wait_for(self, refs: list[object], **_: object) -> list[object]:
        for ref in refs:
            if isinstance(ref, VimeError):
                raise ref
        return refs

    def take(self, method: str) -> list[tuple[str, object]]:
        """Who was asked this since the last call, and with what first."""
        found = [(name, arguments[0]) for name, asked, arguments in self.asked if asked == method]
        self.asked = [each for each in self.asked if each[1] != method]
        return found


class Run:
    """Routers of a run with two engines that serve. `judge` does what the driver's does."""

    def __init__(self, cast: Cast, monkeypatch: pytest.MonkeyPatch, directory: Path, *flags: str) -> None:
        monkeypatch.setattr(managed_router, "start_actor", cast.start_actor)
        monkeypatch.setattr(managed_router, "wait_for", cast.wait_for)
        monkeypatch.setattr(managed_router, "ready", lambda starting, name, **_: cast.wait_for([starting])[0])
        monkeypatch.setattr(managed_router, "NodeAffinitySchedulingStrategy", lambda *_, **__: None)
        self.serving = [FIRST, SECOND]
        self.events: list[tuple[str, str]] = []
        self.told: list[str] = []
        self.lost_engines: list[str] = []
        self.routers = Routers(
            parse(["--device", "cpu", *flags]),
            directory,
            "node",
            serving=lambda: self.serving,
            judge=self.judge,
            emit=lambda kind, **facts: self.events.append((str(kind), str(facts["router"]))),
            tell=self.told.append,
        )
        self.connected = self.routers.wait_ready(self.serving, 60)

    def judge(self, name: str, error: VimeError) -> None:
        if name.startswith("engine"):
            self.lost_engines.append(name)
        else:
            self.routers.lose(name, error)

    def lose(self, name: str) -> None:
        self.routers.lose(name, RouterLostError(f"{name} ended"))

    def come_back(self) -> None:
        """What is lost starts, however long it would wait, and responds."""
        for router in self.routers.each:
            router.losses.start_at = 0.0
        self.routers.go_on()  # starts
        self.routers.go_on()  # responds


@pytest.fixture
def cast() -> Cast:
    return Cast()


@pytest.fixture
def start(cast: Cast, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def start(*flags: str) -> Run:
        runs.append(Run(cast, monkeypatch, tmp_path, *flags))
        return runs[-1]

    yield start
    for router in (router for run in runs for router in run.routers.each):
        router.losses.end()


def test_one_router_is_called_router_and_chooses_its_own_port(start, cast) -> None:
    run = start()
    assert cast.asked == [("router", "start", ([FIRST, SECOND], 60, None))]
    assert (run.connected.engine.vllm_router_ip, list(run.connected.engine.router_ports)) == ("127.0.0.1", [8_000])


def test_several_routers_have_ports_in_a_row_which_the_first_finds(start, cast) -> None:
    run = start("--vllm-router-count", "3")
    assert cast.take("free_ports") == [("router-0", 3)]
    assert [(name, arguments[2]) for name, _, arguments in cast.asked] == [
        *(("router-0", 20_000), ("router-1", 20_001), ("router-2", 20_002)),
    ]
    assert list(run.connected.engine.router_ports) == [20_000, 20_001, 20_002]


def test_a_given_port_is_the_first_of_them(start, cast) -> None:
    run = start("--vllm-router-count", "2", "--vllm-router-port", "9000")
    assert cast.take("free_ports") == []
    assert list(run.connected.engine.router_ports) == [9000, 9001]
    run.lose("router-1")
    run.come_back()
    assert [arguments[2] for name, _, arguments in cast.asked if name == "router-1"] == [9001, 9001]


def test_the_only_router_ends_the_run_after_max_restarts_losses_without_a_version_between(start) -> None:
    run = start("--max-restarts", "1")
    run.lose("router")
    run.come_back()
    with pytest.raises(RouterLostError, match="router ended"):
        run.lose("router")
    assert run.events == [("router_lost", "router"), ("router_ready", "router")]
    assert run.told[0].startswith("the router is lost and is started again. ")


def test_a_router_is_started_again_as_often_as_it_takes_while_another_is_up(start) -> None:
    run = start("--max-restarts", "1", "--vllm-router-count", "2")
    for _ in range(4):
        run.lose("router-1")
        run.come_back()
    assert run.events == [("router_lost", "router-1"), ("router_ready", "router-1")] * 4
    assert run.told[0].startswith("router-1 is lost and is started again; 1 of 2 are up. ")
    assert [router.losses.count for router in run.routers.each] == [0, 4]
    run.lose("router-1")
    run.lose("router-0")  # its first loss
    run.come_back()
    assert sorted(run.routers.up()) == ["router-0", "router-1"]
    run.routers.serve()
    assert [router.losses.count for router in run.routers.each] == [0, 0]
    assert run.routers.take_lost() == 6
    assert run.routers.take_lost() == 0


def test_the_last_router_is_started_again_while_another_one_may_still_come_back(start) -> None:
    run = start("--max-restarts", "1", "--vllm-router-count", "2")
    run.lose("router-1")
    run.come_back()
    run.lose("router-0")  # for the first time
    run.lose("router-1")  # once too often, but router-0 is on its way
    run.come_back()
    assert sorted(run.routers.up()) == ["router-0", "router-1"]


def test_a_router_that_was_lost_too_often_but_is_up_counts_as_up(start) -> None:
    run = start("--max-restarts", "1", "--vllm-router-count", "2")
    for name in ("router-0", "router-0", "router-1"):
        run.lose(name)
        run.come_back()
    run.lose("router-1")
    run.come_back()
    assert sorted(run.routers.up()) == ["router-0", "router-1"]


def test_routers_that_are_all_lost_too_often_end_the_run(start) -> None:
    run = start("--max-restarts", "1", "--vllm-router-count", "2")
    for name in ("router-0", "router-0", "router-1"):
        run.lose(name)
        run.come_back()
    run.lose("router-0")  # a third time: router-1 is up
    with pytest.raises(RouterLostError, match="router-1 ended"):
        run.lose("router-1")  # a second time, while router-0 had more than one loss in a row


def test_without_restarts_one_of_two_routers_is_still_started_again_and_the_last_one_is_not(start) -> None:
    run = start("--max-restarts", "0", "--vllm-router-count", "2")
    run.lose("router-0")
    with pytest.raises(RouterLostError, match="router-1 ended"):
        run.lose("router-1")


def test_each_router_is_told_of_an_engine_and_one_that_is_away_is_told_when_it_is_back(start, cast) -> None:
    run = start("--vllm-router-count", "2")
    run.routers.leave_out(SECOND)
    assert cast.take("leave_out") == [("router-0", SECOND.url), ("router-1", SECOND.url)]
    run.serving = [FIRST]
    run.lose("router-1")
    assert run.routers.take_in(SECOND)
    assert run.routers.take_in(SECOND)  # nobody twice
    assert cast.take("take_in") == [("router-0", SECOND.url)]
    cast.asked.clear()
    run.routers.each[1].losses.start_at = 0.0
    run.routers.go_on()  # it starts in front of those that serve now
    assert cast.take("start") == [("router-1", [FIRST])]
    run.serving = [FIRST, SECOND]
    run.routers.go_on()  # and responds
    assert cast.take("take_in") == [("router-1", SECOND.url)]
    run.routers.leave_out(FIRST)
    assert cast.take("leave_out") == [("router-0", FIRST.url), ("router-1", FIRST.url)]


def test_a_router_that_starts_in_front_of_a_lost_engine_starts_anew_without_it(start, cast) -> None:
    run = start("--vllm-router-count", "2")
    run.lose("router-0")
    run.routers.each[0].losses.start_at = 0.0
    run.routers.go_on()
    cast.asked.clear()
    run.serving = [FIRST]
    run.routers.leave_out(SECOND)
    assert cast.take("start") == [("router-0", [FIRST])]
    assert cast.take("leave_out") == [("router-1", SECOND.url)]
    assert cast.killed == ["router-0", "router-0"]


def test_a_router_that_does_not_take_a_change_is_lost_and_the_other_has_it(start, cast) -> None:
    run = start("--vllm-router-count", "2")
    cast.answers["router-0", "leave_out"] = RouterLostError("hangs")
    run.routers.leave_out(SECOND)
    assert run.events == [("router_lost", "router-0")]
    assert run.routers.each[1].engines == [FIRST]
    cast.answers["router-1", "take_in"] = RouterLostError("hangs")
    run.come_back()
    assert run.routers.take_in(SECOND)  # the engine is well
    assert run.events[-1] == ("router_lost", "router-1")
    assert run.lost_engines == []


def test_an_engine_that_a_router_does_not_find_well_is_lost(start, cast) -> None:
    run = start("--vllm-router-count", "2")
    run.routers.leave_out(SECOND)
    cast.answers["router-0", "take_in"] = EngineLostError("status 503")
    assert not run.routers.take_in(SECOND)
    assert run.lost_engines == ["engine-1"]
    assert SECOND in run.routers.each[1].engines, "the judge lets it leave the router that took it"
    assert run.events == []
