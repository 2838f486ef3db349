"""The benchmark that a first GPU day begins with works before there is a GPU."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.timeout(120)
def test_the_trainer_prints_its_figures_beside_plain_torch_on_any_machine() -> None:
    """It ends with an error where the gradient norms of the two differ."""
    command = ["benchmarks/gpu_trainer.py", "--size", "tiny", "--steps", "1", "--tokens", "512", "--plain"]
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "512 tokens a step" in done.stdout
    assert "HFU " in done.stdout
    assert "GiB" in done.stdout
    [ours] = re.findall(r"^tokens/s +(\d+)$", done.stdout, re.MULTILINE)
    [plain] = re.findall(r"^plain +(\d+) tokens/s", done.stdout, re.MULTILINE)
    [ratio] = re.findall(r"^ratio +([\d.]+) ", done.stdout, re.MULTILINE)
    assert float(ratio) == pytest.approx(int(ours) / int(plain), abs=0.011)  # two digits are printed
