"""Train with one round of prefetch: the next round is generated while this one trains (staleness 1). The schedule
itself is `vime/ray/driver.py::train_async`."""

import sys

from vime.cli.train import run_train

if __name__ == "__main__":
    sys.exit(run_train("train-async"))
