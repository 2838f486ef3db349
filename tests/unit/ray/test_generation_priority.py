"""Generation yields to the trainer, but not to everything else on the machine."""

import os
import subprocess
import sys

import pytest

from vime.ray.cluster import GENERATION_NICENESS


def test_beside_busy_processes_generation_keeps_a_third_of_a_core() -> None:
    """Linux divides a core by weights that fall by a factor of 1.25 with each step of niceness. At 3 that is 0.512 of
    the weight of a busy process of niceness 0, which is 0.512 / 1.512 = 0.34 of a core that both want; at 15, 0.03."""
    weight = 1.25**-GENERATION_NICENESS
    assert weight < 1
    assert weight / (1 + weight) > 0.33


@pytest.mark.parametrize(("start", "expected"), [(0, 3), (10, 13), (18, 19)])
def test_generation_yields_to_the_trainers_of_its_own_run_however_nice_the_run_is(start: int, expected: int) -> None:
    """The trainers keep what the run was started with. A restarted engine is lowered by an actor that is lowered."""
    program = f"""
import os
os.nice({start} - os.nice(0))
from vime.config.parse import Config
from vime.ray.cluster import yield_to_trainers
for _ in range(2):
    yield_to_trainers(Config().replace(device="cpu"))
print(os.nice(0))
"""
    if start < os.nice(0):
        pytest.skip("this session was started with a lower priority, which cannot be raised again")
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert said.returncode == 0, said.stderr
    assert int(said.stdout) == expected
