"""What every process beside the RolloutManager answers that stores groups: rollout workers, and the gateway."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vime.handoff.group_store import GroupStore, StoredGroup
from vime.handoff.ledger_types import Task
from vime.observability.samples import DroppedGroup
from vime.rollout.group_worker import WorkerStats
from vime.types import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReport:
    """State of a process. `error`: what ended its work; `num_jobs`: jobs outside that take prompts through it now."""

    stats: WorkerStats
    num_running: int
    waits_for: str
    spool_bytes: int
    error: Exception | None = None
    num_jobs: int = 0


class WorkerProcess(ABC):
    """An actor with a store of groups. `coordinator.Workers` has the same calls, over all of them."""

    _store: GroupStore

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

    @abstractmethod
    def take_stats(self) -> tuple[WorkerStats, list[DroppedGroup]]: ...

    @abstractmethod
    def close(self) -> None: ...

    def samples(self, groups: Sequence[StoredGroup]) -> list[list[Sample]]:
        """Return the samples of finished groups, whichever process stored them."""
        return [self._store.samples(group.task, group.checksum) for group in groups]

    def restore(self, groups: Sequence[StoredGroup]) -> None:
        self._store.restore(groups)

    def release(self, tasks: Sequence[Task]) -> None:
        self._store.release(tasks)

    def compact(self, needed: Mapping[Task, int | None]) -> int:
        return self._store.compact(needed)
