"""A trainer rank and one engine worker, each a process, that move weights over a broadcast group without vLLM between.

The worker is driven as vLLM would: `init_transfer` and `update` travel through a store, and are answered there.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.helpers.dist_launch import Ranks, launch
from tests.helpers.faulty_sender import Faulty
from vime.types import EngineAddress
from vime.weights.plan import TensorMeta
from vime.weights.transports import make_receiver, make_sender

TIMEOUT_S = 60.0
BUCKET_BYTES = 10_000


class StoreFleet:
    """The part of `protocols.EngineControl` that a sender uses, for the one worker behind the store."""

    addresses: Sequence[EngineAddress] = (EngineAddress(name="engine-0", url="http://127.0.0.1:1"),)

    def __init__(self, store: dist.Store) -> None:
        self._store, self._calls = store, 0

    def world_sizes(self) -> list[int]:
        return [1]

    def init_transfer(self, init_info_by_engine: Sequence[dict[str, Any]]) -> None:
        self._call(init_info_by_engine[0])

    def update(self, update_info: dict[str, Any]) -> None:
        self._call(update_info)

    def finish(self) -> str:
        return self._call(None)

    def _call(self, message: Any) -> str:
        number, self._calls = self._calls, self._calls + 1
        self._store.set(f"call-{number}", json.dumps(message))
        return self._store.get(f"answer-{number}").decode()


def make_weights() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(3)
    return {
        "a.weight": torch.randn(64, 32, generator=draw),
        "b.weight": torch.randn(17, 5, generator=draw).bfloat16(),
        "c.bias": torch.randn(3, generator=draw),
        "d.weight": torch.randn(64, 32, generator=draw),  # in the second bucket, with another of its shape
        "e.weight": torch.randn(4, 8, generator=draw),
        "f.weight": torch.randn(4, 8, generator=draw),
    }


def hashes(directory: Path, backend: str, fault: str = "none") -> tuple[str, str]:
    """Return the content hash of what one process has sent, and of what the other received."""
    arguments = {"backend": backend, "fault": fault}
    sent, received = launch(f"{__name__}:run", world_size=2, directory=directory, arguments=arguments, deadline_s=120)
    return sent, received


def run(ranks: Ranks, backend: str, fault: str = "none") -> str:
    """The content hash of what rank 0 sent, and of what rank 1 received, both on a device of their own. With one of
    `OTHER_BYTES` a sound update of other weights comes before, and then this one with the fault."""
    if backend == "nccl":
        torch.cuda.set_device(ranks.rank)
    device = torch.device("cuda", ranks.rank) if backend == "nccl" else torch.device("cpu")
    port = ranks.rendezvous("pair", 2)
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=ranks.rank == 0, timeout=timedelta(seconds=TIMEOUT_S))
    if ranks.rank == 0:
        return send(store, backend, device, ranks, fault)
    return receive(store, backend, device, fault)


def send(store: dist.Store, backend: str, device: torch.device, ranks: Ranks, fault: str) -> str:
    weights = {name: tensor.to(device) for name, tensor in make_weights().items()}
    sender = make_sender(backend, bucket_bytes=BUCKET_BYTES, directory=ranks.directory, timeout_s=TIMEOUT_S)
    fleet: Any = StoreFleet(store)
    sender.connect(fleet)
    metadata = [TensorMeta.of(name, tensor) for name, tensor in weights.items()]
    if fault != "none":
        faulty = Faulty("none", sender)
        before = {name: tensor + 1 for name, tensor in weights.items()}
        assert sender.send_update(iter(before.items()), metadata, fleet.update).hexdigest() == fleet.finish()
        faulty.fault = fault
    content = sender.send_update(iter(weights.items()), metadata, fleet.update)
    received = fleet.finish()
    assert (received == content.hexdigest()) == (fault == "none"), (received, content.hexdigest())
    sender.close()
    return content.hexdigest()


def receive(store: dist.Store, backend: str, device: torch.device, fault: str) -> str:
    receiver = make_receiver(backend, device)
    receiver.connect(json.loads(store.get("call-0")), 0)
    store.set("answer-0", "")
    number = 1
    for _ in range(1 if fault == "none" else 2):
        receiver.start()
        tensors: dict[str, torch.Tensor] = {}
        while (message := json.loads(store.get(f"call-{number}"))) is not None:
            for pairs in receiver.receive(message):
                tensors.update(pairs)
            store.set(f"answer-{number}", "")
            number += 1
        receiver.finish()
        store.set(f"answer-{number}", receiver.content_hash)
        number += 1
    if fault == "none":
        for name, expected in make_weights().items():
            assert torch.equal(tensors[name].cpu(), expected), name
    return receiver.content_hash
