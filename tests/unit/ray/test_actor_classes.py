"""Ray copies the class of an actor to its process, with every global that its methods name."""

from __future__ import annotations

import ray.cloudpickle

from vime.ray.rollout_manager import RolloutManager


def test_the_manager_s_class_can_be_sent_to_its_process() -> None:
    """A lock in a global that a method names would end each run at its start."""
    assert ray.cloudpickle.dumps(ray.remote(RolloutManager).__ray_metadata__.modified_class)
