"""The carriers that the contract is held against: the fake, object references, and the real TransferQueue."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.helpers.ray_cluster import ray_cluster  # noqa: F401
from vime.config.training import QueueConfig
from vime.handoff.memory import MemoryCarrier
from vime.handoff.object_refs import ObjectRefCarrier

EXTRA, WIDE = ("teacher_log_probs",), ("rollout_routed_experts",)
BACK_PRESSURE_S = 2.0


@dataclass
class Case:
    """A carrier as the writer and as a reader see it, and a way to lose what is stored for a rank behind its back."""

    writer: Any
    reader: Any
    lose_one: Callable[[Any], None]


def _memory(extra: tuple[str, ...]) -> Case:
    carrier = MemoryCarrier(timeout_s=BACK_PRESSURE_S, extra=extra)

    def lose_one(ticket: Any) -> None:
        carrier.partitions[ticket.partition][1][0] = b""

    return Case(carrier, carrier, lose_one)


def _object_refs(extra: tuple[str, ...]) -> Case:
    objects: dict[int, Any] = {}

    def put(value: Any) -> int:
        objects[len(objects)] = value
        return len(objects) - 1

    carrier = ObjectRefCarrier(put=put, get=objects.__getitem__, free=objects.pop, extra=extra)
    return Case(carrier, carrier, lambda ticket: objects.pop(ticket.references[0]))


@pytest.fixture(scope="session")
def queue_address(ray_cluster: None) -> Iterator[Any]:  # noqa: F811
    import ray

    from vime.handoff.queue_client import start_queue, stop_queue

    address = start_queue(QueueConfig(num_data_storage_units=2), remote=ray.remote)
    yield address
    stop_queue(address)


@pytest.fixture
def transfer_queue(queue_address: Any, request: pytest.FixtureRequest) -> Iterator[Case]:
    yield from _transfer_queue(EXTRA, queue_address, request)


@pytest.fixture
def wide_transfer_queue(queue_address: Any, request: pytest.FixtureRequest) -> Iterator[Case]:
    yield from _transfer_queue(WIDE, queue_address, request)


def _transfer_queue(extra: tuple[str, ...], queue_address: Any, request: pytest.FixtureRequest) -> Iterator[Case]:
    from vime.handoff.bridge import TransferQueueBridge

    prefix = f"test{abs(hash(request.node.name))}"  # a namespace of its own for each test
    config = QueueConfig(
        transferqueue_partition=prefix, transferqueue_timeout_secs=60.0, transfer_queue_extra_data_fields=extra
    )
    writer = TransferQueueBridge.connect(queue_address, config)
    reader = TransferQueueBridge.connect(queue_address, config)
    writer._timeout_s = BACK_PRESSURE_S  # room is waited for less long than a call

    def lose_one(ticket: Any) -> None:
        client = reader._client
        key = ticket.keys[0][0]
        meta = client._call(client._client.async_kv_retrieve_meta([key], ticket.partition), "look up a key")
        assert meta.size == 1
        client._call(client._client.async_clear_samples(meta), "lose a key")

    yield Case(writer, reader, lose_one)
    for name in writer._client.list_partitions():
        if name.startswith(prefix):
            writer._client.clear_partition(name)
    writer.close()
    reader.close()


@pytest.fixture(params=["memory", "object_refs", "transfer_queue"])
def case(request: pytest.FixtureRequest) -> Case:
    if request.param == "memory":
        return _memory(EXTRA)
    if request.param == "object_refs":
        return _object_refs(EXTRA)
    return request.getfixturevalue("transfer_queue")


@pytest.fixture(params=["memory", "object_refs", "transfer_queue"])
def wide_case(request: pytest.FixtureRequest) -> Case:
    """Carriers of a column with several numbers a token."""
    if request.param == "transfer_queue":
        return request.getfixturevalue("wide_transfer_queue")
    return _memory(WIDE) if request.param == "memory" else _object_refs(WIDE)


@pytest.fixture(params=["memory", "transfer_queue"])
def bounded_case(request: pytest.FixtureRequest) -> Case:
    """The carriers that hold rounds themselves and therefore limit how many."""
    return _memory(EXTRA) if request.param == "memory" else request.getfixturevalue("transfer_queue")
