"""Actors of Ray whose calls the type checker sees: `actor.ask(EngineActor.check, 5.0, False)`.

Ray's own handles take any name and any arguments. Here a call names the method of the class, so that its parameters are
checked and its answer has a type.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Concatenate, Generic, ParamSpec, Protocol, TypedDict, TypeVar, cast

import ray
from ray import ObjectRef

P = ParamSpec("P")
R = TypeVar("R")
Value = TypeVar("Value")
Kind = TypeVar("Kind")
Kind_co = TypeVar("Kind_co", covariant=True)


class Options(TypedDict, total=False):
    """Ray's options of an actor that are used here."""

    name: str
    num_cpus: float
    num_gpus: float
    max_concurrency: int
    max_restarts: int
    max_task_retries: int
    runtime_env: dict[str, object]
    scheduling_strategy: object


class _Remote(Protocol):
    """What `ray.remote` makes of a class."""

    def options(self, **options: object) -> _Remote: ...
    def remote(self, *arguments: object, **named: object) -> object: ...


@dataclass(frozen=True, slots=True)
class Actor(Generic[Kind_co]):
    """A handle; the actor lives while anyone has one. Can be sent to other processes."""

    handle: object

    def ask(self, method: Callable[Concatenate[Kind_co, P], R], *arguments: P.args, **named: P.kwargs) -> ObjectRef[R]:
        """Call the method that has this name in the actor's process; the answer is waited for with `waits.wait_for`."""
        reference: ObjectRef[R] = getattr(self.handle, method.__name__).remote(*arguments, **named)
        return reference

    def ask_coroutine(
        self,
        method: Callable[Concatenate[Kind_co, P], Coroutine[object, object, R]],
        *arguments: P.args,
        **named: P.kwargs,
    ) -> ObjectRef[R]:
        """`ask` of a method that is `async def`."""
        reference: ObjectRef[R] = getattr(self.handle, method.__name__).remote(*arguments, **named)
        return reference

    def run(
        self, function: Callable[Concatenate[Kind_co, P], R], *arguments: P.args, **named: P.kwargs
    ) -> ObjectRef[R]:
        """Call a function, which gets the actor itself, in its process."""
        reference: ObjectRef[R] = getattr(self.handle, "__ray_call__").remote(function, *arguments, **named)  # noqa: B009
        return reference

    def kill(self) -> None:
        """End its process now."""
        ray.kill(cast("ray.actor.ActorHandle[object]", self.handle))


def start_actor(kind: Callable[P, Kind], options: Options, *arguments: P.args, **named: P.kwargs) -> Actor[Kind]:
    """Ask Ray for a process with an object of the class `kind` in it; does not wait for it."""
    actor_class = cast("Callable[[object], _Remote]", ray.remote)(kind)
    return Actor(actor_class.options(**options).remote(*arguments, **named))


def sent_once(value: Value) -> Value:
    """For an argument of several calls: the value goes to Ray's memory once, and a reference to it stands here, in the
    place of which each actor gets the value."""
    return cast("Value", ray.put(value))
