"""Train: generate, learn, publish, round after round. `python train.py --help` lists the flags."""

import sys

from vime.ray.launch import main
from vime.ray.machine import Machine


def train(machine: Machine) -> None:
    """The synchronous rhythm: every token is sampled by the weights that it trains."""
    for rollout_id in machine.rounds():
        generated = machine.generate(rollout_id)
        machine.train(generated)
        machine.save_if_due(rollout_id)
        machine.publish()
        machine.evaluate_if_due(rollout_id)


if __name__ == "__main__":
    sys.exit(main(train))
