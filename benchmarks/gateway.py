"""What a group costs that comes through the gateway, beside one that a worker of the run stores itself.

    .venv/bin/python benchmarks/gateway.py [--repeats 5] [--groups 64] [--samples 8] [--tokens 256 1024 4096]

Both sides encode, spool (fsync off), put into a dict and commit the same groups in one process with one thread of work.
`worker`: as a rollout worker does. `gateway`: the process of the gateway, which also reads HTTP and msgpack, checks the
lease, the rate and every number; and what the job beside it pays. Sides take turns, medians of --repeats; CPU time of
the process that serves. Columns come packed, as `vime produce` sends them, and as lists. Exit code 1 when the gateway's
CPU time a token is above 1 / 0.9 of the worker's with packed ones.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import httpx
import msgspec
import numpy as np
import psutil

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from vime.gateway.app import make_app
from vime.gateway.messages import WeightManifest
from vime.gateway.server import GatewayServer
from vime.gateway.service import Gateway, Limits
from vime.gateway.tokens import Scope, TokenFile
from vime.gateway.weights import Weights
from vime.handoff.group_store import GroupStore, MemoryStore
from vime.handoff.ledger import Ledger, LocalLedgerPort
from vime.handoff.ledger_types import LedgerRules
from vime.handoff.spool import Fsync, Spool
from vime.rollout.convert import encoded_group
from vime.rollout.group_writer import GroupWriter
from vime.rollout.worker import payload_of
from vime.types import Sample, SampleStatus, VersionSpan

GOAL = 1 / 0.9
PROMPT = 8  # tokens
ARGS = SimpleNamespace(
    transferqueue_partition="train", transfer_queue_extra_data_fields=(), multimodal_keys=None, source_key="source",
    reward_key=None, loss_type="policy_loss", custom_reward_post_process_path=None, advantage_estimator="grpo",
    disable_grpo_std_normalization=False, hf_checkpoint="",
)  # fmt: skip


class Parts:
    """Ledger, spool, store and writer of one process."""

    def __init__(self, directory: Path, samples: int) -> None:
        rules = LedgerRules(max_slots=1 << 20, max_staleness=0, lease_timeout_s=3600.0)
        self.ledger = Ledger(directory / "ledger.db", rules, clock=time.monotonic)
        self.port, self.queue = LocalLedgerPort(self.ledger), MemoryStore()
        self.store = GroupStore(self.queue, Spool(directory / "spool", fsync=Fsync.NEVER), partition="train")
        self.samples = samples

    def group_at(self, group: int) -> list[Sample]:
        first = group * self.samples
        return [
            Sample(group_index=group, index=first + number, tokens=[1] * PROMPT, prompt="p")
            for number in range(self.samples)
        ]

    def encode(self, producer: str, samples: list[Sample]):
        group = encoded_group(ARGS, samples, producer_id=producer, with_samples=True)
        return group, payload_of(group, samples)

    def forget(self) -> None:
        """Free what was stored: neither side pays for the other's memory."""
        self.store.release(list(self.store._held))
        self.queue.clear_partition("train_groups")


def filled(sample: Sample, tokens: int) -> Sample:
    sample.tokens = [*sample.tokens, *range(tokens)]
    sample.response_length, sample.loss_mask = tokens, [1] * tokens
    sample.rollout_log_probs = [-0.5 - number / 100_000 for number in range(tokens)]
    sample.token_policy_versions = [VersionSpan(version=0, start=0, end=tokens)]
    sample.reward, sample.status, sample.attempt = float(sample.index % 2), SampleStatus.COMPLETED, 1
    return sample


async def by_worker(parts: Parts, groups: int, tokens: int) -> tuple[float, float]:
    """CPU and wall seconds of a worker's way, from finished samples to the commit."""
    writer = GroupWriter(parts.store, parts.port)
    grant = parts.ledger.prompts.issue("worker", groups, request=f"{time.monotonic_ns()}")
    ready = [
        (issued.task, [filled(sample, tokens) for sample in parts.group_at(issued.task.group)])
        for issued in grant.prompts
    ]
    cpu, wall = time.process_time(), time.monotonic()
    for task, samples in ready:
        group, payload = parts.encode("worker", samples)
        await writer.put(task, group, payload)
    spent = time.process_time() - cpu, time.monotonic() - wall
    writer.close()
    return spent


def by_gateway(
    client: httpx.Client, process: psutil.Process, groups: int, tokens: int, samples: int, *, is_packed: bool
):
    """The same through HTTP: CPU seconds of the gateway, wall, CPU seconds of the job, bytes sent. `is_packed`: columns
    as `vime produce` sends them, else as lists."""
    call = {"request": f"{time.monotonic_ns()}", "count": groups}
    prompts = client.post("/v1/leases", json=call).raise_for_status().json()["prompts"]
    assert len(prompts) == groups
    columns = {
        "tokens": [1] * PROMPT + list(range(tokens)),
        "log_probs": [-0.5 - number / 100_000 for number in range(tokens)],
    }
    if is_packed:
        kinds = {"tokens": "<i4", "log_probs": "<f4"}
        columns = {name: np.asarray(column, kinds[name]).tobytes() for name, column in columns.items()}
    given = [columns | {"response_length": tokens, "versions": [[0, tokens, 0]]} for _ in range(samples)]
    own, cpu, wall, sent = time.process_time(), cpu_of(process), time.monotonic(), 0
    for prompt in prompts:
        put = [
            each | {"index": told["index"], "reward": float(told["index"] % 2)}
            for each, told in zip(given, prompt["samples"], strict=True)
        ]
        body = msgspec.msgpack.encode({"lease": prompt["lease"], "samples": put})
        sent += len(body)
        response = client.post("/v1/groups", content=body, headers={"content-type": "application/msgpack"})
        assert response.status_code == 200, response.content
    return cpu_of(process) - cpu, time.monotonic() - wall, time.process_time() - own, sent


def cpu_of(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def serve(directory: Path, samples: int, largest: int) -> None:
    """The gateway's process: prints its address and a token, and forgets what it stored at each line of input."""
    parts, tokens = Parts(directory, samples), TokenFile(directory)
    weights = Weights(directory, WeightManifest(version=0, content_hash="h", location="", files=[]))
    gateway = Gateway(
        ledger=parts.port, store=parts.store, writer=GroupWriter(parts.store, parts.port), prompts=parts,
        encode=parts.encode, weights=weights, lease_key=tokens.lease_key,
        limits=Limits(
            samples_per_prompt=samples, max_staleness=0, lease_timeout_s=3600.0, vocab_size=1 << 20,
            max_tokens=2 * largest, temperature=1.0, max_body_bytes=1 << 30, calls_per_s=1e9,
            has_capacity=False,  # `by_worker` does not ask for room either
        ),
    )  # fmt: skip
    server = GatewayServer(make_app(gateway, tokens), "127.0.0.1:0")
    server.start()
    sys.stdout.write(json.dumps([server.url, tokens.make("job", (Scope.TRAIN,), seconds=3600)]) + "\n")
    sys.stdout.flush()
    for _ in sys.stdin:
        parts.forget()
        sys.stdout.write("\n")
        sys.stdout.flush()
    server.stop()


def measure(arguments: argparse.Namespace, directory: Path) -> bool:
    command = [sys.executable, __file__, "--serve", str(directory / "gateway"), "--samples", str(arguments.samples)]
    (directory / "gateway").mkdir()
    process = subprocess.Popen(
        [*command, "--tokens", *map(str, arguments.tokens)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    url, token = json.loads(process.stdout.readline())
    client = httpx.Client(base_url=url, headers={"authorization": f"Bearer {token}"}, timeout=60)
    client.post("/v1/weights/loaded", json={"version": 0, "engines": {"e": "h"}}).raise_for_status()
    parts, seen, is_met = Parts(directory, arguments.samples), psutil.Process(process.pid), True
    sys.stdout.write("tokens  columns  worker us   gateway us   times   job us   groups/s   MB/s\n")
    for tokens in arguments.tokens:
        worker = []
        gateway = {"packed": [], "lists": []}
        for number in range(arguments.repeats + 1):  # the first warms up
            took = asyncio.run(by_worker(parts, arguments.groups, tokens))
            parts.forget()
            if number:
                worker.append(took)
            for columns, sides in gateway.items():
                is_packed = columns == "packed"
                found = by_gateway(client, seen, arguments.groups, tokens, arguments.samples, is_packed=is_packed)
                process.stdin.write("\n")
                process.stdin.flush()
                process.stdout.readline()
                if number:
                    sides.append(found)
        count = arguments.groups * arguments.samples * tokens
        inside = statistics.median(cpu for cpu, _ in worker) / count
        for columns, sides in gateway.items():
            outside, wall, job, sent = (statistics.median(each) for each in zip(*sides, strict=True))
            times = outside / count / inside
            is_met = is_met and (times <= GOAL or columns == "lists")
            sys.stdout.write(
                f"{tokens:6,} {columns:>8} {1e6 * inside:10.3f} {1e6 * outside / count:12.3f} {times:7.2f} "
                f"{1e6 * job / count:8.3f} {arguments.groups / wall:10,.0f} {sent / wall / 1e6:6.1f}\n"
            )
    process.stdin.close()
    process.wait(30)
    return is_met


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--groups", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 1024, 4096])
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve, arguments.samples, max(arguments.tokens))
        return 0
    with tempfile.TemporaryDirectory() as directory:
        return 0 if measure(arguments, Path(directory)) else 1


if __name__ == "__main__":
    sys.exit(main())
