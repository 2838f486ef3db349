"""The driver's look at engines while it waits for something else, with actors that stand in for engines."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import ray
from safetensors.numpy import save_file

from vime.config.parse import parse
from vime.ray import engines as engines_module
from vime.ray import managed_engine, managed_router
from vime.ray.engines import Engines
from vime.types import EngineAddress, EngineError, WaitTimeoutError

pytestmark = pytest.mark.usefixtures("ray_cluster")


class Stub:
    """Both an engine's and the router's actor. The index says what is wrong with it."""

    def __init__(self, _config, index_or_dir, *_) -> None:
        self._index = index_or_dir

    def start(self, _deadline_s) -> EngineAddress:
        return EngineAddress(name=f"engine-{self._index}", url=f"http://stub-{self._index}")

    def check(self, deadline_s: float, is_updating: bool) -> None:
        if self._index == 1:
            raise EngineError(f"engine-1 asked with {deadline_s:g} s, is_updating {is_updating}")
        if self._index == 2:
            time.sleep(600)


class RouterThatWaits:
    """As the real one does for engines that do not answer."""

    def __init__(self, *_) -> None:
        pass

    def start(self, _engines, _deadline_s, _port) -> None:
        time.sleep(600)


@pytest.fixture
def start(monkeypatch, tmp_path: Path) -> Iterator[Callable[..., Engines]]:
    """start(count): engines whose actors, which take CPUs of the cluster, end with the test."""
    made: list[Engines] = []

    def started(count: int, router=Stub, *more: str) -> Engines:
        monkeypatch.setattr(managed_engine, "EngineActor", Stub)
        monkeypatch.setattr(managed_router, "RouterActor", router)
        flags = ["--engine-health-interval-secs", "0.5", "--engine-health-timeout-secs", "0.5"]
        made.append(Engines(parse(["--device", "cpu", "--rollout-num-engines", str(count), *flags, *more]), tmp_path))
        return made[-1]

    yield started
    for engines in made:
        for part in [*engines._engines, *(engines._routers.each if engines._routers else [])]:
            if part.actor is not None:
                part.actor.kill()


def check_until_raised(engines: Engines, deadline_s: float = 60, **how: bool) -> None:
    ends = time.monotonic() + deadline_s
    while time.monotonic() < ends:
        engines.check(**how)
        time.sleep(0.02)


@pytest.mark.parametrize("is_updating", [False, True])
def test_an_engine_that_is_not_well_ends_the_wait_by_its_own_words(start, is_updating) -> None:
    engines = start(count=2)
    with pytest.raises(EngineError, match=f"engine-1 asked with 0.5 s, is_updating {is_updating}"):
        check_until_raised(engines, is_updating=is_updating)


class RouterThatTells:
    """Says what it was asked with."""

    def __init__(self, *_) -> None:
        pass

    def start(self, _engines, _deadline_s, _port) -> tuple[str, int]:
        return "stub", 1

    def check(self, deadline_s: float, is_updating: bool) -> None:
        raise EngineError(f"the router asked with {deadline_s:g} s, is_updating {is_updating}")


@pytest.mark.parametrize(("count", "said"), [(2, "engine-1 asked with 2.5 s"), (1, "the router asked with 0.5 s")])
def test_an_engine_has_the_time_of_a_step_of_its_model_on_top_and_the_router_has_not(
    start, tmp_path: Path, count: int, said: str
) -> None:
    save_file({"layer": np.zeros((2_500, 1_000), np.float32)}, tmp_path / "model.safetensors")
    router = RouterThatTells if count == 1 else Stub
    engines = start(count, router, "--hf-checkpoint", str(tmp_path))
    if count == 1:
        engines.wait_ready(ray.get_runtime_context().get_node_id())
    with pytest.raises(EngineError, match=said):
        check_until_raised(engines)


def test_an_engine_that_ends_before_the_router_is_ready_is_named_instead_of_the_router(start) -> None:
    """Killed between its own start and the router's, which waits for it without end."""
    engines = start(count=2, router=RouterThatWaits)
    engines._deadline_s = 30
    with pytest.raises(EngineError, match=r"engine-1 asked with 0.5 s"):
        engines.wait_ready(ray.get_runtime_context().get_node_id())


def test_an_actor_that_does_not_say_how_its_engine_is_ends_the_wait_too(start, monkeypatch) -> None:
    monkeypatch.setattr(engines_module, "GRACE_S", 3.0)  # engine-0 answers in time
    engines = start(count=3)
    first, second, third = engines._engines
    ray.get([engine.starting for engine in (first, third)], timeout=120)  # else a slow start is the silent one
    second.actor.kill()
    engines._engines.remove(second)  # it would raise first
    with pytest.raises(WaitTimeoutError, match=r"waited \S+ s for engine-2 to say how it is"):
        check_until_raised(engines)


def test_engines_have_a_second_more_to_start_for_each_100_megabytes_of_the_checkpoint(
    start, monkeypatch, tmp_path: Path
) -> None:
    save_file({"weight": np.zeros(200_000_000, np.uint8)}, tmp_path / "model.safetensors")
    engines = start(1, Stub, "--hf-checkpoint", str(tmp_path), "--start-timeout-secs", "50")
    waited: list[float] = []

    def recorded(_refs, *, deadline_s: float, **_) -> None:
        waited.append(deadline_s)
        raise EngineError("not started here")

    monkeypatch.setattr("vime.ray.engines.wait_for", recorded)
    with pytest.raises(EngineError, match="not started here"):
        engines.wait_ready(ray.get_runtime_context().get_node_id())
    assert waited == [50 + 2 + 30]
