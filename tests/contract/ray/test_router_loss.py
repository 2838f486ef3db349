"""One of two routers that is lost: real actors, servers and routers; scripted engines in vLLM's place.

Nothing is started again before the driver looks (`check_until`), so what is answered earlier was answered without it.
"""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import httpx
import pytest

from tests.helpers.fleet import Fleet
from tests.helpers.processes import has_ended
from vime.rollout import engine_client
from vime.rollout.engine_client import EngineClient, routers_of
from vime.types import EngineLostError

pytestmark = pytest.mark.usefixtures("ray_cluster")

TWO = ("--vllm-router-count", "2")
SESSIONS = [f"group-{number}" for number in range(8)]  # by test_router_choice.py: 01100010, so three are of router-1
OF_FIRST = [session for session in SESSIONS if routers_of("01", session)[0] == "0"]


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that waits once before it asks again misses its deadline."""
    monkeypatch.setattr(engine_client, "LONGEST_BACKOFF_S", 600.0)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as made:
        yield made


def ask(fleet: Fleet, sessions: list[str], timeout_s: float = 90) -> list[int]:
    """A request for each session, as a rollout worker sends them. Returns how many tokens each was answered with."""

    async def asked() -> list[int]:
        url, *others = fleet.routers
        client = EngineClient(
            url,
            others=others,
            max_in_flight=len(sessions),
            timeout_s=timeout_s,
            first_backoff_s=600,
            key=fleet.engines.generate_key,
        )
        try:
            asks = (client.generate([5, 6], {"max_tokens": 4}, session_id=session) for session in sessions)
            return [len(completion.token_ids) for [completion] in await asyncio.gather(*asks)]
        finally:
            await client.aclose()

    return asyncio.run(asked())


def on_engines(fleet: Fleet, method: str, route: str) -> list[httpx.Response]:
    addresses = fleet.engines.addresses
    return [httpx.request(method, each.url + route, headers=each.headers, timeout=60) for each in addresses]


def in_flight(fleet: Fleet) -> int:
    return sum(answer.json()["in_progress"] for answer in on_engines(fleet, "GET", "/vime/requests"))


def ask_all(fleet: Fleet, pool: ThreadPoolExecutor) -> "Future[list[int]]":
    """A request of each session that the engines have, and do not end before they are resumed."""
    on_engines(fleet, "POST", "/pause?mode=keep")
    asked = pool.submit(ask, fleet, SESSIONS)
    fleet.check_until(lambda: in_flight(fleet) == len(SESSIONS))
    return asked


def wait_until(is_so: Callable[[], bool], asked: "Future[list[int]]") -> None:
    """Without the driver."""
    while not is_so():
        assert not asked.done(), asked.result()


def test_requests_in_flight_of_a_killed_router_are_answered_by_the_other_before_it_is_started_again(
    start_fleet, pool
) -> None:
    fleet = start_fleet(2, *TWO)
    fleet.publish(0)
    assert fleet.routed(0) == fleet.routed(1) == ["engine-0", "engine-1"]
    asked = ask_all(fleet, pool)
    killed = fleet.router_server(1)
    killed.kill()
    again = len(SESSIONS) - len(OF_FIRST)  # engines that are paused still count those that nobody waits for any more
    wait_until(lambda: has_ended(killed) and in_flight(fleet) == len(SESSIONS) + again, asked)
    on_engines(fleet, "POST", "/resume")
    assert all(tokens > 0 for tokens in asked.result(timeout=60))
    assert all(tokens > 0 for tokens in ask(fleet, SESSIONS)), "and those that are asked meanwhile"
    assert fleet.router_events() == [], "the driver has not looked"
    fleet.check_until(lambda: fleet.router_events() == ["router_lost", "router_ready"])
    assert fleet.routers_lost() == ["router-1"]
    assert fleet.events() == []  # no engine was lost
    assert fleet.routed(1) == ["engine-0", "engine-1"]
    fleet.router_server(0).kill()  # so that answers come from the one that is back
    assert all(tokens > 0 for tokens in ask(fleet, SESSIONS))
    assert fleet.routers_lost() == ["router-1"]
    fleet.check_until(lambda: fleet.router_events()[2:] == ["router_lost", "router_ready"])
    assert fleet.routers_lost() == ["router-1", "router-0"]
    assert fleet.engines.take_metrics()["engines/router_lost"] == 2


@pytest.mark.parametrize("whose", ["server", pytest.param("actor", marks=pytest.mark.nightly)])
def test_a_stopped_router_holds_its_own_sessions_until_it_is_lost_and_no_others(
    start_fleet, pool, whose, monkeypatch
) -> None:
    from vime.ray import engines as engines_module

    monkeypatch.setattr(engines_module, "GRACE_S", 1.0)
    fleet = start_fleet(2, *TWO, "--engine-health-timeout-secs", "8")
    fleet.publish(0)
    server = fleet.router_server(1)
    stopped = [server] if whose == "server" else [server, server.parent().parent()]
    for process in stopped:
        os.kill(process.pid, signal.SIGSTOP)
    asked = pool.submit(ask, fleet, SESSIONS)
    assert all(tokens > 0 for tokens in ask(fleet, OF_FIRST))
    assert not asked.done()
    fleet.check_until(lambda: asked.done() and "router_lost" in fleet.router_events())
    assert all(tokens > 0 for tokens in asked.result())
    fleet.check_until(lambda: fleet.router_events() == ["router_lost", "router_ready"])
    assert fleet.routers_lost() == ["router-1"]
    fleet.check_until(lambda: has_ended(server))
    assert fleet.versions(2, 1) == {"0"}


def test_a_router_that_is_away_while_engines_change_starts_in_front_of_those_that_serve_then(start_fleet) -> None:
    fleet = start_fleet(2, *TWO)
    fleet.publish(0)
    fleet.router_server(1).kill()
    fleet.check_until(lambda: fleet.router_events() == ["router_lost"])
    away = fleet.engines._routers.each[1]
    away.end()
    away.losses.start_at = float("inf")  # it stays away until the engines have changed
    fleet.server(1).kill()
    fleet.check_until(lambda: ("engine_ready", "engine-1") in fleet.events())
    assert fleet.routed(0) == ["engine-0"]
    assert fleet.publish(1) == ["engine-0", "engine-1"]
    assert fleet.routed(0) == ["engine-0", "engine-1"]
    drained = fleet.engines.drain("engine-0")
    assert fleet.routed(0) == ["engine-1"]
    away.losses.start_at = 0.0
    fleet.check_until(lambda: fleet.router_events() == ["router_lost", "router_ready"])
    assert fleet.routed(0) == fleet.routed(1) == ["engine-1"]
    assert fleet.versions(2, 1) == {"1"}
    fleet.engines.release(drained, "drained").kill()
    assert fleet.publish(2) == ["engine-1"]
    assert fleet.versions(2, 0) == fleet.versions(2, 1) == {"2"}


@pytest.mark.nightly
def test_a_lost_engine_leaves_both_routers_and_both_have_it_again(start_fleet) -> None:
    fleet = start_fleet(2, *TWO)
    fleet.publish(0)
    fleet.server(1).kill()
    fleet.check_until(lambda: ("engine_ready", "engine-1") in fleet.events())
    assert fleet.routed(0) == fleet.routed(1) == ["engine-0"]
    fleet.publish(1)
    assert fleet.routed(0) == fleet.routed(1) == ["engine-0", "engine-1"]
    fleet.router_server(0).kill()
    fleet.engines._judge("engine-1", EngineLostError("engine-1 was lost in this test"))
    assert fleet.routers_lost() == ["router-0"], "nobody had missed it"
    assert fleet.routed(1) == ["engine-0"]
    fleet.check_until(lambda: fleet.router_events() == ["router_lost", "router_ready"])
    assert fleet.routed(0) == ["engine-0"]
