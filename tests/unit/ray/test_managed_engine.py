"""When an engine that is lost again and again is started, and how long it says that it was away."""

from types import SimpleNamespace

import pytest

from vime.ray import losses
from vime.ray.managed_engine import EngineState, ManagedEngine
from vime.types import EngineAddress
from vime.utils import waits


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    now = SimpleNamespace(s=1000.0)
    monkeypatch.setattr(losses, "time", SimpleNamespace(monotonic=lambda: now.s))
    return now


def works() -> list[str]:
    return [
        stretch.name for stretch in waits._OPEN.values() if stretch.name.startswith((waits.STARTS_AGAIN, waits.NO_NODE))
    ]


def test_losses_in_a_row_are_waited_for_longer_and_a_served_version_ends_the_row(clock: SimpleNamespace) -> None:
    engine = ManagedEngine(3)
    assert [engine.lose() for _ in range(8)] == [0, 2, 4, 8, 16, 32, 60, 60]
    assert (engine.losses.count, engine.losses.start_at) == (8, clock.s + 60)
    engine.serve()
    assert engine.losses.count == 0
    assert engine.lose() == 0
    engine.losses.end()


def test_away_is_from_the_first_loss_to_the_next_version_and_shown_as_long(clock: SimpleNamespace) -> None:
    engine = ManagedEngine(3)
    engine.respond(EngineAddress(name="engine-3", url="http://here"))
    assert engine.serve() is None  # it was never away
    assert works() == []
    engine.lose()
    assert (engine.state, engine.address, works()) == (EngineState.LOST, None, ["starting again: engine-3"])
    clock.s += 5
    engine.lose()
    clock.s += 7
    engine.respond(EngineAddress(name="engine-3", url="http://there"))
    assert works() == ["starting again: engine-3"]  # ready is not served
    assert engine.serve() == 12
    assert works() == []


def test_a_lost_engine_says_whether_a_node_has_room_for_it() -> None:
    engine = ManagedEngine(3)
    engine.lose()
    for has_node, said in ((False, "no node has room for engine-3"), (True, "starting again: engine-3")):
        engine.losses.see(has_node=has_node)
        assert works() == [said]
    engine.losses.see(has_node=False)
    engine.lose()
    assert (engine.losses.has_node, works()) == (True, ["starting again: engine-3"])
    engine.losses.end()
    assert works() == []
