"""--colocate on one GPU, and on two: a whole run in which engine and trainer free its memory for each other."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from tests.helpers.training import TinyTask, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
FREED = re.compile(r"Sleep mode freed ([0-9.]+) GiB")


@pytest.mark.timeout(580)
@pytest.mark.parametrize("gpus", [1, 2])
def test_an_engine_and_a_trainer_take_turns_on_one_gpu(gpus: int, tiny_task: TinyTask, tmp_path: Path) -> None:
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} GPUs")
    flags = [*tiny_task.flags(), "--num-rollout", "2", "--colocate", "--actor-num-gpus-per-node", str(gpus)]
    flags[flags.index("--device") + 1] = "cuda"
    flags += ["--vllm-gpu-memory-utilization", "0.5", "--vllm-enforce-eager", "--check-weight-update-equal"]
    finished = train(flags, tmp_path / "run")
    assert finished.code == 0, finished.output
    assert json.loads((tmp_path / "run" / "config.json").read_text())["weights"]["update_weight_transport"] == "ipc"
    assert len(set(finished.confirmed_hashes())) == 3  # the initial weights, then one version a round
    for engine in range(gpus):  # each got them from the rank on its GPU
        freed = [float(gib) for gib in FREED.findall((tmp_path / "run" / "logs" / f"vllm-{engine}.log").read_text())]
        print(f"engine {engine}, GiB freed: {freed}; {finished.metrics()[1]}")  # noqa: T201  figures for the log
        assert len(freed) == 3  # before the trainer's model is built, and before each round of training
        assert min(freed) > 1  # half of the GPU is the cache
