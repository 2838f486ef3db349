"""What every process of a rollout worker does with what it holds."""

from types import SimpleNamespace

import pytest

from vime.ray import worker_process
from vime.ray.worker_process import WorkerProcess


class Idle(WorkerProcess):
    """Has nothing to do."""

    def start(self, num_workers: int) -> None: ...
    def share(self, num_workers: int) -> None: ...
    def stop(self) -> None: ...
    def report(self) -> None: ...
    def close(self) -> None: ...

    def _take_stats(self) -> tuple[str, list[object]]:
        return "stats", []


def test_what_a_worker_holds_is_scanned_once_a_round_and_at_no_other_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the RolloutManager: a full collection in the middle of a round looks at every token that is held."""
    done: list[str] = []
    for name in ("limit_threads", "yield_to_trainers", "setup_logging", "open_events", "connect_store", "group_store"):
        monkeypatch.setattr(worker_process, name, lambda *given, **named: None)
    monkeypatch.setattr(worker_process, "load_data_source", lambda args: done.append("source is read"))
    monkeypatch.setattr(worker_process, "collect_when_asked", lambda: done.append("only when asked"))
    monkeypatch.setattr(worker_process, "collect_garbage", lambda: done.append("scanned"))
    worker = Idle(SimpleNamespace(flat=None), 0, "rollout-worker-0", "run", None)
    assert done == ["source is read", "only when asked"]
    assert worker.take_stats() == ("stats", [])
    assert done[2:] == ["scanned"]
