"""The benchmark of unit costs runs, says what it measured, and fails on a cost that grows too fast."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / "unit_costs.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


def test_each_station_prints_its_table() -> None:
    """Whether the costs are in bounds is for a quiet machine to say; here the two exit codes of an end are."""
    stations = ("read", "worker", "coordinator", "rank", "plan", "stuck")  # `tickets` needs Ray: tests/contract/ray
    said = run("--repeats", "1", "--doublings", "1", "--held", "1", *stations)
    assert said.returncode in (0, 1), said.stderr
    assert (said.returncode == 1) == ("FAULT: " in said.stdout)
    for line in ("16 samples of 512 tokens", "1024 rows", "| 256 |", "read: cost grows as size^"):
        assert line in said.stdout
    assert run("reed").returncode == 2


@pytest.mark.parametrize(("exponent", "is_fault"), [(1.0, False), (1.5, True)])
def test_a_cost_that_grows_too_fast_is_a_fault(exponent: float, is_fault: bool) -> None:
    program = (
        "from benchmarks.unit_costs import grown; sizes = [2**n for n in range(6)]; "
        f"print(bool(grown('made up', sizes, [size**{exponent} for size in sizes])))"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert said.stdout.splitlines()[-1] == str(is_fault), said.stderr
