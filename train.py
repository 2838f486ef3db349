"""Train: generate, learn, publish, round after round. `python train.py --help` lists the flags; the rhythm itself is
`vime/ray/rhythms.py::train`."""

import sys

from vime.ray.launch import main
from vime.ray.rhythms import train

if __name__ == "__main__":
    sys.exit(main(train))
