"""A trainer rank and one engine worker, each a process, that move weights over a broadcast group without vLLM between.

The worker is driven as vLLM would: `init_transfer` and `update` travel through a store, and are answered there.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tests.helpers.dist_launch import Ranks
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
    }


def run(ranks: Ranks, backend: str) -> str:
    """The content hash of what rank 0 sent, and of what rank 1 received, both on a device of their own."""
    if backend == "nccl":
        torch.cuda.set_device(ranks.rank)
    device = torch.device("cuda", ranks.rank) if backend == "nccl" else torch.device("cpu")
    port = ranks.rendezvous("pair", 2)
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=ranks.rank == 0, timeout=timedelta(seconds=TIMEOUT_S))
    return send(store, backend, device, ranks) if ranks.rank == 0 else receive(store, backend, device)


def send(store: dist.Store, backend: str, device: torch.device, ranks: Ranks) -> str:
    weights = {name: tensor.to(device) for name, tensor in make_weights().items()}
    sender = make_sender(backend, bucket_bytes=BUCKET_BYTES, directory=ranks.directory, timeout_s=TIMEOUT_S)
    fleet: Any = StoreFleet(store)
    sender.connect(fleet)
    metadata = [TensorMeta.of(name, tensor) for name, tensor in weights.items()]
    content = sender.send_update(iter(weights.items()), metadata, fleet.update)
    received = fleet.finish()
    assert received == content.hexdigest(), (received, content.hexdigest())
    sender.close()
    return content.hexdigest()


def receive(store: dist.Store, backend: str, device: torch.device) -> str:
    receiver = make_receiver(backend, device)
    receiver.connect(json.loads(store.get("call-0")), 0)
    store.set("answer-0", "")
    receiver.start()
    tensors: dict[str, torch.Tensor] = {}
    number = 1
    while (message := json.loads(store.get(f"call-{number}"))) is not None:
        tensors.update(receiver.receive(message))
        store.set(f"answer-{number}", "")
        number += 1
    receiver.finish()
    for name, expected in make_weights().items():
        assert torch.equal(tensors[name].cpu(), expected), name
    store.set(f"answer-{number}", receiver.content_hash)
    return receiver.content_hash
