"""What jobs outside have committed and dropped, counted while they go on."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from vime.ray.gateway import GatewayActor
from vime.rollout.group_worker import WorkerStats


class Growing(Counter[str]):
    """A job drops a group for a new reason whenever somebody goes through the old ones."""

    def items(self) -> Iterator[tuple[str, int]]:  # type: ignore[override]
        for reason, count in super().items():
            self[f"after {reason}"] += 1
            yield reason, count


@pytest.fixture
def gateway() -> Any:
    found: Any = GatewayActor.__new__(GatewayActor)
    jobs = {"job": SimpleNamespace(committed=3, dropped=Growing(slow=2))}
    found._gateway = SimpleNamespace(jobs=jobs, rewards=[1.0, 0.0], masked_tokens=5)
    found._taken, found._counting = WorkerStats(), threading.Lock()
    return found


def test_reasons_that_come_while_they_are_counted_do_not_end_the_count(gateway: Any) -> None:
    assert gateway._stats().dropped == {"slow": 2}


def test_each_count_and_reward_is_taken_once(gateway: Any) -> None:
    assert gateway._stats().committed_groups == 3
    taken, _ = gateway._take_stats()
    assert (taken.committed_groups, taken.dropped, taken.rewards) == (3, {"slow": 2}, [1.0, 0.0])
    assert taken.partial.masked_tokens == 5
    gateway._gateway.jobs["job"].committed += 1
    gateway._gateway.rewards += [0.5]
    gateway._gateway.masked_tokens += 1
    taken, _ = gateway._take_stats()
    assert (taken.committed_groups, taken.dropped, taken.rewards) == (1, {}, [0.5])
    assert taken.partial.masked_tokens == 1
