"""The stores that the contract is held against: a dict, objects of real Ray, and the real TransferQueue."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.helpers.ray_cluster import ray_cluster  # noqa: F401
from vime.config.training import QueueConfig
from vime.handoff.stores import MemoryStore, ObjectStore, PayloadStore


@dataclass
class Case:
    """A store as the writer and as a reader see it, a partition that no other test has, and a way to lose a chunk
    behind their backs."""

    writer: PayloadStore
    reader: PayloadStore
    partition: str
    lose: Callable[[Any], None]


def _memory(name: str) -> Case:
    store = MemoryStore()
    return Case(store, store, name, lambda handle: store.chunks.pop((name, handle)) and None)


def _objects(name: str) -> Case:
    """An object goes with its owner; here its owner frees it."""
    import ray
    from ray._private.internal_api import free

    stores = [ObjectStore(put=ray.put, get=lambda refs: list(ray.get(refs, timeout=5))) for _ in range(2)]
    return Case(*stores, name, lambda handle: free([handle], local_only=False))


@pytest.fixture(scope="session")
def queue_address(ray_cluster: None) -> Iterator[Any]:  # noqa: F811
    import ray

    from vime.handoff.queue_client import start_queue, stop_queue

    address = start_queue(QueueConfig(num_data_storage_units=2), remote=ray.remote)
    yield address
    stop_queue(address)


@pytest.fixture
def transfer_queue(queue_address: Any, request: pytest.FixtureRequest) -> Iterator[Case]:
    from vime.handoff.queue_client import QueueClient

    prefix = f"test{abs(hash(request.node.name))}"  # a namespace of its own for each test
    writer, reader = QueueClient(queue_address, 60.0), QueueClient(queue_address, 60.0)

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


@pytest.fixture(params=["memory", "objects", "transfer_queue"])
def case(request: pytest.FixtureRequest) -> Case:
    if request.param == "memory":
        return _memory("test")
    if request.param == "objects":
        request.getfixturevalue("ray_cluster")
        return _objects("test")
    return request.getfixturevalue("transfer_queue")


@pytest.fixture(params=["memory", "transfer_queue"])
def keyed_case(request: pytest.FixtureRequest) -> Case:
    """The stores that hold what was put until it is cleared, and can therefore say what they hold."""
    return _memory("test") if request.param == "memory" else request.getfixturevalue("transfer_queue")
