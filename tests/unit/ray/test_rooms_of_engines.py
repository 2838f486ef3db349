"""What becomes of the places of engines that are stopped in a live run."""

from types import SimpleNamespace

import pytest

from vime.ray import changes
from vime.ray.changes import _Rooms


@pytest.fixture
def left(monkeypatch):
    """Places that were given back to Ray."""
    found = []
    monkeypatch.setattr(changes, "leave_place", found.append)
    return found


def test_the_place_of_an_engine_that_the_run_began_with_is_kept_for_the_next(left):
    rooms, place = _Rooms(None), [{"at": "node-1"}]
    rooms.left("engine-1", place)
    assert rooms.ask().kept is place
    assert left == []


def test_a_divided_engine_gives_back_where_it_is_now_and_nothing_is_kept(left):
    """It may have moved since the run, or a user, gave it its first place."""
    rooms, now = _Rooms(None), [{"at": "node-1"}, {"at": "node-2"}]
    rooms.left("engine-1", now)
    rooms.use(SimpleNamespace(kept=[{"at": "gone"}, {"at": "node-2"}]), "engine-2")
    rooms.left("engine-2", now)
    assert left == [now, now]
    assert (rooms._kept, rooms._of) == ([], {})
