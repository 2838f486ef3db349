"""An engine that is lost while another serves: real actors, servers and router; scripted engines in vLLM's place."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import torch

from tests.helpers.processes import has_ended
from vime.backends.vllm_utils.control import FleetControl
from vime.observability.events import read_events
from vime.ray.publisher import Publisher
from vime.rollout.engine_client import EngineClient
from vime.rollout.exchanges import Completion
from vime.types import EngineAddress, EngineLostError, VimeError
from vime.weights.plan import TensorMeta

pytestmark = pytest.mark.usefixtures("ray_cluster")


def test_a_killed_engine_leaves_the_router_and_is_back_after_the_next_update(start_fleet) -> None:
    fleet = start_fleet(2)
    assert fleet.publish(0) == ["engine-0", "engine-1"]
    fleet.server(1).kill()
    fleet.check_until(lambda: fleet.events()[-1:] == [("engine_ready", "engine-1")])
    assert fleet.events() == [(f"engine_{kind}", "engine-1") for kind in ("lost", "starting", "ready")]
    assert fleet.routed() == ["engine-0"]  # the new one holds no version that anybody confirmed
    assert fleet.engines.num_serving == 1
    assert fleet.engines.take_metrics() == {"engines/lost": 1.0, "engines/readmitted": 0.0, "engines/serving": 1.0}
    assert fleet.publish(1) == ["engine-0", "engine-1"]
    assert fleet.events()[-1] == ("engine_readmitted", "engine-1")
    assert fleet.routed() == ["engine-0", "engine-1"]
    assert fleet.versions(8) == {"1"}
    metrics = fleet.engines.take_metrics()
    assert metrics.pop("engines/away_time") > 0
    assert metrics == {"engines/lost": 0.0, "engines/readmitted": 1.0, "engines/serving": 2.0}
    fleet.server(1).kill()  # and again: what was counted before is over
    fleet.check_until(lambda: fleet.events()[-1:] == [("engine_ready", "engine-1")])
    assert fleet.publish(2) == ["engine-0", "engine-1"]
    assert len(fleet.told) == 4  # twice lost, twice back


def test_a_broadcast_group_is_made_anew_without_an_engine_that_is_lost_and_with_it_when_it_is_back(start_fleet) -> None:
    fleet = start_fleet(2, "--update-weight-transport", "gloo")
    assert fleet.publish(0) == ["engine-0", "engine-1"]
    fleet.server(1).kill()
    fleet.check_until(lambda: ("engine_lost", "engine-1") in fleet.events())
    assert fleet.publish(1) == ["engine-0"]
    assert fleet.versions(4) == {"1"}
    assert fleet.publish(2) == ["engine-0"]  # over the same group
    fleet.check_until(lambda: fleet.events()[-1:] == [("engine_ready", "engine-1")])
    assert fleet.routed() == ["engine-0"]
    assert fleet.publish(3) == ["engine-0", "engine-1"]  # each confirmed version and hash
    assert fleet.events()[-1] == ("engine_readmitted", "engine-1")
    assert fleet.routed() == ["engine-0", "engine-1"]
    assert fleet.publish(4) == ["engine-0", "engine-1"]
    assert fleet.versions(8) == {"4"}
    assert [kind for kind, _ in fleet.events()] == [
        f"engine_{kind}" for kind in ("lost", "starting", "ready", "readmitted")
    ]


def test_an_engine_that_is_lost_asleep_starts_when_engines_are_awake_and_trainers_wait_for_that(start_fleet) -> None:
    """--colocate: while engines sleep, trainers have the GPUs that a new engine would look for."""
    fleet = start_fleet(2, "--colocate", "--actor-num-gpus-per-node", "2")
    engines = fleet.engines
    engines.sleep(2)
    engines.wake_up("weights")
    fleet.publish(0)
    engines.wake_up("kv_cache")
    assert fleet.versions(4) == {"0"}
    engines.sleep(2)
    fleet.server(1).kill()
    fleet.check_until(lambda: fleet.events()[-1:] == [("engine_lost", "engine-1")])
    due = engines._engines[1].losses.start_at
    fleet.check_until(lambda: time.monotonic() > due + 1)
    assert fleet.events() == [("engine_lost", "engine-1")], "it is due, and waits"
    engines.wake_up("weights")
    assert fleet.publish(1) == ["engine-0"]
    engines.wake_up("kv_cache")
    fleet.check_until(lambda: ("engine_starting", "engine-1") in fleet.events())
    engines.sleep(2)  # waits for the new one, which sleeps too
    assert fleet.events()[-1] == ("engine_ready", "engine-1")
    engines.wake_up("weights")
    assert fleet.publish(2) == ["engine-0", "engine-1"]
    assert engines.is_asleep
    engines.wake_up("kv_cache")
    assert not engines.is_asleep
    assert fleet.versions(8) == {"2"}
    fleet.server(0).kill()
    engines.sleep(1)  # the one that cannot is lost, and the other sleeps
    assert fleet.events()[-1] == ("engine_lost", "engine-0")
    for part in ("weights", "kv_cache"):
        engines.wake_up(part)
    assert fleet.versions(4) == {"2"}, "level 1 keeps the weights"


def test_requests_go_on_while_an_engine_is_dead_and_nobody_has_noticed(start_fleet) -> None:
    fleet = start_fleet(2)
    fleet.publish(0)
    fleet.server(0).kill()
    assert fleet.versions(12) == {"0"}
    assert fleet.events() == []


def in_progress(engine: EngineAddress) -> int:
    return httpx.get(f"{engine.url}/vime/requests", headers=engine.headers, timeout=60).json()["in_progress"]


@pytest.mark.parametrize("whose", ["server", pytest.param("actor", marks=pytest.mark.nightly)])
def test_a_stopped_engine_is_lost_at_the_deadline_of_its_health_check(start_fleet, whose, monkeypatch) -> None:
    """Requests that it has at that moment are answered by the other."""
    from vime.ray import engines as engines_module

    monkeypatch.setattr(engines_module, "GRACE_S", 1.0)
    fleet = start_fleet(2)
    fleet.publish(0)
    server = fleet.server(1)
    stopped = server if whose == "server" else server.parent().parent()
    second = fleet.engines.addresses[1]
    httpx.post(f"{second.url}/pause?mode=keep", headers=second.headers, timeout=60).raise_for_status()
    with ThreadPoolExecutor(1) as pool:
        answered = pool.submit(fleet.versions, 8)
        fleet.check_until(lambda: in_progress(second) > 0)
        os.kill(stopped.pid, signal.SIGSTOP)
        fleet.check_until(lambda: fleet.events()[-1:] == [("engine_ready", "engine-1")])
        fleet.check_until(lambda: has_ended(server))  # Ray takes five seconds to kill an actor that is stopped
        assert answered.result(timeout=60) == {"0"}
    assert fleet.publish(1) == ["engine-0", "engine-1"]
    assert fleet.versions(8) == {"1"}


def test_a_killed_actor_is_lost_with_its_engine(start_fleet) -> None:
    fleet = start_fleet(2)
    fleet.publish(0)
    server = fleet.server(0)
    server.parent().parent().kill()
    fleet.check_until(lambda: fleet.events()[-1:] == [("engine_ready", "engine-0")])
    assert fleet.publish(1) == ["engine-0", "engine-1"]
    fleet.check_until(lambda: has_ended(server))


def test_an_engine_that_dies_in_an_update_does_not_fail_it_for_the_others(start_fleet) -> None:
    fleet = start_fleet(3)
    fleet.publish(0)
    assert fleet.publish(1, during=fleet.server(1).kill) == ["engine-0", "engine-2"]
    assert fleet.routed() == ["engine-0", "engine-2"]
    assert fleet.versions(8) == {"1"}
    fleet.check_until(lambda: fleet.events()[-1:] == [("engine_ready", "engine-1")])
    assert fleet.publish(2) == ["engine-0", "engine-1", "engine-2"]
    assert fleet.versions(8) == {"2"}


@pytest.mark.parametrize("moment", ["during", "midway"])
def test_an_engine_that_dies_in_a_broadcast_is_left_out_of_the_next_group_which_gets_the_same_version(
    start_fleet, moment
) -> None:
    """At once: the deadline of an update is 300 s."""
    fleet = start_fleet(3, "--update-weight-transport", "gloo")
    fleet.publish(0)
    began = time.monotonic()
    assert fleet.publish(1, **{moment: fleet.server(1).kill}) == ["engine-0", "engine-2"]
    assert time.monotonic() - began < 60
    assert fleet.events() == [("engine_lost", "engine-1")]
    assert fleet.routed() == ["engine-0", "engine-2"]
    assert fleet.versions(8) == {"1"}
    fleet.check_until(lambda: fleet.events()[-1:] == [("engine_ready", "engine-1")])
    assert fleet.publish(2) == ["engine-0", "engine-1", "engine-2"]
    assert fleet.versions(8) == {"2"}


def test_an_engine_that_dies_while_a_broadcast_group_is_made_is_left_out_of_the_next_group(
    start_fleet, monkeypatch
) -> None:
    """As when a node with several engines dies: the first is lost in an update, the next in the group made after it."""
    fleet = start_fleet(3, "--update-weight-transport", "gloo")
    fleet.publish(0)
    fleet.server(2).kill()
    fleet.check_until(lambda: fleet.events()[-1:] == [("engine_ready", "engine-2")])
    victim, init_transfer = fleet.server(1), FleetControl.init_transfer

    def with_a_death(control: FleetControl, infos: Sequence[Mapping[str, object]]) -> None:
        if victim.is_running():
            victim.suspend()  # the others join, and wait for it
            threading.Timer(1.5, victim.kill).start()
        init_transfer(control, infos)

    monkeypatch.setattr(FleetControl, "init_transfer", with_a_death)
    began = time.monotonic()
    assert fleet.publish(1) == ["engine-0", "engine-2"]
    assert time.monotonic() - began < 60, "the deadline of an update is 300 s"
    assert fleet.events()[3:5] == [("engine_lost", "engine-1"), ("engine_readmitted", "engine-2")]
    assert fleet.versions(8) == {"1"}
    fleet.check_until(lambda: fleet.events()[-1:] == [("engine_ready", "engine-1")])
    assert fleet.publish(2) == ["engine-0", "engine-1", "engine-2"]


def test_an_engine_with_another_version_than_is_served_is_lost(start_fleet) -> None:
    fleet = start_fleet(2)
    fleet.publish(0)
    address = fleet.engines._engines[1].address
    tensor = torch.zeros(2)
    stray = Publisher(fleet.config, fleet.directory, [address])  # somebody else's update
    stray.publish(iter([("w", tensor)]), [TensorMeta.of("w", tensor)], 7)
    stray.close()
    fleet.check_until(lambda: fleet.events()[-1:] == [("engine_ready", "engine-1")])
    lost = next(event for event in read_events(fleet.directory) if event.kind == "engine_lost")
    assert "puts version 7 on its tokens, but version 0 is served" in str(lost.fields["error"])


def test_the_last_engine_ends_the_run(start_fleet) -> None:
    fleet = start_fleet(2)
    fleet.publish(0)
    fleet.server(1).kill()
    fleet.check_until(lambda: ("engine_ready", "engine-1") in fleet.events())
    fleet.server(0).kill()  # the other one is ready, but has no version
    with pytest.raises(EngineLostError, match="engine-0"):
        fleet.check_until(lambda: False)


def test_an_engine_that_does_not_come_back_ends_the_run_after_max_restarts_losses(start_fleet) -> None:
    fleet = start_fleet(2, "--max-restarts", "1")
    fleet.publish(0)
    fleet.server(1).kill()
    fleet.check_until(lambda: ("engine_ready", "engine-1") in fleet.events())
    fleet.server(1).kill()  # no version was served between
    with pytest.raises(EngineLostError, match="engine-1"):
        fleet.check_until(lambda: False)


def test_what_ends_the_run_waits_while_the_trainers_train(start_fleet) -> None:
    fleet = start_fleet(1)
    fleet.publish(0)
    fleet.server(0).kill()
    ends = time.monotonic() + 60
    while fleet.engines._end is None and time.monotonic() < ends:
        fleet.engines.tend()
        time.sleep(0.05)
    with pytest.raises(EngineLostError, match="engine-0"):
        fleet.engines.check()


def test_a_killed_router_is_back_at_its_address_and_a_request_in_progress_is_sent_again(start_fleet) -> None:
    fleet = start_fleet(2)
    fleet.publish(0)

    async def ask() -> list[Completion]:
        client = EngineClient(fleet.router, max_in_flight=1, timeout_s=90, key=fleet.engines.generate_key)
        try:
            return await client.generate([5, 6], {"max_tokens": 4}, n=2)
        finally:
            await client.aclose()

    router = fleet.router_server()
    router.kill()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(asyncio.run, ask())
        # the request may be answered before the run has heard that the new router is up
        fleet.check_until(lambda: asked.done() and "router_ready" in fleet.router_events())
    assert [len(completion.token_ids) > 0 for completion in asked.result()] == [True, True]
    assert fleet.router_events() == ["router_lost", "router_ready"]
    assert fleet.events() == []  # no engine was lost
    assert fleet.routed() == ["engine-0", "engine-1"]
    assert fleet.engines.take_metrics()["engines/router_lost"] == 1
    assert has_ended(router)


@pytest.mark.parametrize("whose", ["server", pytest.param("actor", marks=pytest.mark.nightly)])
def test_a_stopped_router_is_lost_at_the_deadline_of_its_health_check(start_fleet, whose, monkeypatch) -> None:
    from vime.ray import engines as engines_module

    monkeypatch.setattr(engines_module, "GRACE_S", 1.0)
    fleet = start_fleet(1, "--engine-health-timeout-secs", "8")
    fleet.publish(0)
    server = fleet.router_server()
    os.kill((server if whose == "server" else server.parent().parent()).pid, signal.SIGSTOP)
    fleet.check_until(lambda: fleet.router_events()[-1:] == ["router_ready"])
    fleet.check_until(lambda: has_ended(server))
    assert fleet.versions(2) == {"0"}


def test_a_version_that_is_served_while_the_router_is_away_is_behind_it_when_it_is_back(start_fleet) -> None:
    fleet = start_fleet(2)
    fleet.publish(0)
    fleet.server(1).kill()
    fleet.check_until(lambda: ("engine_ready", "engine-1") in fleet.events())
    fleet.router_server().kill()
    fleet.check_until(lambda: fleet.router_events() == ["router_lost"])
    assert fleet.publish(1) == ["engine-0", "engine-1"]
    fleet.check_until(lambda: fleet.router_events() == ["router_lost", "router_ready"])
    assert fleet.routed() == ["engine-0", "engine-1"]
    assert fleet.versions(8) == {"1"}


def test_a_router_that_nobody_missed_yet_is_lost_when_it_is_told_of_an_engine(start_fleet) -> None:
    fleet = start_fleet(2, "--engine-health-interval-secs", "60")
    fleet.publish(0)
    fleet.engines.check()
    fleet.router_server().kill()
    fleet.engines._judge("engine-1", EngineLostError("engine-1 was lost in this test"))
    assert fleet.router_events() == ["router_lost"]
    fleet.check_until(lambda: fleet.router_events() == ["router_lost", "router_ready"])
    assert fleet.routed() == ["engine-0"]


def test_an_engine_that_dies_while_the_router_starts_again_does_not_hold_it_up(start_fleet) -> None:
    """A router waits for each engine that it is started with."""
    fleet = start_fleet(2)
    fleet.publish(0)
    fleet.router_server().kill()
    fleet.check_until(lambda: fleet.router_events() == ["router_lost"])
    fleet.server(1).kill()
    fleet.check_until(lambda: fleet.router_events() == ["router_lost", "router_ready"])
    fleet.check_until(lambda: fleet.routed() == ["engine-0"])  # not at once where the router was faster than the loss
    assert fleet.versions(4) == {"0"}
    fleet.check_until(lambda: fleet.events()[-1:] == [("engine_ready", "engine-1")])
    assert fleet.publish(1) == ["engine-0", "engine-1"]
    assert fleet.routed() == ["engine-0", "engine-1"]


def test_a_router_that_is_lost_again_and_again_without_a_version_between_ends_the_run(start_fleet) -> None:
    fleet = start_fleet(1, "--max-restarts", "1")
    fleet.publish(0)
    fleet.router_server().kill()
    fleet.check_until(lambda: fleet.router_events() == ["router_lost", "router_ready"])
    fleet.publish(1)
    fleet.router_server().kill()  # a version was served between
    fleet.check_until(lambda: fleet.router_events()[2:] == ["router_lost", "router_ready"])
    fleet.router_server().kill()
    with pytest.raises(VimeError, match="router"):
        fleet.check_until(lambda: False)
