"""Generation yields to the trainer, but not to everything else on the machine."""

from vime.ray.cluster import GENERATION_NICENESS


def test_beside_busy_processes_generation_keeps_a_third_of_a_core() -> None:
    """Linux divides a core by weights that fall by a factor of 1.25 with each step of niceness. At 3 that is 0.512 of
    the weight of a busy process of niceness 0, which is 0.512 / 1.512 = 0.34 of a core that both want; at 15, 0.03."""
    weight = 1.25**-GENERATION_NICENESS
    assert weight < 1
    assert weight / (1 + weight) > 0.33
