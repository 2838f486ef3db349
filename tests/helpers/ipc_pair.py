"""The engine's end of transport `ipc` as a process of its own: `python -m tests.helpers.ipc_pair`. Reads what an engine
is told, a line of JSON for each bucket, and responds to each with a line; the last has the hash of what it received."""

from __future__ import annotations

import json
import sys

import torch

from vime.weights.ipc import IpcReceiver


def main() -> None:
    receiver = IpcReceiver(torch.device("cuda", 0))
    for line in sys.stdin:
        told, held = json.loads(line), 0
        if told["index"] == 0:
            receiver.start()
        for pairs in receiver.receive(told):
            assert all(tensor.is_cuda for _, tensor in pairs)
            held = torch.cuda.memory_allocated()
        is_last = told["index"] + 1 == told["count"]
        if is_last:
            receiver.finish()
        said = {"hash": receiver.content_hash if is_last else "", "allocated": held}
        sys.stdout.write(json.dumps(said) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
