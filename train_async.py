"""Train with one round of prefetch: the next round is generated while this one trains (staleness 1)."""

import sys

from vime.ray.launch import main
from vime.ray.machine import Machine


def train(machine: Machine) -> None:
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


if __name__ == "__main__":
    sys.exit(main(train, is_async=True))
