"""In which order trainers and engines take and free the GPUs that they share."""

import contextlib
from types import SimpleNamespace
from typing import Any, cast

from vime.config.parse import Config
from vime.ray.turns import Turns

KINDS = {"update_weights_interval": 2, "transferqueue_max_staleness": 1}


class World:
    """Trainers and engines that write down what they are told, and a clock that does not."""

    def __init__(self, **flags: Any) -> None:
        self.order: list[str] = []
        self.asleep: list[str] = []  # parts of the engines
        self.make_room: Any = None
        world = self

        class Trainers:
            def share_gpus(self, before_wake: Any) -> None:
                world.make_room = before_wake

            def rest(self) -> None:
                world.order.append("trainers rest")

            def sleep(self) -> None:
                world.order.append("trainers sleep")

        class Engines:
            @property
            def is_asleep(self) -> bool:
                return bool(world.asleep)

            def sleep(self, level: int) -> None:
                if not world.asleep:
                    world.order.append(f"engines sleep {level}")
                    world.asleep = ["weights", "kv_cache"]

            def wake_up(self, part: str) -> None:
                if part in world.asleep:
                    world.asleep.remove(part)
                    world.order.append(f"{part} awake")

        self.turns = Turns(
            Config().replace(colocate=True, **flags),
            cast("Any", Trainers()),
            cast("Any", Engines()),
            cast("Any", SimpleNamespace(timed=lambda _: contextlib.nullcontext())),
        )

    def take(self) -> list[str]:
        taken, self.order = self.order, []
        return taken


def test_a_round_frees_before_it_takes() -> None:
    world = World()
    world.turns.train()
    assert world.take() == ["engines sleep 2"]
    world.turns.update()
    assert world.take() == ["trainers rest", "weights awake"]
    world.turns.generate()
    assert world.take() == ["trainers sleep", "kv_cache awake"]
    world.turns.generate()
    assert world.take() == ["trainers sleep"], "which does nothing where they are asleep"


def test_engines_that_get_no_update_wake_up_with_the_weights_they_had() -> None:
    world = World(**KINDS)
    world.turns.train()
    world.turns.generate()
    assert world.take() == ["engines sleep 1", "trainers sleep", "weights awake", "kv_cache awake"]


def test_trainers_that_are_called_out_of_turn_have_the_engines_sleep_first_and_keep_their_weights() -> None:
    world = World()
    world.make_room()
    assert world.take() == ["engines sleep 1"]
    world.turns.train()  # they sleep already
    assert world.take() == []
