"""The schedules of a run: which step follows which, and what overlaps. `train.py` and `vime train` drive the first,
`train_async.py` and `vime train-async` the second."""

from __future__ import annotations

from vime.ray.components import Components


def train(components: Components) -> None:
    """The synchronous schedule: every token is sampled by the weights that it trains."""
    for rollout_id in components.rounds():
        generated = components.generate(rollout_id)
        components.train(generated)
        components.save_if_due(rollout_id)
        components.publish()
        components.evaluate_if_due(rollout_id)


def train_async(components: Components) -> None:
    """The overlapped schedule. Weights change only between rounds of generation, never during one."""
    pending = None
    for rollout_id in components.rounds():
        generated = components.generate(rollout_id, pending)
        pending = components.start_generation(rollout_id + 1) if rollout_id < components.last_round else None
        components.train(generated)
        components.save_if_due(rollout_id)
        if pending is not None:
            components.wait_until_generated(pending)
        components.publish()
        components.evaluate_if_due(rollout_id)
