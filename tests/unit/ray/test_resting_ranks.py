"""Which calls wake trainer ranks that rest or sleep, and what is asked of others first."""

from types import SimpleNamespace
from typing import Any, cast

from vime.config.parse import Config
from vime.ray.trainers import Ranks, TrainerActor


class Noted(Ranks):
    """One rank whose calls are written down in place of being made."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self._actors = [cast("Any", SimpleNamespace(ask=self._ask))]
        self._name, self._config, self._running = "trainer", Config(), []
        self._is_asleep = self._is_resting = False
        self.before_wake = lambda: self.order.append("the engines sleep")

    def _ask(self, method: Any, *arguments: Any) -> None:
        self.order.append(" ".join(map(str, (method.__name__, *arguments))))

    def _wait(self, refs: Any, *_: Any) -> Any:
        self._running = []
        return refs

    def take(self) -> list[str]:
        taken, self.order = self.order, []
        return taken


def test_ranks_that_rest_publish_and_then_sleep_without_waking_up() -> None:
    ranks = Noted()
    ranks.rest()
    ranks.rest()
    ranks.call(TrainerActor.publish, 1, [])
    ranks.sleep()
    ranks.sleep()
    assert ranks.take() == ["rest", "publish 1 []", "set_asleep True"]


def test_what_needs_more_than_the_weights_wakes_them_when_the_engines_sleep() -> None:
    ranks = Noted()
    ranks.rest()
    ranks.call(TrainerActor.weights_hash)
    ranks.call(TrainerActor.load, "there")
    assert ranks.take() == ["rest", "weights_hash", "the engines sleep", "set_asleep False", "load there"]
    ranks.sleep()
    ranks.call(TrainerActor.weights_hash)
    assert ranks.take() == ["set_asleep True", "the engines sleep", "set_asleep False", "weights_hash"]
    ranks.call(TrainerActor.load, "there")
    assert ranks.take() == ["load there"]
