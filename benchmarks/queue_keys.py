"""What the keys of the queue cost: puts and gets of payloads through TransferQueue with CURVE and without, in turns.

    .venv/bin/python benchmarks/queue_keys.py [--repeats 60]

Each side is a controller and a storage unit in a process of their own, and a client in another; the sides take turns,
so that what else the machine does falls on both. Medians over the repeats. Ray has no part in it.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import importlib
import multiprocessing
import os
import statistics
import time
from multiprocessing.connection import Connection
from typing import Any

SIZES = {"a group, 100 KB": 100_000, "a round of one rank, 1.5 MB": 1_500_000, "16 MB": 16_000_000}
TIMEOUT_S = 60.0
SIDES = ("without", "with keys")
WARM_UP = 3


class Known:
    """Stands for an actor of the queue of which one asks only where it listens."""

    def __init__(self, info: Any) -> None:
        self.get_zmq_server_info = self
        self._answer: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._answer.set_result(info)

    def remote(self) -> Known:
        return self

    def future(self) -> concurrent.futures.Future[Any]:
        return self._answer


def choose_side(side: str, keys: Any) -> None:
    """Make this process one that asks for and shows keys, or one that is as TransferQueue alone."""
    from vime.handoff import queue_actors, queue_client, queue_keys

    if side == "without":
        queue_actors.secure_sockets = queue_client.secure_sockets = lambda _: None
        for name in queue_keys.HOOKED:
            assert not hasattr(getattr(importlib.import_module(name), queue_keys.HOOK), "without_keys")
    else:
        queue_keys.secure_sockets(keys)


def serve(side: str, keys: Any, pipe: Connection) -> None:
    from vime.handoff.queue_actors import SimpleStorageUnit, TransferQueueController

    choose_side(side, keys)
    controller = TransferQueueController(keys, polling_mode=True)
    unit = SimpleStorageUnit(keys, config={"total_storage_size": None, "num_data_storage_units": 1})
    pipe.send((controller.get_zmq_server_info(), unit.get_zmq_server_info()))
    pipe.recv()  # until the benchmark has ended


def use(side: str, keys: Any, infos: Any, pipe: Connection) -> None:
    """Put, get and clear one payload of each size that is asked for, and say how many seconds put and get took."""
    from vime.handoff.queue_client import QueueAddress, QueueClient

    choose_side(side, keys)
    controller, unit = map(Known, infos)
    address = QueueAddress(run_id="bench", keys=keys, controller=controller, storage_units=(unit,))
    client, number = QueueClient(address, TIMEOUT_S), 0
    pipe.send("ready")
    while size := pipe.recv():
        key, payload, number = [f"key-{number}"], os.urandom(size), number + 1
        times = [time.perf_counter()]
        client.put("bench", key, [payload])
        times.append(time.perf_counter())
        [got] = client.get("bench", key)
        times.append(time.perf_counter())
        assert got == payload
        client.clear("bench", key)
        pipe.send((times[1] - times[0], times[2] - times[1]))
    client.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=60, help="puts and gets of each size and side (default: 60)")
    repeats = parser.parse_args().repeats
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # listen on loopback, as a local run does
    from vime.handoff.queue_keys import QueueKeys
    from vime.handoff.queue_modules import QUEUE_ENVIRONMENT

    os.environ.update(QUEUE_ENVIRONMENT)
    keys, spawn, users, servers = QueueKeys.make(), multiprocessing.get_context("spawn"), {}, []
    for side in SIDES:
        mine, its = spawn.Pipe()
        spawn.Process(target=serve, args=(side, keys, its), daemon=True).start()
        infos = mine.recv()
        servers.append(mine)
        users[side], its = spawn.Pipe()
        spawn.Process(target=use, args=(side, keys, infos, its), daemon=True).start()
        users[side].recv()
    print("| payload | put without, ms | put with keys | get without | get with keys |\n|---|---|---|---|---|")
    for name, size in SIZES.items():
        found: dict[str, list[tuple[float, float]]] = {side: [] for side in SIDES}
        for _ in range(repeats + WARM_UP):
            for side, pipe in users.items():
                pipe.send(size)
                found[side].append(pipe.recv())
        cells = []
        for verb in (0, 1):
            for side in SIDES:
                low, middle, high = statistics.quantiles([1e3 * times[verb] for times in found[side][WARM_UP:]], n=4)
                cells.append(f"{middle:.2f} ({low:.2f} to {high:.2f})")
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)
    for pipe in (*users.values(), *servers):
        pipe.send(0)


if __name__ == "__main__":
    main()
