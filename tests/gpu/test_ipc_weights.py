"""Weights from one process to another on one GPU, through memory of the GPU, as --colocate sends them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from tests.helpers.faulty_sender import OTHER_BYTES, Faulty
from tests.helpers.training import ROOT

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BUCKET = 1 << 20
SIZES = [3, 400_000, 70_000, 1, 900_000, 12]  # floats; the fifth is larger than a bucket


@pytest.fixture
def engine() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.helpers.ipc_pair"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    yield process
    process.kill()
    process.wait(30)


@pytest.mark.timeout(180)
def test_what_the_engine_opened_has_the_hash_of_what_was_sent(
    engine: subprocess.Popen[str],
) -> None:
    """Every bucket is overwritten by the second after it: one that the engine did not copy would have other bytes."""
    from vime.weights.ipc import IpcSender
    from vime.weights.plan import TensorMeta

    tensors = [(f"w{at}", torch.randn(size, device="cuda")) for at, size in enumerate(SIZES)]
    metadata = [TensorMeta.of(*pair) for pair in tensors]
    sender = IpcSender(bucket_bytes=BUCKET, timeout_s=60)
    told: list[dict[str, Any]] = []
    sender.connect(cast("Any", SimpleNamespace(addresses=[""], init_transfer=told.extend)))
    assert told == [{"transport": "ipc"}]
    responses: list[dict[str, Any]] = []

    def deliver(update_info: Any) -> None:
        assert engine.stdin is not None
        assert engine.stdout is not None
        engine.stdin.write(json.dumps(update_info) + "\n")
        engine.stdin.flush()
        responses.append(json.loads(engine.stdout.readline()))

    before = torch.cuda.memory_allocated()
    content = sender.send_update(iter(tensors), metadata, deliver)
    assert len(responses) > 3
    assert responses[-1]["hash"] == content.hexdigest() != ""
    assert torch.cuda.memory_allocated() == before, "nothing is held until the next update"


@pytest.mark.timeout(180)
@pytest.mark.parametrize("fault", OTHER_BYTES)
def test_other_bytes_than_were_sent_through_memory_of_a_gpu_have_another_hash(
    fault: str, engine: subprocess.Popen[str]
) -> None:
    """Each tensor but the last is a bucket of its own; the two of the last bucket are alike, so that they can swap."""
    from vime.weights.ipc import IpcSender
    from vime.weights.plan import TensorMeta

    sizes = [BUCKET // 4, BUCKET // 4, 70_000, 70_000]
    faulty = Faulty("none", IpcSender(bucket_bytes=BUCKET, timeout_s=60))
    hashes: list[str] = []

    def deliver(update_info: Any) -> None:
        assert engine.stdin is not None
        assert engine.stdout is not None
        engine.stdin.write(json.dumps(update_info) + "\n")
        engine.stdin.flush()
        hashes.append(json.loads(engine.stdout.readline())["hash"])

    for of_update in ("none", fault):  # the sound one brings what is stale
        faulty.fault = of_update
        tensors = [(f"w{at}", torch.randn(size, device="cuda")) for at, size in enumerate(sizes)]
        content = faulty.sender.send_update(iter(tensors), [TensorMeta.of(*pair) for pair in tensors], deliver)
        assert (hashes[-1] == content.hexdigest()) == (of_update == "none")


def test_host_buffers_of_a_sleeping_trainer_are_page_locked_and_used_again() -> None:
    from vime.backends.offload import Offload

    weights, offload = torch.arange(1 << 20, device="cuda", dtype=torch.float32), Offload()
    held, places = torch.cuda.memory_allocated(), set()
    for value in (0.0, 1.0):
        weights += value
        offload.sleep([weights])
        assert torch.cuda.memory_allocated() <= held - weights.numel() * 4
        [(_, host)] = offload._kept
        assert host.is_pinned()
        places.add(host.data_ptr())
        offload.wake_up()
        assert weights[:3].tolist() == [value, value + 1, value + 2]
    assert len(places) == 1
