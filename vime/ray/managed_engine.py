"""One engine of a run, whichever process plays it at the time: where it is between start, loss and return."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import StrEnum

from ray import ObjectRef

from vime.ray.actor import Actor
from vime.ray.engine_actors import EngineActor
from vime.types import EngineAddress
from vime.utils.waits import STARTS_AGAIN, Stretch, doing

FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 2.0, 60.0


class EngineState(StrEnum):
    """What the run does with an engine."""

    STARTING = "starting"
    READY = "ready"  # responds, but confirmed no version yet: it gets the next update, and no prompt before
    SERVING = "serving"
    LOST = "lost"  # its processes are ended; it is started again at `start_at`


@dataclass(slots=True)
class ManagedEngine:
    """Owned by the driver's `Engines`. Times are monotonic."""

    index: int
    state: EngineState = EngineState.STARTING
    actor: Actor[EngineActor] | None = None
    starting: ObjectRef[EngineAddress] | None = None  # until it is ready
    address: EngineAddress | None = None  # while it is ready or serves
    is_routed: bool = False  # the router sends to it
    num_losses: int = 0  # since it confirmed a version
    lost_at: float | None = None  # the first of these losses
    start_at: float = 0.0
    began: float = field(default_factory=time.monotonic)  # its start
    _told: Stretch | None = None

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
        away_s = None if self.lost_at is None else time.monotonic() - self.lost_at
        self.state, self.num_losses, self.lost_at = EngineState.SERVING, 0, None
        self.is_routed = True
        self._tell(None)
        return away_s

    def lose(self) -> float:
        """Note a loss. Returns the seconds until it is started again: none after the first, then more and more."""
        now = time.monotonic()
        self.num_losses += 1
        backoff_s = min(FIRST_BACKOFF_S * 2 ** (self.num_losses - 2), LONGEST_BACKOFF_S) if self.num_losses > 1 else 0.0
        self.lost_at = self.lost_at or now
        self.state, self.start_at = EngineState.LOST, now + backoff_s
        self.actor = self.starting = self.address = None
        self.is_routed = False
        self._tell(f"{STARTS_AGAIN}{self.name}")
        return backoff_s

    def forget(self) -> None:
        """Say no more of it: the run ends."""
        self._tell(None)

    def _tell(self, work: str | None) -> None:
        """Let `vime why-stuck` see that it is away."""
        if self._told is not None:
            self._told.__exit__(None, None, None)
        self._told = None if work is None else doing(work).__enter__()
