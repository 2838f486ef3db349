"""The rollout half of a run in mode `streaming`, with the product's own parts, and the CPU time of each kind of
process.

Used by simulate.py. Ray, router, RolloutManager, rollout workers, ledger, TransferQueue and spool are those of a run.
The engines are scripted: one process serves all their ports, with responses that were made beforehand, so that two
cores are left to what is measured. Source ranks read and pack their rows as trainer ranks do, and train nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import math
import random
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.spine import role
from vime.config.checks import resolve
from vime.config.parse import Config, parse
from vime.utils.processes import read_process

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "examples/quickstart/model"
NUM_RANKS = 2
DEADLINE_S = 300.0
VERSION_DIGITS = 6
VOCABULARY = 90  # ids that the quick start's tokenizer knows for sure
POOL = 48  # responses that the engines draw from

KINDS = {  # what `role` calls a process: its kind
    "Ray actor RolloutManager": "coordinator",
    "Ray actor RolloutWorkerActor": "worker",
    "Ray actor LedgerActor": "ledger",
    "Ray actor TransferQueueController": "queue controller",
    "Ray actor SimpleStorageUnit": "storage unit",
    "Ray actor SourceRank": "source rank",
    "vllm-router": "router",
    "driver": "driver",
    "engines": "engines",
}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A rollout half. `token_s`: seconds that each token of a completion takes, however many there are."""

    workers: int = 1
    engines: int = 50
    groups: int = 50  # of a round
    samples: int = 16
    staleness: int = 1
    token_s: float = 0.004
    warm_up: int = 3
    rounds: int = 12
    shortest: int = 256  # tokens of a completion
    longest: int = 2048


@dataclass(kw_only=True)
class Found:
    """Of the measured rounds."""

    wall_s: float = 0.0
    num_groups: int = 0
    num_tokens: int = 0
    num_writes: int = 0  # of the writers: each stores and commits one group or several
    cpu_s: dict[str, float] = field(default_factory=dict)


# ---- engines ----


def lengths(chance: random.Random, setting: Setting) -> list[int]:
    """Log-normal around the middle of the two bounds on a logarithmic scale, cut to them."""
    shortest, longest = setting.shortest, setting.longest
    middle, spread = math.sqrt(shortest * longest), math.log(longest / shortest) / 4
    drawn = (round(middle * math.exp(spread * chance.gauss())) for _ in range(setting.samples))
    return [min(longest, max(shortest, size)) for size in drawn]


def answer(chance: random.Random, setting: Setting) -> tuple[bytes, int, int]:
    """Body as vLLM 0.32 writes it, with version 0 in VERSION_DIGITS digits; the longest completion; all tokens."""
    choices, sizes = [], lengths(chance, setting)
    for index, size in enumerate(sizes):
        tokens = [chance.randrange(VOCABULARY) for _ in range(size)]
        content = []
        for token in tokens:
            entry = {"token_id": token, "logprob": -chance.expovariate(1.0), "rank": 1}
            content.append({**entry, "top_logprobs": [entry]})
        spans = [{"version": "0" * VERSION_DIGITS, "start": 0, "end": size}]
        choices.append({
            "index": index, "token_ids": tokens, "finish_reason": "stop", "logprobs": {"content": content},
            "weight_versions": spans,
        })  # fmt: skip
    return json.dumps({"choices": choices}, separators=(",", ":")).encode(), max(sizes), sum(sizes)


async def serve_engines(setting: Setting) -> None:
    """Serve until stdin ends; says its ports on stdout."""
    from aiohttp import web

    chance = random.Random(0)
    pool = [answer(chance, setting) for _ in range(POOL)]
    current = [body for body, _, _ in pool]

    async def generate(request: web.Request) -> web.Response:
        await request.read()
        drawn = chance.randrange(POOL)
        body = current[drawn]  # sampled by the weights that serve when it begins
        await asyncio.sleep(pool[drawn][1] * setting.token_s)
        return web.Response(body=body, content_type="application/json")

    async def version(request: web.Request) -> web.Response:
        before, after = (
            b'"version":"' + b"0" * VERSION_DIGITS,
            b'"version":"%0*d' % (VERSION_DIGITS, int(await request.text())),
        )
        current[:] = [body.replace(before, after) for body, _, _ in pool]
        return web.json_response({})

    async def health(_: web.Request) -> web.Response:
        return web.json_response({})

    app = web.Application()
    app.add_routes(
        [web.post("/inference/v1/generate", generate), web.post("/version", version), web.get("/health", health)]
    )
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    for _ in range(setting.engines):
        await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(json.dumps([address[1] for address in runner.addresses]), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await runner.cleanup()


@contextlib.contextmanager
def scripted_engines(setting: Setting) -> Iterator[tuple[int, list[str]]]:
    """Pid of the one process and the URLs of its engines."""
    with subprocess.Popen(
        [sys.executable, str(Path(__file__)), json.dumps(dataclasses.asdict(setting))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        ports = json.loads(process.stdout.readline())
        try:
            yield process.pid, [f"http://127.0.0.1:{port}" for port in ports]
        finally:
            process.stdin.close()


def set_version(url: str, version: int) -> None:
    urllib.request.urlopen(urllib.request.Request(f"{url}/version", data=str(version).encode()), timeout=30).close()


# ---- the rollout half ----


def configuration(setting: Setting, directory: Path) -> Config:
    """As a command line would give it."""
    runpy.run_path(str(ROOT / "examples/quickstart/prepare.py"))["write_data"](
        directory, num_train=512, num_eval=8, seed=0
    )
    flags = {
        "hf-checkpoint": MODEL, "prompt-data": directory / "train.jsonl", "input-key": "input", "label-key": "label",
        "rm-type": "exact_match", "device": "cpu", "lr": "1e-6", "micro-batch-size": 1,
        "rollout-batch-size": setting.groups, "n-samples-per-prompt": setting.samples,
        "rollout-max-response-len": setting.longest + 1, "rollout-max-context-len": 2 * setting.longest + 512,
        "transferqueue-mode": "streaming", "max-staleness": setting.staleness, "vllm-server-concurrency": 1024,
        "num-rollout-workers": setting.workers, "num-rollout": setting.warm_up + setting.rounds + 1,
        "actor-num-gpus-per-node": NUM_RANKS, "over-sampling-batch-size": 8, "vllm-router-policy": "round_robin",
    }  # fmt: skip
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    return resolve(parse([*words, "--balance-data"]))


class SourceRank:
    """Reads and packs the rows of one data-parallel index, as a trainer rank does before it trains."""

    def __init__(self, config: Config, queue_address: Any, rank: int) -> None:
        from vime.ray.cluster import limit_threads
        from vime.ray.stores import connect_store

        limit_threads(config)
        self._store, self._rank = connect_store(config, queue_address), rank

    def fetch(self, ticket: Any) -> int:
        """How many tokens it packed."""
        from vime.batching.pack import pack
        from vime.handoff.ticket import fetch_round

        _, rows = fetch_round(
            self._store, ticket, dp_rank=self._rank, is_source=True, source_rank=self._rank, group=None
        )
        for row in rows.values():
            pack([row])
        return sum(len(row.tokens) for row in rows.values())


@dataclass(kw_only=True)
class Half:
    """The parts of a rollout half that runs."""

    manager: Any
    stream: Any
    ranks: Sequence[Any]
    engine_pid: int
    engine_url: str
    run_dir: Path

    def num_writes(self) -> int:
        """Of the workers so far: each commits what it stored with one call, which is a span in the run's events."""
        return sum(path.read_text().count('"commit_groups"') for path in (self.run_dir / "events").glob("*.jsonl")) // 2

    def round(self, number: int) -> Any:
        """One round of the product's schedule: leased, read by the ranks, trained, taken out of the queue, and its
        slots released because the engines serve the next version. Answers the GeneratedRound and how many tokens it
        had."""
        import ray

        from vime.ray.rollout_manager import RolloutManager

        generated = ray.get(self.manager.ask(RolloutManager.generate, number), timeout=DEADLINE_S)
        self.stream.leased(generated.lease)
        ticket = ray.put(generated.ticket)
        num_tokens = sum(ray.get([rank.fetch.remote(ticket) for rank in self.ranks], timeout=DEADLINE_S))
        self.stream.trained(number, "")
        ray.get(self.manager.ask(RolloutManager.clear, generated.ticket), timeout=DEADLINE_S)
        set_version(self.engine_url, number + 1)
        self.stream.release(number + 1)
        return generated, num_tokens


@contextlib.contextmanager
def rollout_half(setting: Setting, *, is_begun: bool = True) -> Iterator[Half]:
    """Start every part, as ray/startup.py does, and stop every part. `is_begun`: generation runs."""
    import ray

    from vime.backends.vllm_utils.router import RouterProcess
    from vime.observability.logs import setup_logging
    from vime.ray.actor import start_actor
    from vime.ray.cluster import start_ray, stop_ray
    from vime.ray.ledger_choice import choose_ledger
    from vime.ray.rollout_manager import MAX_CALLS, RolloutManager
    from vime.ray.stores import start_queue, stop_queue
    from vime.ray.stream import Stream
    from vime.types import EngineAddress

    with contextlib.ExitStack() as stack:
        directory = Path(tempfile.mkdtemp(prefix="vime-rollout-half-"))
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        run_dir = directory / "run"
        (run_dir / "logs").mkdir(parents=True)
        (run_dir / "events").mkdir()
        (run_dir / "waits").mkdir()
        setup_logging(run_dir, "driver")
        config = configuration(setting, directory)
        pid, urls = stack.enter_context(scripted_engines(setting))
        stack.callback(stop_ray)
        start_ray(config)
        address = start_queue(config)
        stack.callback(stop_queue, address)
        manager = start_actor(
            RolloutManager, {"num_cpus": 0.2, "max_concurrency": MAX_CALLS}, config, str(run_dir), address
        )
        stack.callback(manager.kill)
        addresses = [EngineAddress(name=f"engine-{at}", url=url, key="") for at, url in enumerate(urls)]
        router = RouterProcess(config, addresses, run_dir=run_dir)
        stack.callback(router.stop)
        router.start()
        router.wait_ready(DEADLINE_S)
        ray.get(manager.ask(RolloutManager.prepare, None), timeout=DEADLINE_S)
        connected = config.replace(vllm_router_ip="127.0.0.1", vllm_router_port=router.port)
        ray.get(manager.ask(RolloutManager.connect, connected, ""), timeout=DEADLINE_S)
        actor = ray.remote(SourceRank).options(num_cpus=0.1)
        ranks = [actor.remote(connected, address, rank) for rank in range(NUM_RANKS)]
        stream = Stream.open(
            connected, run_dir, manager, num_rollout=setting.warm_up + setting.rounds + 1, checkpoint_round=None,
            choice=choose_ledger(run_dir, None), home={},
        )  # fmt: skip
        stack.callback(stream.end)
        stack.callback(lambda: ray.get(manager.ask(RolloutManager.close), timeout=DEADLINE_S))
        stack.callback(stream.close)
        set_version(urls[0], 0)
        stream.release(0)
        if is_begun:
            stream.begin()
        yield Half(manager=manager, stream=stream, ranks=ranks, engine_pid=pid, engine_url=urls[0], run_dir=run_dir)


def measure(setting: Setting) -> Found:
    """Run it and count CPU seconds by kind of process, after the warm-up rounds."""
    with rollout_half(setting) as half:
        for number in range(setting.warm_up):
            half.round(number)
        writes = half.num_writes()
        before, began, found = cpu_seconds(half.engine_pid), time.monotonic(), Found()
        for number in range(setting.warm_up, setting.warm_up + setting.rounds):
            generated, num_tokens = half.round(number)
            found.num_tokens += num_tokens
            found.num_groups += int(generated.metrics["rollout/num_groups"])
        after, found.wall_s = cpu_seconds(half.engine_pid), time.monotonic() - began
        found.num_writes = half.num_writes() - writes
    spent: dict[str, float] = defaultdict(float)
    for pid, (kind, seconds) in after.items():
        spent[kind] += seconds - before.get(pid, (kind, 0.0))[1]
    found.cpu_s = dict(spent)
    return found


def cpu_seconds(engine_pid: int) -> dict[int, tuple[str, float]]:
    """By process below this one and this one itself: its kind, and the CPU seconds of /proc/PID/stat."""
    me = psutil.Process()
    found = {}
    for process in [me, *me.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            seen = read_process(process.pid)
            if seen is not None:
                found[process.pid] = kind_of(process, me.pid, engine_pid), seen.cpu_s
    return found


def kind_of(process: psutil.Process, own_pid: int, engine_pid: int) -> str:
    if process.pid == own_pid:
        return "driver"
    if process.pid == engine_pid:
        return "engines"
    return KINDS.get(re.sub(r"\..*", "", role(process)), "Ray itself")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Scripted engines on ports of one process, until stdin ends.")
    parser.add_argument("setting", help="JSON")
    asyncio.run(serve_engines(Setting(**json.loads(parser.parse_args().setting))))
