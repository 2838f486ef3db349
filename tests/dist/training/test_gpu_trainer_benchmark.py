"""The benchmark that a first GPU day begins with works before there is a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.timeout(120)
def test_the_trainer_alone_prints_its_figures_on_any_machine() -> None:
    command = [sys.executable, "benchmarks/gpu_trainer.py", "--size", "tiny", "--steps", "1", "--tokens", "512"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "512 tokens a step" in done.stdout
    assert "HFU " in done.stdout
    assert "GiB" in done.stdout
