"""The runs that tests/gpu start on one, two and four GPUs are not refused by what can be checked without a GPU."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.helpers.families import EXPORTS
from tests.helpers.gpu_runs import gpu_run
from tests.helpers.training import TinyTask
from vime.config.command_line import parse_command_line
from vime.ray.preflight import preflight


@pytest.fixture(autouse=True)
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vime.config.checks.has_cuda", lambda: True)


@pytest.mark.parametrize(("size", "is_shared", "transport"), [(1, True, "shm"), (1, False, "nccl"), (2, False, "nccl")])
def test_trainer_and_engine_have_as_many_gpus(size: int, is_shared: bool, transport: str, tiny_task: TinyTask) -> None:
    config = parse_command_line(gpu_run(tiny_task, "bf16", size, is_shared=is_shared))
    assert (config.cluster.num_engines, config.cluster.rollout_num_gpus) == (1, size)
    assert (config.parallel.tensor_model_parallel_size, config.cluster.actor_num_gpus_per_node) == (size, size)
    assert config.weights.update_weight_transport == transport


def test_the_largest_of_them_gets_through_preflight(
    tiny_task: TinyTask, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = dataclasses.replace(tiny_task, model=EXPORTS["experts"](tmp_path / "model"))
    preflight(parse_command_line(gpu_run(task, "bf16", 2, is_shared=False)), is_async=False)
    assert "was not checked" not in capsys.readouterr().err  # of the ranks' memory: they were built, on meta tensors
