"""What every process beside the RolloutManager answers that stores groups: rollout workers, and the gateway."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, cast

from vime.config.parse import Config
from vime.handoff.group_store import StoresGroups
from vime.observability.events import open_events
from vime.observability.logs import setup_logging
from vime.observability.samples import DroppedGroup
from vime.ray.cluster import limit_threads, yield_to_trainers
from vime.ray.stores import connect_store, group_store, replace_queue
from vime.rollout.group_worker import WorkerStats
from vime.rollout.plugins import load_data_source
from vime.rollout.worker import PromptsByNumber
from vime.utils.heap import collect_garbage, collect_when_asked
from vime.utils.processes import place

if TYPE_CHECKING:
    from vime.handoff.queue_client import QueueAddress


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReport:
    """State of a process. `error`: what ended its work; `num_jobs`: jobs outside that take prompts through it now."""

    stats: WorkerStats
    num_running: int
    waits_for: str
    spool_bytes: int
    error: Exception | None = None
    num_jobs: int = 0
    pid: int = field(default_factory=os.getpid)
    place: str = field(default_factory=place)


class WorkerProcess(ABC, StoresGroups):
    """An actor with a store of groups. `coordinator.Workers` has the same calls, over all of them."""

    def __init__(
        self, config: Config, number: int, process: str, run_dir: str, queue_address: QueueAddress | None
    ) -> None:
        """`process`: its name in logs and events; `number`: of its spool."""
        limit_threads(config)
        yield_to_trainers(config)
        setup_logging(Path(run_dir), process)
        self._events = open_events(Path(run_dir), process)
        self._queue = connect_store(config, queue_address)
        self._store = group_store(config, Path(run_dir), self._queue, worker=number)
        self._source = cast("PromptsByNumber", load_data_source(config.flat))  # the RolloutManager has looked
        collect_when_asked()

    def replace_queue(self, address: QueueAddress) -> None:
        """Store in another queue from now on. This process reads nothing there."""
        replace_queue(self._queue, address, is_filled=True)

    @abstractmethod
    def start(self, num_workers: int) -> None:
        """Begin; `num_workers` share the slots."""

    @abstractmethod
    def share(self, num_workers: int) -> None: ...

    @abstractmethod
    def stop(self) -> None: ...

    @abstractmethod
    def report(self) -> WorkerReport:
        """Return at once, whatever the process does."""

    def take_stats(self) -> tuple[WorkerStats, list[DroppedGroup]]:
        """Return what was counted since the last call, which is made once a round."""
        collect_garbage()
        return self._take_stats()

    @abstractmethod
    def _take_stats(self) -> tuple[WorkerStats, list[DroppedGroup]]: ...

    @abstractmethod
    def close(self) -> None: ...
