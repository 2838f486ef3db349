"""Flags of whole runs on GPUs, for the tests that start them and for one that checks them where there is no GPU."""

from __future__ import annotations

from tests.helpers.training import TinyTask

ROUNDS = 3
SHARE = ("--vllm-gpu-memory-utilization", "0.1", "--vllm-kv-cache-memory-bytes", str(1 << 28))
"""Of the GPU, for the engine of a run. With the size of its cache given vLLM does not measure what is free, which other
processes change meanwhile."""


def gpu_run(task: TinyTask, precision: str, size: int, *, is_shared: bool) -> list[str]:
    """A trainer of `size` GPUs and an engine of as many, both tensor-parallel. `is_shared`: one GPU is counted twice,
    and NCCL, which has one rank a GPU, cannot carry the weights."""
    flags = ["cuda" if flag == "cpu" else flag for flag in task.flags()]
    flags += ["--actor-num-gpus-per-node", str(size), "--tensor-model-parallel-size", str(size)]
    flags += ["--rollout-num-gpus", str(size), "--rollout-num-gpus-per-engine", str(size), *SHARE]
    flags += ["--sequence-parallel"] * (size > 1)
    flags += ["--check-weight-update-equal", "--bf16" if precision == "bf16" else "--no-bf16"]
    return [*flags, "--num-rollout", str(ROUNDS), "--update-weight-transport", "shm" if is_shared else "nccl"]
