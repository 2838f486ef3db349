"""--colocate on one GPU: a whole run in which engine and trainer free its memory for each other."""

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
def test_an_engine_and_a_trainer_take_turns_on_one_gpu(tiny_task: TinyTask, tmp_path: Path) -> None:
    flags = [*tiny_task.flags(), "--num-rollout", "2", "--colocate", "--actor-num-gpus-per-node", "1"]
    flags[flags.index("--device") + 1] = "cuda"
    flags += ["--vllm-gpu-memory-utilization", "0.5", "--vllm-enforce-eager", "--check-weight-update-equal"]
    finished = train(flags, tmp_path / "run")
    assert finished.code == 0, finished.output
    assert json.loads((tmp_path / "run" / "config.json").read_text())["weights"]["update_weight_transport"] == "ipc"
    assert len(set(finished.confirmed_hashes())) == 3  # the initial weights, then one version a round
    freed = [float(gib) for gib in FREED.findall((tmp_path / "run" / "logs" / "vllm-0.log").read_text())]
    print(f"GiB freed: {freed}; {finished.metrics()[1]}")  # noqa: T201  the figures belong in the log
    assert len(freed) == 3  # before the trainer's model is built, and before each round of training
    assert min(freed) > 1  # half of the GPU is the cache
