"""The rhythms of a run: which station follows which, and what overlaps. `train.py` and `vime train` drive the first,
`train_async.py` and `vime train-async` the second."""

from __future__ import annotations

from vime.ray.machine import Machine


def train(machine: Machine) -> None:
    """The synchronous rhythm: every token is sampled by the weights that it trains."""
    for rollout_id in machine.rounds():
        generated = machine.generate(rollout_id)
        machine.train(generated)
        machine.save_if_due(rollout_id)
        machine.publish()
        machine.evaluate_if_due(rollout_id)


def train_async(machine: Machine) -> None:
    """The overlapped rhythm. Weights move only between rounds of generation, never under one."""
    pending = None
    for rollout_id in machine.rounds():
        generated = machine.generate(rollout_id, pending)
        pending = machine.start_generation(rollout_id + 1) if rollout_id < machine.last_round else None
        machine.train(generated)
        machine.save_if_due(rollout_id)
        if pending is not None:
            machine.wait_until_generated(pending)
        machine.publish()
        machine.evaluate_if_due(rollout_id)
