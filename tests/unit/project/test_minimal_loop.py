"""The one-file example learns, and stays one readable file."""

import runpy
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "minimal_loop.py"


def test_the_minimal_loop_learns() -> None:
    curve = runpy.run_path(str(EXAMPLE))["run"](30)
    # chance is 1 in 10 digits; 30 rounds reach about 0.7
    assert sum(curve[:3]) / 3 < 0.2
    assert sum(curve[-3:]) / 3 > 0.5


def test_the_minimal_loop_fits_on_a_few_screens() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 200
