"""An engine that is on two nodes is one engine: it starts, is lost and ends with both. Real actors; scripted engines in
vLLM's place, and both nodes are this machine."""

import psutil
import pytest
import ray

from tests.helpers.fleet import SCRIPTED
from tests.helpers.processes import has_ended
from tests.helpers.rollout_setup import write_model_directory
from vime.backends.vllm_utils.access import EngineKeys
from vime.backends.vllm_utils.engine import EngineProcess, FollowerProcess
from vime.backends.vllm_utils.process import ServerProcess
from vime.config.parse import parse
from vime.ray import engines, managed_engine
from vime.ray.followers import Followers
from vime.types import EngineLostError

pytestmark = pytest.mark.usefixtures("ray_cluster")
TWO = ("--rollout-num-gpus-per-engine", "2", "--engine-health-timeout-secs", "60")
"""Nothing here hangs, and four servers that import torch at once take a busy core for long."""


def value(command, flag):
    return command[command.index(flag) + 1]


def test_an_engine_on_two_nodes_has_one_address_one_version_and_a_process_on_each(start_fleet) -> None:
    fleet = start_fleet(2, *TWO, parts=2)
    assert fleet.publish(0) == ["engine-0", "engine-1"]
    assert fleet.routed() == ["engine-0", "engine-1"]
    assert fleet.versions(4) == {"0"}
    for index in (0, 1):
        first, second = fleet.server(index).cmdline(), fleet.further_server(index).cmdline()
        assert [value(each, "--node-rank") for each in (first, second)] == ["0", "1"]
        for flag in ("--nnodes", "--tensor-parallel-size"):
            assert [value(each, flag) for each in (first, second)] == ["2", "2"]
        assert value(first, "--master-port") == value(second, "--master-port") != value(first, "--port")
        assert "--headless" not in first


@pytest.mark.parametrize(
    ("part", "whose"),
    [
        ("second", "server"),
        ("first", "actor"),
        pytest.param("first", "server", marks=pytest.mark.nightly),
        pytest.param("second", "actor", marks=pytest.mark.nightly),
    ],
)
def test_an_engine_that_loses_a_part_is_lost_ends_whole_and_starts_again(start_fleet, part, whose) -> None:
    fleet = start_fleet(2, *TWO, parts=2)
    fleet.publish(0)
    first, second = fleet.server(1), fleet.further_server(1)
    hit = first if part == "first" else second
    (hit if whose == "server" else hit.parent().parent()).kill()
    fleet.check_until(lambda: fleet.events()[-1:] == [("engine_ready", "engine-1")])
    assert fleet.events() == [(f"engine_{kind}", "engine-1") for kind in ("lost", "starting", "ready")]
    if part == "second":
        assert ("engine-1, part 2 of 2 ended with exit code 137" if whose == "server" else "lost a part") in fleet.told[
            0
        ]
    fleet.check_until(lambda: has_ended(first) and has_ended(second))
    assert fleet.publish(1) == ["engine-0", "engine-1"]
    assert fleet.versions(8) == {"1"}


def test_an_engine_whose_second_node_has_died_starts_on_other_nodes_when_there_are_some(
    start_fleet, monkeypatch
) -> None:
    """Which nodes Ray gives it is test_placement.py's."""
    monkeypatch.setattr(engines, "NODES_S", 0.0)
    fleet = start_fleet(2, *TWO, parts=2)
    fleet.publish(0)
    moving = fleet.engines.find("engine-1")
    old, new, left, looks = moving.place, [{}, {}], [], iter([None, None])

    class OtherNodes:
        def __init__(self, _config, *, waits) -> None:
            assert waits

        def find(self):
            return next(looks, new)

        def give_back(self) -> None: ...

    monkeypatch.setattr(managed_engine, "has_nodes", lambda place: place is not old)
    monkeypatch.setattr(managed_engine, "leave_place", left.append)
    monkeypatch.setattr(managed_engine, "ExtraPlace", OtherNodes)
    first = fleet.server(1)
    fleet.further_server(1).kill()
    fleet.check_until(lambda: fleet.events()[-1:] == [("engine_ready", "engine-1")])
    kinds = ("lost", "starting", "without_node", "starting", "ready")
    assert fleet.events() == [(f"engine_{kind}", "engine-1") for kind in kinds]
    assert left == [old]
    assert moving.place is new
    fleet.check_until(lambda: has_ended(first))
    assert fleet.publish(1) == ["engine-0", "engine-1"]
    assert fleet.versions(8) == {"1"}


def listens_at(port, guard) -> bool:
    below = psutil.Process(guard).children(recursive=True)
    return any(each.laddr.port == port and each.status == "LISTEN" for one in below for each in one.net_connections())


def test_an_engine_is_ready_when_its_last_part_has_come_and_neither_side_notices_the_other_s_end(tmp_path) -> None:
    """Of three parts; what vLLM does too: neither side notices the other's end by itself."""
    flags = ["--device", "cpu", "--debug-engine-module", SCRIPTED, "--rollout-num-gpus-per-engine", "3"]
    config = parse([*flags, "--hf-checkpoint", str(write_model_directory(tmp_path / "model"))])
    keys = EngineKeys.make()
    engine = EngineProcess(config, index=0, run_dir=tmp_path, keys=keys, num_nodes=3)
    parts = [FollowerProcess(config, index=0, part=engine.part(n), run_dir=tmp_path, keys=keys) for n in (1, 2)]
    last, looks = parts[1], iter(range(1000))

    def begin_the_last() -> None:
        if (
            listens_at(engine.part(0).port, engine.pid) and next(looks) == 3
        ):  # a look takes two seconds: it does not respond
            last.start()

    try:
        parts[0].start()
        engine.start()
        engine.wait_ready(120, on_poll=begin_the_last)
        assert next(looks) > 3, "ready before the last part was there"
        psutil.Process(parts[0].pid).kill()
        assert engine.check_health(60, is_updating=False) == "default"
        parts[0]._child.wait(60)
        with pytest.raises(EngineLostError, match="engine-0, part 2 of 3 ended with exit code"):
            parts[0].check()
        engine.stop()
        parts[1].check()
    finally:
        for process in (engine, *parts):
            process.stop()


def test_a_run_that_stops_leaves_no_part_of_an_engine(start_fleet) -> None:
    fleet = start_fleet(1, *TWO, parts=2)
    parts = [fleet.server(0), fleet.further_server(0)]
    fleet.engines.stop()
    assert all(has_ended(part) for part in parts)


def test_an_engine_whose_further_part_ends_before_it_is_ready_does_not_wait_for_it(tmp_path) -> None:
    engine = ServerProcess(
        "engine-0",
        ["sleep", "600"],
        env={"PATH": "/usr/bin:/bin"},
        log_path=tmp_path / "log",
        ready_url="http://127.0.0.1:9",
    )
    followers = Followers(None, 0, "", None, [])
    followers._watches[broken.remote()] = None
    engine.start()
    try:
        with pytest.raises(EngineLostError, match="part 2 ended"):
            engine.wait_ready(60, on_poll=followers.check)
    finally:
        engine.stop()


@ray.remote(num_cpus=0)
def broken() -> None:
    raise EngineLostError("part 2 ended")
