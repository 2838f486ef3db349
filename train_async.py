"""Train with one round of prefetch: the next round is generated while this one trains (staleness 1). The rhythm itself
is `vime/ray/rhythms.py::train_async`."""

import sys

from vime.ray.launch import main
from vime.ray.rhythms import train_async

if __name__ == "__main__":
    sys.exit(main(train_async, is_async=True))
