"""Train: generate, learn, publish, round after round. `python train.py --help` lists the flags; the schedule itself is
`vime/ray/driver.py::train`."""

import sys

from vime.cli.train import run_train

if __name__ == "__main__":
    sys.exit(run_train("train"))
