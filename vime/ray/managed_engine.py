"""One engine of a run, whichever process plays it at the time: where it is between start, loss and return."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from ray import ObjectRef

from vime.backends.vllm_utils.access import EngineKeys
from vime.backends.vllm_utils.external import owner_name
from vime.config.parse import Config
from vime.ray.actor import Actor, Options, start_actor
from vime.ray.cluster import ENGINE_CPUS
from vime.ray.engine_actors import EngineActor, ExternalEngineActor
from vime.ray.losses import Losses
from vime.ray.placement import EnginePlace, ExtraPlace, has_nodes, leave_place
from vime.types import ClusterError, EngineAddress

MAX_CALLS = 4  # at a time in an actor


class Changes(Protocol):
    """What users ask of the engines while the run goes on (changes.py)."""

    def go_on(self) -> None: ...
    def close(self) -> None: ...


class EngineState(StrEnum):
    """What the run does with an engine."""

    STARTING = "starting"
    READY = "ready"  # responds, but confirmed no version yet: it gets the next update, and no prompt before
    SERVING = "serving"
    DRAINING = "draining"  # gets updates, but no new request: it is to be stopped (changes.py)
    LOST = "lost"  # its processes are ended; it is started again at `losses.start_at`


@dataclass(slots=True)
class ManagedEngine:
    """Owned by the driver's `Engines`. Times are monotonic."""

    index: int
    state: EngineState = EngineState.STARTING
    actor: Actor[EngineActor] | None = None
    starting: ObjectRef[EngineAddress] | None = None  # until it is ready
    address: EngineAddress | None = None  # while it is ready or serves
    began: float = field(default_factory=time.monotonic)  # its start
    looked: float = 0.0  # whether Ray has a node for it
    place: EnginePlace = ()  # where Ray starts it
    search: ExtraPlace | None = None  # while it looks for other nodes
    external: str | None = None  # HOST:PORT of one that somebody else started
    is_new: bool = False  # added to a live run, and has served nothing yet
    losses: Losses = field(init=False)  # since it confirmed a version
    gone: str = ""  # why the run has it no more

    def __post_init__(self) -> None:
        self.losses = Losses(self.name)

    @property
    def name(self) -> str:
        return f"engine-{self.index}"

    def begin(self, actor: Actor[EngineActor], starting: ObjectRef[EngineAddress]) -> None:
        self.actor, self.starting = actor, starting
        self.state, self.began = EngineState.STARTING, time.monotonic()

    def respond(self, address: EngineAddress) -> None:
        self.address, self.starting, self.state = address, None, EngineState.READY

    def serve(self) -> float | None:
        """Note a confirmed version. Returns for how long nothing was asked of it; None when it was not away."""
        self.state, self.is_new = EngineState.SERVING, False
        return self.losses.end()

    def end_search(self) -> None:
        """Look for other nodes no longer; those that it had are given back already."""
        if self.search is not None:
            self.search.give_back()
            self.search, self.place = None, ()

    def leave_nodes(self) -> None:
        """Give back what is reserved for a divided engine alone, wherever it has moved."""
        self.end_search()
        if len(self.place) > 1:
            leave_place(self.place)

    def lose(self) -> float:
        """Note a loss. Returns the seconds until it is started again."""
        self.state = EngineState.LOST
        self.actor = self.starting = self.address = None
        return self.losses.add()


def find_nodes(config: Config, engine: ManagedEngine) -> bool:
    """Return whether there is a node for each part of an engine that starts again. One that is divided leaves the nodes
    that it had when one of them is gone, and its actor is ended: it has none when this returns True for other nodes."""
    if engine.search is None and (len(engine.place) < 2 or has_nodes(engine.place)):
        return has_nodes(engine.place)
    if engine.search is None:
        if engine.actor is not None:
            engine.actor.kill()
        engine.actor = engine.starting = None
        leave_place(engine.place)
        engine.search = ExtraPlace(config, waits=True)
    try:
        found = engine.search.find()
    except ClusterError:  # no set of nodes is large enough: others may come
        engine.search = ExtraPlace(config, waits=True)
        return False
    if found is None:
        return False
    engine.place, engine.search = found, None
    return True


def start_engine(
    config: Config, engine: ManagedEngine, run_dir: Path, keys: EngineKeys, shared_gpus: Sequence[str]
) -> Actor[EngineActor]:
    """Return the actor that holds it. `shared_gpus`: see `EngineActor`."""
    if engine.external is not None:
        aside: Options = {"num_cpus": 0, "max_concurrency": MAX_CALLS}
        told = (config, engine.index, str(run_dir), keys, engine.external, owner_name(run_dir))
        return start_actor(ExternalEngineActor, aside, *told)
    cluster = config.cluster
    here, *further = engine.place or (Options(),)
    gpus = cluster.rollout_num_gpus_per_engine if cluster.device == "cuda" and not cluster.colocate else 0
    options: Options = {
        "num_cpus": ENGINE_CPUS, "num_gpus": gpus // (1 + len(further)), "max_concurrency": MAX_CALLS
    }  # fmt: skip
    others: list[Options] = [{**options, **place} for place in further]
    where: Options = {**options, **here}
    return start_actor(EngineActor, where, config, engine.index, str(run_dir), keys, shared_gpus, others)
