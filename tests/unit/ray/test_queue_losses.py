"""The queue that takes the place of a lost one may be lost itself."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from vime.ray import queue_keeper
from vime.ray.losses import Losses
from vime.types import ClusterError, HandoffLostError


@pytest.fixture
def keeper(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Of queues whose only actor does not respond: queue number N is the address N."""
    made: Any = object.__new__(queue_keeper.QueueKeeper)
    made._config = SimpleNamespace(
        cluster=SimpleNamespace(max_restarts=3), queue=SimpleNamespace(transferqueue_timeout_secs=60)
    )
    made._events, made._losses = SimpleNamespace(emit=lambda *_, **__: None), Losses("the queue")
    made._num_lost, made._told, made._asked, made._silence, made.address = 0, [], {}, {}, 0
    made._is_closed, made._trainers, made._manager = threading.Event(), None, SimpleNamespace(ask=lambda *_: None)
    made._is_closed.wait = lambda _s: False
    starts = iter(range(1, 9))
    monkeypatch.setattr(queue_keeper, "start_queue", lambda _config: next(starts))
    monkeypatch.setattr(queue_keeper, "_kill", lambda _address: None)
    monkeypatch.setattr(queue_keeper, "is_dead", lambda _address: False)
    monkeypatch.setattr(queue_keeper, "actors_of", lambda _address: {"controller": None})
    monkeypatch.setattr(queue_keeper, "ask_whether_it_lives", lambda _actor: "answer")
    monkeypatch.setattr(queue_keeper, "ray", SimpleNamespace(wait=lambda refs, timeout: ([], refs)))

    def wait_for(_refs: object, *, on_poll: Callable[[], None], **_: object) -> None:
        on_poll()

    monkeypatch.setattr(queue_keeper, "wait_for", wait_for)
    yield made
    made._losses.end()


@pytest.mark.parametrize(("num_hang", "is_replaced"), [(1, True), (2, True), (9, False)])
def test_one_that_hangs_is_replaced_as_one_that_is_dead(
    num_hang: int, is_replaced: bool, keeper: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    silence = SimpleNamespace(is_too_long=lambda: keeper.address <= num_hang)
    monkeypatch.setattr(queue_keeper, "Silence", lambda: silence)
    if is_replaced:
        keeper._replace(ClusterError("The controller died"))
        assert keeper.address == num_hang + 1
    else:
        with pytest.raises(HandoffLostError, match="has not responded"):
            keeper._replace(ClusterError("The controller died"))
