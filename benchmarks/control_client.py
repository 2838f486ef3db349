r"""What one control call of each engine costs the trainer: CPU milliseconds, connections and threads, for N engines.

    .venv/bin/python benchmarks/control_client.py [--engines 1 8 64 256] [--turns 5] [--buckets 8] \
        [--tensors 40] [--gap 0] [--checkout DIR ...]

The engines are real sockets without a model, all in one process of their own, so that only the client is measured. A
turn is three publishes, each of `--buckets` updates (the first pauses, the last confirms), one report and one resume.
With several checkouts each has a process of its own and they take turns, so that a machine whose speed drifts slows
all of them alike. Medians of the turns; the first turn opens what stays open and does not count.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import resource
import statistics
import subprocess
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PUBLISHES = 3
WORKER = {"content_hash": "0" * 32, "num_tensors": 40}
CONTENT = json.dumps({"weight_version": "1", "workers": [WORKER], "pause_s": 0.0, "confirm_s": 0.0}).encode()
RESPONSE = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (
    len(CONTENT),
    CONTENT,
)


def metadata(tensors: int) -> dict[str, list[Any]]:
    """What a call tells: 40 tensors are some 3 kB, as one bucket of the quick start has."""
    names = [f"model.layers.{layer}.self_attn.q_proj.weight" for layer in range(tensors)]
    return {"names": names, "dtypes": ["bfloat16"] * tensors, "shapes": [[256, 256]] * tensors}


class Engine(asyncio.Protocol):
    """One connection: every request gets the same response, which suits each of the routes."""

    num_connections = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        Engine.num_connections += 1
        self._transport: Any = transport
        self._received = b""

    def data_received(self, data: bytes) -> None:
        self._received += data
        while (end := self._received.find(b"\r\n\r\n")) >= 0:
            head = self._received[:end].lower()
            length = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0] or 0)
            if len(self._received) < end + 4 + length:
                return
            self._received = self._received[end + 4 + length :]
            self._transport.write(RESPONSE)


def serve(pipe: Any, number: int) -> None:
    """`number` engines; returns how many connections there were so far for each message."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)

    async def run() -> None:
        loop = asyncio.get_running_loop()
        servers = [await loop.create_server(Engine, "127.0.0.1", 0, backlog=64) for _ in range(number)]
        pipe.send([server.sockets[0].getsockname()[1] for server in servers])
        closed = asyncio.Event()

        def asked() -> None:
            if pipe.recv() is None:
                closed.set()
            else:
                pipe.send(Engine.num_connections)

        loop.add_reader(pipe.fileno(), asked)
        await closed.wait()

    asyncio.run(run())


def client(ports: list[int], buckets: int, tensors: int, gap_s: float) -> None:
    """The control client of the checkout on PYTHONPATH, and a turn for each line of stdin."""
    from vime.backends.vllm_utils.control import FleetControl
    from vime.types import EngineAddress

    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    fleet = FleetControl(
        [EngineAddress(name=f"engine-{port}", url=f"http://127.0.0.1:{port}", key="k") for port in ports], timeout_s=60
    )
    told = metadata(tensors)
    for _ in sys.stdin:
        wall_s, cpu_s = 0.0, time.process_time()
        for _ in range(PUBLISHES):
            time.sleep(gap_s)  # a round is trained
            began = time.monotonic()
            for index in range(buckets):
                fleet.update({**told, "index": index, "count": buckets}, version=1, pause_mode="keep")
            fleet.reports()
            fleet.resume()
            wall_s += time.monotonic() - began
        calls = PUBLISHES * (buckets + 2)
        found = {
            "CPU s a publish": (time.process_time() - cpu_s) / PUBLISHES,
            "CPU ms a call and engine": 1e3 * (time.process_time() - cpu_s) / calls / len(ports),
            "wall ms a call of all": 1e3 * wall_s / calls,
            "threads": float(threading.active_count()),
        }
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()
    fleet.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--engines", type=int, nargs="+", default=[1, 8, 64, 256], help="(default: 1 8 64 256)")
    parser.add_argument("--turns", type=int, default=5, help="turns of each checkout that count (default: 5)")
    parser.add_argument("--buckets", type=int, default=8, help="updates of a publish (default: 8)")
    parser.add_argument("--tensors", type=int, default=40, help="that an update tells of (default: 40)")
    parser.add_argument("--gap", type=float, default=0.0, help="seconds before each publish (default: 0)")
    parser.add_argument("--checkout", type=Path, action="append", help="a checkout to measure (default: this one)")
    parser.add_argument("--at-most", type=float, help="CPU s of a publish, of each checkout, or exit code 1")
    parser.add_argument("--ports", type=int, nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.ports:
        client(options.ports, options.buckets, options.tensors, options.gap)
        return
    checkouts = [checkout.resolve() for checkout in options.checkout or [ROOT]]
    names = ("CPU s a publish", "CPU ms a call and engine", "wall ms a call of all", "connections", "threads")
    print(f"| engines | checkout | {' | '.join(names)} |\n|---|{'---|' * (len(names) + 1)}")
    most = 0.0
    for number in options.engines:
        for checkout, found in measure(number, checkouts, options).items():
            medians = [statistics.median(turn[name] for turn in found) for name in names]
            print(f"| {number} | {checkout.name} | {' | '.join(f'{each:.3g}' for each in medians)} |", flush=True)
            most = max(most, medians[0])
    if options.at_most is not None and most > options.at_most:
        sys.exit(f"a publish takes {most:.2f} s of the trainer's CPU, expected at most {options.at_most:g}")


def measure(number: int, checkouts: list[Path], options: argparse.Namespace) -> dict[Path, list[dict[str, float]]]:
    """Turns of every checkout against engines of its own. `connections` counts all that were opened until then."""
    context, sides = multiprocessing.get_context("spawn"), {}
    for checkout in checkouts:
        pipe, theirs = context.Pipe()
        engines = context.Process(target=serve, args=(theirs, number), daemon=True)
        engines.start()
        command = [sys.executable, str(Path(__file__).resolve()), "--buckets", str(options.buckets)]
        command += ["--tensors", str(options.tensors)]
        command += ["--gap", str(options.gap), "--ports"]
        environment = {**os.environ, "PYTHONPATH": str(checkout)}
        caller = subprocess.Popen(
            [*command, *map(str, pipe.recv())],
            cwd=checkout, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        sides[checkout] = (pipe, engines, caller)
    found: dict[Path, list[dict[str, float]]] = defaultdict(list)
    for turn in range(options.turns + 1):
        for checkout, (pipe, _, caller) in sides.items():
            assert caller.stdin is not None
            assert caller.stdout is not None
            caller.stdin.write("\n")
            caller.stdin.flush()
            line = caller.stdout.readline()
            if not line:
                sys.exit(f"the client of {checkout} ended early; its words are above")
            pipe.send("connections")
            if turn:
                found[checkout].append({**json.loads(line), "connections": float(pipe.recv())})
            else:
                pipe.recv()
    for pipe, engines, caller in sides.values():
        caller.communicate(timeout=60)
        pipe.send(None)
        engines.join(10)
    return dict(found)


if __name__ == "__main__":
    main()
