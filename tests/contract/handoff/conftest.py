"""The stores that the contract is held against: a dict, objects of real Ray, and the real TransferQueue."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.helpers.ray_cluster import ray_cluster  # noqa: F401
from vime.config.training import QueueConfig
from vime.handoff.group_store import MemoryStore, ObjectStore, PayloadStore


@dataclass
class Case:
    """A store as the writer and as a reader see it, a partition that no other test has, and a way to lose a chunk
    behind their backs."""

    writer: PayloadStore
    reader: PayloadStore
    partition: str
    lose: Callable[[Any], None]
    travel: Callable[[Any], Any] = lambda ticket: pickle.loads(pickle.dumps(ticket))  # to another process


def _memory(name: str) -> Case:
    store = MemoryStore()
    return Case(store, store, name, lambda handle: store.chunks.pop((name, handle)) and None)


def _objects(name: str) -> Iterator[Case]:
    """Objects of a process that may die, as the RolloutManager is one."""
    import ray

    @ray.remote(num_cpus=0)
    class Owner:
        def put(self, chunk: bytes) -> list[Any]:
            return [ray.put(chunk)]

    owner = Owner.remote()

    def get(handles: list[Any]) -> list[bytes]:
        return list(ray.get(handles, timeout=30))

    def lose(handle: Any) -> None:
        """Ray answers from what it still has for a while after the owner is gone."""
        ray.kill(owner)
        ends = time.monotonic() + 60
        while time.monotonic() < ends:
            try:
                ray.get(handle, timeout=1)
            except ray.exceptions.RayError:
                return
        pytest.fail("the object outlives its owner")

    writer = ObjectStore(put=lambda chunk: ray.get(owner.put.remote(chunk), timeout=30)[0], get=get)
    yield Case(writer, ObjectStore(put=ray.put, get=get), name, lose, lambda ticket: ray.get(ray.put(ticket)))
    ray.kill(owner)


@pytest.fixture(scope="session")
def queue_address(ray_cluster: None) -> Iterator[Any]:  # noqa: F811
    import ray

    from vime.handoff.queue_client import start_queue, stop_queue

    address = start_queue(QueueConfig(num_data_storage_units=2), remote=ray.remote)
    yield address
    stop_queue(address)


@pytest.fixture
def transfer_queue(queue_address: Any, request: pytest.FixtureRequest) -> Iterator[Case]:
    from vime.handoff.lasting_queue import LastingQueue
    from vime.handoff.queue_client import QueueClient

    prefix = f"test{abs(hash(request.node.name))}"  # a namespace of its own for each test
    writer, reader = LastingQueue(queue_address, 60.0), QueueClient(queue_address, 60.0)  # as in mode streaming, buffer

    def lose(handle: Any) -> None:
        meta = reader._call(reader._client.async_kv_retrieve_meta([handle], prefix), "look up a key")
        assert meta.size == 1
        reader._call(reader._client.async_clear_samples(meta), "lose a key")

    yield Case(writer, reader, prefix, lose)
    for name in writer.partitions():
        if name.startswith(prefix):
            writer.clear_partition(name)
    writer.close()
    reader.close()


@pytest.fixture
def objects(ray_cluster: None) -> Iterator[Case]:  # noqa: F811
    yield from _objects("test")


@pytest.fixture(params=["memory", "objects", "transfer_queue"])
def case(request: pytest.FixtureRequest) -> Case:
    return _memory("test") if request.param == "memory" else request.getfixturevalue(request.param)


@pytest.fixture(params=["memory", "transfer_queue"])
def keyed_case(request: pytest.FixtureRequest) -> Case:
    """The stores that hold what was put until it is cleared, and can therefore say what they hold."""
    return _memory("test") if request.param == "memory" else request.getfixturevalue("transfer_queue")
