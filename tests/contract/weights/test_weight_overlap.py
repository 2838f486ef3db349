"""The parts of a weight update work at the same time. Each test holds one of them until another has gone on: a part
that waited for the held one would never let it go."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from vime.backends.vllm_utils.control import FleetControl
from vime.backends.vllm_utils.fake import FakeEngine
from vime.weights.broadcast import BroadcastReceiver
from vime.weights.hashing import content_hash
from vime.weights.plan import TensorMeta
from vime.weights.publish import PublishReport, publish
from vime.weights.shm import ShmReceiver
from vime.weights.transports import make_sender
from vime.weights.wire import BucketReceiver

TIMEOUT_S = 60.0
HELD_S = 20.0
WEIGHTS = {f"layer.{index}": torch.full((4_000_000,), float(index)) for index in range(5)}
"""A bucket each, of 16 MB: more than sockets hold, so none has left before the engine takes it."""


def send(transport: str, directory: Path, asked: dict[str, threading.Event]) -> PublishReport:
    """Send a bucket for each tensor; the event of a tensor is set when the sender asks for it to fill its bucket."""

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in WEIGHTS.items():
            asked[name].set()
            yield name, tensor

    with FakeEngine() as engine:
        fleet = FleetControl([engine.address], timeout_s=TIMEOUT_S)
        sender = make_sender(transport, bucket_bytes=16_000_000, directory=directory, timeout_s=TIMEOUT_S)
        try:
            sender.connect(fleet)
            metadata = [TensorMeta.of(name, tensor) for name, tensor in WEIGHTS.items()]
            return publish(
                stream(),
                metadata,
                version=1,
                fleet=fleet,
                sender=sender,
                pause_mode="keep",
                deadline_s=TIMEOUT_S,
            )
        finally:
            sender.close()
            fleet.close()


@pytest.fixture
def asked() -> dict[str, threading.Event]:
    return {name: threading.Event() for name in WEIGHTS}


@pytest.mark.parametrize(("transport", "receiver"), [("shm", ShmReceiver), ("gloo", BroadcastReceiver)])
def test_a_bucket_is_filled_while_the_one_before_has_not_arrived(
    transport: str,
    receiver: type[BucketReceiver],
    asked: dict[str, threading.Event],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    went_on: list[bool] = []
    read = receiver._read

    def held(self: BucketReceiver, *told: Any) -> Iterator[list[torch.Tensor]]:
        went_on.append(asked["layer.1"].wait(HELD_S))
        yield from read(self, *told)

    monkeypatch.setattr(receiver, "_read", held)
    report = send(transport, tmp_path, asked)
    assert went_on[0], "the sender filled no second bucket before the engine had the first"
    assert report.content_hash == content_hash(WEIGHTS)


def test_a_bucket_travels_while_the_engine_loads_the_one_before(
    asked: dict[str, threading.Event], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sender asks for tensor 3 when bucket 1 has arrived and 2 was begun; meanwhile the engine still loads 0."""
    went_on: list[bool] = []
    receive = BucketReceiver.receive

    def held(self: BucketReceiver, told: Any) -> Iterator[list[tuple[str, torch.Tensor]]]:
        for pairs in receive(self, told):
            if not went_on:
                assert [name for name, _ in pairs] == ["layer.0"]
                went_on.append(asked["layer.3"].wait(HELD_S))
            yield pairs

    monkeypatch.setattr(BucketReceiver, "receive", held)
    report = send("gloo", tmp_path, asked)
    assert went_on == [True], "the second bucket did not arrive before the first was loaded"
    assert report.content_hash == content_hash(WEIGHTS)


def test_by_disk_every_file_is_written_before_an_engine_waits(
    asked: dict[str, threading.Event], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines go on generating meanwhile: they are asked when there is nothing left to wait for."""
    seen: list[bool] = []
    receive = BucketReceiver.receive

    def look(self: BucketReceiver, told: Any) -> Iterator[list[tuple[str, torch.Tensor]]]:
        seen.append(all(event.is_set() for event in asked.values()))
        yield from receive(self, told)

    monkeypatch.setattr(BucketReceiver, "receive", look)
    send("disk", tmp_path, asked)
    assert seen == [True]
