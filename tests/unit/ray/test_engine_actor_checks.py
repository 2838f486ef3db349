"""What the actor of an engine says of one that is stopped while it is asked."""

from types import SimpleNamespace

import pytest

from vime.ray.engine_actors import EngineActor
from vime.types import EngineError, EngineLostError


def actor(error: EngineError, *, is_stopped_meanwhile: bool) -> EngineActor:
    """An actor whose engine ends in the middle of a question."""
    made = EngineActor.__new__(EngineActor)
    made._followers = SimpleNamespace(check=lambda: None, begin_stop=lambda: None, end_stop=lambda stopping: None)

    def check_health(deadline_s: float, *, is_updating: bool) -> str:
        if is_stopped_meanwhile:
            made.stop()
        raise error

    made._process = SimpleNamespace(check_health=check_health, stop=lambda: None)
    return made


@pytest.mark.parametrize("error", [EngineError("is not running"), EngineLostError("ended with exit code -15")])
def test_an_engine_that_is_stopped_while_it_is_asked_raises_nothing(error: EngineError) -> None:
    """An engine that is drained: nobody reads the answer any more, and Ray would show an error on the user's screen."""
    assert actor(error, is_stopped_meanwhile=True).check(1.0, False) is None
    with pytest.raises(type(error), match=str(error)):
        actor(error, is_stopped_meanwhile=False).check(1.0, False)
