"""A process becomes a trainer only when asked, and only on the device it was asked for."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from vime.backends.megatron_utils import cpu_device
from vime.backends.megatron_utils.initialize import prepare_process
from vime.types import ConfigError


def test_importing_the_trainer_redirects_nothing_and_loads_no_megatron() -> None:
    script = (
        "import sys, torch\n"
        "def names():\n"
        "    cuda, tensor = torch.cuda, torch.Tensor\n"
        "    return [cuda.current_device, cuda.synchronize, tensor.cuda, tensor.type, torch.tensor]\n"
        "before = names()\n"
        "import vime.backends.megatron_utils.backend\n"
        "assert all(old is new for old, new in zip(before, names(), strict=True))\n"
        "assert not any(name.startswith('megatron') for name in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, env={**os.environ}, check=False
    )
    assert done.returncode == 0, done.stderr


def test_install_does_nothing_where_cuda_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = torch.cuda.current_device
    assert cpu_device.install() == []
    assert torch.cuda.current_device is before


def test_every_redirection_says_why_and_names_something_once() -> None:
    names = [entry.name for entry in cpu_device.REDIRECTIONS]
    assert len(set(names)) == len(names)
    assert all(len(entry.reason) > 10 for entry in cpu_device.REDIRECTIONS)
    assert "torch.tensor" not in names
    assert "torch.zeros" not in names


def test_a_rank_on_a_gpu_has_one_queue_of_kernels_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job's environment would give it to the engines too."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    prepare_process("cuda")
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "8"
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    prepare_process("cuda")
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"


def test_a_device_the_process_does_not_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # taken back behind the test
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="--device cuda"):
        prepare_process("cuda")


def test_a_cpu_run_with_a_visible_gpu_is_refused_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match='CUDA_VISIBLE_DEVICES=""'):
        prepare_process("cpu")
