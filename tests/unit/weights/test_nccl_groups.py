"""A group of NCCL that cannot be joined, or whose peer is gone, is aborted: a stand-in is in the place of torch's
group, which needs GPUs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from vime.types import EngineAddress, EngineError, PublishError
from vime.weights.broadcast import BroadcastSender, NcclReceiver
from vime.weights.plan import TensorMeta, cut_buckets
from vime.weights.rendezvous import open_store

DEADLINE_S = 20


class NcclStandIn:
    """What torch's ProcessGroupNCCL does of what is used here. `abort` ends a broadcast that waits for a peer."""

    class Options:
        _timeout: timedelta

    made: list[NcclStandIn]
    may_be_made: threading.Event
    is_made: threading.Event
    broadcasts: Callable[[NcclStandIn, torch.Tensor], None]

    def __init__(self, store: dist.Store, rank: int, world_size: int, options: Options) -> None:
        self.aborted = threading.Event()
        assert self.may_be_made.wait(DEADLINE_S)
        self.made.append(self)
        self.is_made.set()

    def broadcast(self, tensors: list[torch.Tensor], options: dist.BroadcastOptions) -> NcclStandIn:
        type(self).broadcasts(self, tensors[0])
        return self

    def wait(self) -> None:
        pass

    def abort(self) -> None:
        self.aborted.set()


def waits_for_a_peer(group: NcclStandIn, tensor: torch.Tensor) -> None:
    assert group.aborted.wait(DEADLINE_S)
    raise dist.DistBackendError("NCCL communicator was aborted")


def fails(group: NcclStandIn, tensor: torch.Tensor) -> None:
    raise dist.DistBackendError("NCCL: remote process exited")


def arrives(group: NcclStandIn, tensor: torch.Tensor) -> None:
    tensor.fill_(1)


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> type[NcclStandIn]:
    may_be_made = threading.Event()
    may_be_made.set()
    members = {"made": [], "may_be_made": may_be_made, "is_made": threading.Event(), "broadcasts": arrives}
    stand_in = type("NcclStandIn", (NcclStandIn,), members)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", stand_in, raising=False)
    monkeypatch.setattr("vime.weights.broadcast._device", lambda backend: torch.device("cpu"))
    return stand_in


class Fleet:
    """One engine, which joins, or refuses when rank 0 has begun to wait for it."""

    addresses: Sequence[EngineAddress] = (EngineAddress(name="e0", url="http://127.0.0.1:1"),)

    def __init__(self, refuses_when: Callable[[], bool] | None = None) -> None:
        self._refuses_when = refuses_when

    def world_sizes(self) -> list[int]:
        return [1]

    def init_transfer(self, infos: Sequence[Mapping[str, object]]) -> None:
        if self._refuses_when is not None:
            assert self._refuses_when()
            raise EngineError("e0 refuses to join")


def sender() -> BroadcastSender:
    return BroadcastSender("nccl", bucket_bytes=128, timeout_s=DEADLINE_S)


def assert_aborted(nccl: type[NcclStandIn]) -> None:
    [group] = nccl.made
    assert group.aborted.wait(DEADLINE_S), "the group is left as it was"


def test_a_group_in_which_rank_0_waits_for_an_engine_that_refused_is_aborted(nccl: type[NcclStandIn]) -> None:
    waiting = threading.Event()

    def waits(group: NcclStandIn, tensor: torch.Tensor) -> None:
        waiting.set()
        waits_for_a_peer(group, tensor)

    nccl.broadcasts = waits
    with pytest.raises(EngineError, match="e0 refuses to join"):
        sender().connect(Fleet(refuses_when=lambda: waiting.wait(DEADLINE_S)))  # type: ignore[arg-type]
    assert_aborted(nccl)


def test_a_group_that_is_made_after_the_connect_failed_is_aborted(nccl: type[NcclStandIn]) -> None:
    nccl.may_be_made.clear()
    nccl.broadcasts = waits_for_a_peer
    with pytest.raises(EngineError, match="e0 refuses to join"):
        sender().connect(Fleet(refuses_when=lambda: True))  # type: ignore[arg-type]
    assert nccl.made == []
    nccl.may_be_made.set()
    assert nccl.is_made.wait(DEADLINE_S)
    assert_aborted(nccl)


def test_a_group_whose_first_broadcast_fails_is_aborted_by_the_sender(nccl: type[NcclStandIn]) -> None:
    nccl.broadcasts = fails
    with pytest.raises(dist.DistBackendError, match="remote process exited"):
        sender().connect(Fleet())  # type: ignore[arg-type]
    assert_aborted(nccl)


def test_a_group_that_was_joined_is_kept(nccl: type[NcclStandIn]) -> None:
    connected = sender()
    connected.connect(Fleet())  # type: ignore[arg-type]
    assert not nccl.made[0].aborted.is_set()
    connected.close()


@pytest.fixture
def told() -> Iterator[dict[str, object]]:
    store = open_store("127.0.0.1", 0, 2, timeout=timedelta(seconds=DEADLINE_S))
    yield {
        "master_address": "127.0.0.1",
        "master_port": store.port,
        "world_size": 2,
        "rank_offset": 1,
        "timeout_s": DEADLINE_S,
        "group": "first",
    }
    del store


def test_a_group_whose_first_broadcast_fails_is_aborted_by_the_engine(
    nccl: type[NcclStandIn], told: dict[str, object]
) -> None:
    nccl.broadcasts = fails
    receiver = NcclReceiver(torch.device("cpu"))
    with pytest.raises(dist.DistBackendError, match="remote process exited"):
        receiver.connect(told, 0)
    assert_aborted(nccl)


def test_a_group_whose_sender_dies_between_two_buckets_is_aborted_by_the_engine(
    nccl: type[NcclStandIn], told: dict[str, object]
) -> None:
    receiver = NcclReceiver(torch.device("cpu"))
    receiver.connect(told, 0)
    nccl.broadcasts = fails
    buckets = cut_buckets([TensorMeta.of("a", torch.zeros(8))], 128)
    with pytest.raises(dist.DistBackendError, match="remote process exited"):
        next(receiver._read(buckets, {}))
    with pytest.raises(PublishError, match=r"given up\. Connect first"):
        next(receiver._read(buckets, {}))
    assert_aborted(nccl)
