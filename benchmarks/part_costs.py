"""CPU time of each part of the rollout half by itself, for the table of costs in simulate.py.

    .venv/bin/python benchmarks/part_costs.py [STATION ...]

Stations: `worker` (prompt to stored group, with a ledger and a store in this process), `coordinator` (a round leased,
planned, reported), `kept` (completions kept for `vime samples`), `rank` (rows to packed columns), `ledger` (calls
through Ray, both sides), `queue` (TransferQueue's calls: client, controller, storage unit), `router` and `engines`
(HTTP), `disk` (a spool's append), `idle` (every process while no prompt is under way). Nothing is fitted to a whole
run: what simulate.py predicts of one is made of these figures alone. Intercepts and slopes are those of two sizes,
medians of turns.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import pickle
import shutil
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.rollout_half import (
    MODEL,
    VOCABULARY,
    Setting,
    configuration,
    cpu_seconds,
    rollout_half,
    scripted_engines,
)
from benchmarks.unit_costs import SAMPLES, answer_body, generated
from vime.types import KEY_HEADER

SHORT, LONG = 256, 2048  # tokens of a completion
TURNS = 3


def cpu_of(pid: int) -> float:
    """To the nanosecond, where /proc/PID/stat counts in steps of 10 ms. Of the threads that live."""
    return sum(int((task / "schedstat").read_text().split()[0]) for task in Path(f"/proc/{pid}/task").iterdir()) / 1e9


def line(low: tuple[float, float], high: tuple[float, float]) -> tuple[float, float]:
    """Intercept and slope through two points (size, cost)."""
    slope = (high[1] - low[1]) / (high[0] - low[0])
    return low[1] - slope * low[0], slope


def say(name: str, value: float, unit: str) -> None:
    print(f"{name:48s} {value:12.4f} {unit}", flush=True)


def spent(pids: Sequence[int], work: Callable[[], object], times: int) -> list[float]:
    """CPU seconds of each process for one call of `work`, over `times` of them."""
    work()
    before = [cpu_of(pid) for pid in pids]
    for _ in range(times):
        work()
    return [(cpu_of(pid) - earlier) / times for pid, earlier in zip(pids, before, strict=True)]


# ---- stations ----


def worker() -> None:
    """The product's RolloutWorker with a ledger and a store in this process: the whole way of a group but the calls to
    other processes (the ledger's own work in it is `ledger`'s, some 0.1 ms)."""
    found = []
    for size in (SHORT, LONG):
        turns = [worker_turn(size, num_groups=60 if size == SHORT else 30) for _ in range(TURNS)]
        found.append((SAMPLES * size, statistics.median(turns)))
    group, token = line(*found)
    say("worker, a group of 16", group * 1e3, "ms")
    say("worker, a token", token * 1e6, "us")


def worker_turn(size: int, num_groups: int) -> float:
    """CPU s a group."""
    from vime.handoff.group_store import GroupStore, MemoryStore
    from vime.handoff.ledger import Ledger, LocalLedgerPort
    from vime.handoff.spool import Spool
    from vime.observability.events import open_events
    from vime.ray.stream import ledger_rules
    from vime.rollout.generation import close_clients
    from vime.rollout.plugins import load_data_source
    from vime.rollout.worker import RolloutWorker
    from vime.utils.heap import collect_when_asked

    setting = Setting(engines=1, groups=num_groups, staleness=0, token_s=0.0, shortest=size, longest=size)
    with tempfile.TemporaryDirectory() as name, scripted_engines(setting) as (_, [url]):
        directory = Path(name)
        config = configuration(setting, directory)
        config = config.replace(vllm_router_ip="127.0.0.1", vllm_router_port=int(url.rpartition(":")[2]))
        open_events(directory, "bench")
        ledger = Ledger(directory / "ledger.db", ledger_rules(config, 2), clock=time.monotonic)
        ledger.rounds.release(0)
        store = GroupStore(MemoryStore(), Spool(directory / "spool"), partition="train", directory=directory / "spool")
        args = config.flat
        source = load_data_source(args)
        made = RolloutWorker(args, source=source, ledger=LocalLedgerPort(ledger), store=store)
        collect_when_asked()
        began = time.process_time()
        made.start()
        ends = time.monotonic() + 120
        while made.stats.committed_groups < num_groups:
            made.raise_if_failed()
            assert time.monotonic() < ends, "the worker did not finish its groups"
            time.sleep(0.05)
        took = time.process_time() - began
        made.close()
        close_clients()
        ledger.close()
    return took / num_groups


def coordinator() -> None:
    """RoundCoordinator, planner and ticket with a ledger in this process, by groups of 16 in a round."""
    found = []
    for groups in (32, 512):
        found.append((groups, statistics.median(coordinator_turn(groups) for _ in range(TURNS))))
    per_round, per_group = line(*found)
    say("coordinator, a round", per_round * 1e3, "ms")
    say("coordinator, a group of 16", per_group * 1e3, "ms")


def coordinator_turn(groups: int) -> float:
    from types import SimpleNamespace

    import numpy as np

    from vime.handoff.ledger import Ledger, LocalLedgerPort
    from vime.handoff.ticket import make_ticket
    from vime.ray.planning import RoundPlanner
    from vime.ray.stream import ledger_rules
    from vime.rollout.coordinator import RoundCoordinator
    from vime.rollout.worker import WorkerStats

    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        config = configuration(Setting(groups=groups, staleness=0), directory)
        ledger = Ledger(directory / "ledger.db", ledger_rules(config, 2), clock=time.monotonic)
        commit_round(ledger, groups)
        workers: Any = SimpleNamespace(
            take_stats=WorkerStats, stats=WorkerStats(), is_ours=lambda _: True, spool_bytes=0, num_running=0,
            waits_for="", raise_if_failed=lambda: None,
        )  # fmt: skip
        coordinated = RoundCoordinator(config.flat, ledger=LocalLedgerPort(ledger), workers=workers)
        planner = RoundPlanner(config)
        began = time.process_time()
        coordinated.begin(0)
        taken = coordinated.take(groups)
        coordinated.metrics(taken)
        planned = planner.plan(0, np.concatenate([group.facts.rows for group in taken.left]))
        make_ticket(planned.plan, [(group.facts, group.handles) for group in taken.left], partition="train")
        took = time.process_time() - began
        ledger.close()
    return took


def payload_for(number: int) -> Any:
    """Return the facts of a group of 16 for the ledger; they do not grow with tokens."""
    from vime.rollout.worker import payload_of
    from vime.types import Sample, VersionSpan

    samples = []
    for at in range(SAMPLES):
        sample = Sample(group_index=number, index=number * SAMPLES + at, prompt="?", tokens=list(range(20)))
        sample.append_response_tokens([7] * 50, [-0.5] * 50, versions=[VersionSpan(0, 0, 50)], text="x")
        sample.reward = 1.0
        samples.append(sample)
    return payload_of(generated(number, None, 50), samples)


def commit_round(ledger: Any, groups: int) -> None:
    ledger.rounds.release(0)
    for _ in range(0, groups, 8):
        grant = ledger.prompts.issue("bench", 8, request=str(time.monotonic_ns()))
        ledger.commit_each([(prompt.task, payload_for(prompt.task.group)) for prompt in grant.prompts])


def kept() -> None:
    """Answers that are kept for `vime samples`: read and sent by a worker, received and written by the coordinator."""
    from vime.observability.samples import RoundGroup, SampleStore

    sends, writes = [], []
    for size in (SHORT, LONG):
        group = generated(0, answer_body(size))  # of random tokens: compression is most of it
        began = time.process_time()
        for _ in range(10):
            data = pickle.dumps(group.samples(), protocol=5)
        sends.append((SAMPLES * size, (time.process_time() - began) / 10))
        with tempfile.TemporaryDirectory() as name:
            store = SampleStore(Path(name), 1 << 30)
            groups = [
                RoundGroup(group_index=0, num_tokens=SAMPLES * size, read=lambda data=data: pickle.loads(data))
                for _ in range(10)
            ]
            began = time.process_time()
            store.write(0, groups, [])
            writes.append((SAMPLES * size, (time.process_time() - began) / 10))
    for who, points in (("worker", sends), ("coordinator", writes)):
        group_s, token_s = line(*points)
        say(f"kept completions, {who}, a group of 16", group_s * 1e3, "ms")
        say(f"kept completions, {who}, a token", token_s * 1e6, "us")


def rank() -> None:
    """Chunks in this process to packed rows, one pack a row, as `SourceRank` does it."""
    from vime.batching.pack import pack
    from vime.batching.plan import plan_round
    from vime.handoff.group_store import MemoryStore, chunk_keys
    from vime.handoff.ledger_types import Task
    from vime.handoff.ticket import make_ticket, read_rows

    found = []
    for size in (SHORT, LONG):
        store, entries, lengths = MemoryStore(), [], []
        for number in range(16):
            group = generated(number, None, size)
            handles = store.put("train", chunk_keys(Task("train", number, 1), len(group.chunks)), group.chunks)
            entries.append((group.facts, handles))
            lengths += group.facts.rows["total_length"].tolist()
        plan = plan_round(
            0, lengths, lengths, dp_size=2, samples_per_step=len(lengths), micro_batch_size=1,
            max_tokens_per_micro_batch=None, loads=lengths,
        )  # fmt: skip
        ticket = make_ticket(plan, entries, partition="train")
        turns = []
        for _ in range(TURNS):
            began = time.process_time()
            for row in read_rows(store, ticket, 0)[1].values():
                pack([row])
            turns.append((time.process_time() - began) / (len(lengths) // 2))
        found.append((size, statistics.median(turns)))
    row, token = line(*found)
    say("source rank, a row", row * 1e3, "ms")
    say("source rank, a token", token * 1e6, "us")


@contextlib.contextmanager
def bare_ray(setting: Setting) -> Iterator[tuple[Any, Path]]:
    from vime.ray.cluster import start_ray, stop_ray

    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "logs").mkdir()
        config = configuration(setting, directory)
        start_ray(config)
        try:
            yield config, directory
        finally:
            stop_ray()


def ledger() -> None:
    """Calls through Ray: what the ledger's process and the caller's spend."""
    from vime.handoff.ledger import Ledger
    from vime.handoff.prompt_ledger import PromptLedger
    from vime.handoff.round_ledger import RoundLedger
    from vime.ray.ledger_actor import LedgerActor, LedgerClient
    from vime.ray.stream import ledger_rules

    with bare_ray(Setting(groups=1024, staleness=1)) as (config, directory):
        client = LedgerClient.start(directory, ledger_rules(config, 4), run_id="bench", deadline_s=60.0)
        pids = [client.pid(), os.getpid()]
        client.restore(None)
        client.call(RoundLedger.release, 0)
        both("ledger, a call (status)", spent(pids, lambda: client.call(Ledger.status), 300))
        payload, tasks, num_ready = payload_for(0), [], 0

        def issue(count: int) -> None:
            grant = client.call(PromptLedger.issue, "bench", count, request=str(time.monotonic_ns()))
            tasks.extend(prompt.task for prompt in grant.prompts)

        both("ledger, issue of 1", spent(pids, lambda: issue(1), 150))
        both("ledger, issue of 8", spent(pids, lambda: issue(8), 60))

        def commit(count: int) -> None:
            nonlocal num_ready
            num_ready += count
            client.call(Ledger.commit_each, [(tasks.pop(0), payload) for _ in range(count)])

        both("ledger, commit of 1", spent(pids, lambda: commit(1), 100))
        both("ledger, commit of 8", spent(pids, lambda: commit(8), 50))
        for count in (128, 1024):
            while len(tasks) + num_ready < count:
                issue(8)
            while tasks:
                commit(min(32, len(tasks)))
            ask = {"version": 0, "holder": "bench", "count": count}
            both(f"ledger, lease of {count}", spent(pids, lambda ask=ask: client.call(RoundLedger.lease, 0, **ask), 20))
        release_round(client, 1024)
        ref = client._actor.ask_coroutine(LedgerActor.wait_for_news, -1, 60.0, {"round_of": 1024, "at_least": 4096})
        time.sleep(0.5)
        both("ledger, issue of 8, one waits for a round of 1024", spent(pids, lambda: issue(8), 60))
        del ref


def release_round(client: Any, count: int) -> None:
    """Of a leased round of `count` groups: trained, and its slots free."""
    from vime.handoff.round_ledger import RoundLedger

    answer = client.call(RoundLedger.lease, 0, version=0, holder="bench", count=count)
    client.call(RoundLedger.trained, 0, answer.lease.fence)
    client.call(RoundLedger.release, 1)


def both(name: str, costs: Sequence[float]) -> None:
    say(f"{name}: ledger", costs[0] * 1e3, "ms")
    say(f"{name}: caller", costs[1] * 1e3, "ms")


def queue() -> None:
    """TransferQueue as a run starts it: what client, controller and one storage unit spend on a call."""
    import ray

    from vime.ray.stores import connect_store, start_queue, stop_queue

    with bare_ray(Setting()) as (config, _):
        address = start_queue(config)
        store = connect_store(config, address)
        actors = [address.controller, *address.storage_units]
        pids = [os.getpid(), *ray.get([actor.__ray_call__.remote(_pid) for actor in actors])]
        count = 0

        def put(keys: int, size: int) -> None:
            nonlocal count
            names = [f"{count}.{at}" for at in range(keys)]
            count += 1
            store.put("bench", names, [b"x" * size] * keys)
            names_put.append(names)

        def get(keys: int) -> None:
            wanted = [name for names in names_put for name in names][:keys]
            store.get("bench", wanted)

        for verb in ("put", "get", "clear"):
            for keys, size in ((1, 1 << 10), (8, 1 << 10), (32, 1 << 10), (8, 256 << 10)):
                names_put: list[list[str]] = []
                times = 60 if keys < 32 else 30
                if verb == "put":
                    costs = spent(pids, lambda keys=keys, size=size: put(keys, size), times)
                elif verb == "get":
                    put(keys, size)
                    costs = spent(pids, lambda keys=keys: get(keys), times)
                else:
                    for _ in range(times + 1):
                        put(keys, size)
                    costs = spent(pids, lambda put=names_put: store.clear("bench", put.pop()), times)
                for who, cost in zip(("client", "controller", "unit"), costs, strict=True):
                    say(f"queue {verb}, {keys} keys of {size >> 10} KiB: {who}", cost * 1e3, "ms")
                store.clear_partition("bench")
        store.close()
        stop_queue(address)


def _pid(_actor: Any) -> int:
    return os.getpid()


def http() -> None:
    """The router between a client of this process and engines of one other, with 50 of them; and those engines."""
    import aiohttp

    from vime.backends.vllm_utils.router import RouterProcess
    from vime.types import EngineAddress

    async def ask(url: str, count: int) -> None:
        async with aiohttp.ClientSession() as session:
            for _ in range(count):
                async with session.post(f"{url}/inference/v1/generate", json={"token_ids": [1] * 100}) as response:
                    await response.read()

    found: dict[str, list[tuple[float, float]]] = {"router": [], "scripted engines": []}
    for size in (8, LONG):
        setting = Setting(token_s=0.0, shortest=size, longest=size)
        with tempfile.TemporaryDirectory() as name, scripted_engines(setting) as (pid, urls):
            directory = Path(name)
            (directory / "logs").mkdir()
            config = configuration(setting, directory)
            engines = [EngineAddress(name=f"engine-{at}", url=url, key="") for at, url in enumerate(urls)]
            router = RouterProcess(config, engines, run_dir=directory)
            router.start()
            try:
                router.wait_ready(60)
                tree = cpu_seconds(pid)
                [its] = [number for number, (kind, _) in tree.items() if kind == "router"]
                asyncio.run(ask(router.url, 20))
                costs = spent([its, pid], lambda url=router.url: asyncio.run(ask(url, 100)), TURNS)
            finally:
                router.stop()
        for who, cost in zip(found, costs, strict=True):
            found[who].append((SAMPLES * size, cost / 100))
    for who, points in found.items():
        request, token = line(*points)
        say(f"{who}, a request", request * 1e3, "ms")
        say(f"{who}, a token", token * 1e6, "us")


def vllm() -> None:
    """A real vLLM server of the quick start's model, n = 16: what its API server spends, which Python holds up. The
    model's own process is measured beside it and not used: on a GPU it is another."""
    from vime.backends.vllm_utils.engine import EngineProcess

    points = []
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "logs").mkdir()
        config = configuration(Setting(longest=2 * LONG), directory).replace(hf_checkpoint=str(longer_model(directory)))
        engine = EngineProcess(config, index=0, run_dir=directory)
        engine.start()
        try:
            engine.wait_ready(300)
            process = psutil.Process(engine.pid)
            below = process.children(recursive=True)
            servers = [each for each in below if "cpu_server" in " ".join(each.cmdline())]
            pids = [servers[0].pid, *(each.pid for each in below if each not in servers)]
            headers = {KEY_HEADER: engine.keys.generate}
            for size in (SHORT, LONG):
                body = {
                    "request_id": "x", "token_ids": [5] * 20, "stream": False,
                    "sampling_params": {"n": SAMPLES, "max_tokens": size, "logprobs": 0, "detokenize": False,
                                        "ignore_eos": True, "temperature": 1.0},
                }  # fmt: skip

                found: list[int] = []

                def ask(body: dict[str, Any] = body, found: list[int] = found) -> None:
                    request = urllib.request.Request(
                        f"{engine.url}/inference/v1/generate", data=json.dumps(body).encode(),
                        headers={**headers, "Content-Type": "application/json"},
                    )  # fmt: skip
                    with urllib.request.urlopen(request, timeout=300) as response:
                        found.append(len(response.read()))

                costs = spent(pids, ask, TURNS)
                say(f"vLLM, {SAMPLES} x {size} tokens: API server", costs[0] * 1e3, "ms")
                say(f"vLLM, {SAMPLES} x {size} tokens: others", sum(costs[1:]) * 1e3, "ms")
                say(f"vLLM, {SAMPLES} x {size} tokens: JSON", found[0] / SAMPLES / size, "bytes a token")
                points.append((SAMPLES * size, costs[0]))
        finally:
            engine.stop()
    request_s, token_s = line(*points)
    say("vLLM API server, a request of 16", request_s * 1e3, "ms")
    say("vLLM API server, a token", token_s * 1e6, "us")


def longer_model(directory: Path) -> Path:
    """Copy the quick start's model with a limit of LONG tokens; its output does not matter."""
    shutil.copytree(MODEL, directory / "model")
    path = directory / "model/config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "max_position_embeddings": 8 * LONG}))
    return directory / "model"


def decode() -> None:
    """tokenizer.decode alone, which is in `worker`: the quick start's tokenizer knows a few words only."""
    from vime.rollout.prompts import load_tokenizer

    tokenizer = load_tokenizer(str(MODEL))
    ids = [number % VOCABULARY for number in range(LONG)]
    turns = []
    for _ in range(30):
        began = time.process_time()
        tokenizer.decode(ids, skip_special_tokens=True)
        turns.append((time.process_time() - began) / LONG)
    say("tokenizer.decode, a token", statistics.median(turns) * 1e6, "us")


def has() -> None:
    """`Ledger.has` in process, asked at each change while a coordinator waits: by groups that a round wants."""
    from vime.handoff.ledger import Ledger
    from vime.ray.stream import ledger_rules

    points = []
    for groups in (64, 1024):
        with tempfile.TemporaryDirectory() as name:
            config = configuration(Setting(groups=groups, staleness=1), Path(name))
            opened = Ledger(Path(name) / "ledger.db", ledger_rules(config, 2), clock=time.monotonic)
            commit_round(opened, groups)
            began = time.process_time()
            for _ in range(200):
                opened.has(round_of=2 * groups, at_least=2 * groups)
            points.append((groups, (time.process_time() - began) / 200))
            opened.close()
    base, group = line(*points)
    say("ledger, a look whether a round is whole", base * 1e3, "ms")
    say("the same, a group of the round", group * 1e6, "us")


def fleet() -> None:
    """One call to each of so many engines, as rank 0 makes for each bucket of a weight update: CPU of the caller."""
    from vime.backends.vllm_utils.control import Fanout
    from vime.types import EngineAddress

    for count in (50, 400):
        with scripted_engines(Setting(engines=count)) as (_, urls):
            fanout = Fanout([EngineAddress(name=url, url=url, key="") for url in urls], 60.0)
            turns = []
            for _ in range(1 + TURNS):  # the first one connects
                began = time.process_time()
                for _ in range(5):
                    fanout._on_each("GET", "/health", [None] * count)
                turns.append((time.process_time() - began) / 5 / count)
            fanout.close()
        say(f"weight update, a call of one engine of {count}", statistics.median(turns[1:]) * 1e3, "ms")


def disk() -> None:
    """Wall and CPU of a spool's append with its fsync, by bytes."""
    from vime.handoff.ledger_types import Task
    from vime.handoff.spool import Spool

    points: dict[str, list[tuple[float, float]]] = {"wall": [], "cpu": []}
    with tempfile.TemporaryDirectory(dir=Path(__file__).parent) as name:
        spool, number = Spool(Path(name)), 0
        for size in (10_000, 4_000_000):
            walls, cpus = [], []
            for _ in range(40):
                number += 1
                data = os.urandom(size)
                began, cpu = time.perf_counter(), time.process_time()
                spool.append([(Task("train", number, 1), data)])
                walls.append(time.perf_counter() - began)
                cpus.append(time.process_time() - cpu)
            points["wall"].append((size, statistics.median(walls)))
            points["cpu"].append((size, statistics.median(cpus)))
        spool.close()
    for kind, found in points.items():
        base, slope = line(*found)
        say(f"spool append with fsync, {kind}", base * 1e3, "ms")
        say(f"spool append with fsync, {kind}, a byte", slope * 1e9, "ns")


def idle() -> None:
    """Every process of a rollout half that has not begun."""
    seconds = 15.0
    with rollout_half(Setting(workers=2), is_begun=False) as half:
        time.sleep(5.0)
        before, began = cpu_seconds(half.engine_pid), time.monotonic()
        time.sleep(seconds)
        after, took = cpu_seconds(half.engine_pid), time.monotonic() - began
    kinds: dict[str, float] = {}
    for pid, (kind, cpu) in after.items():
        kinds[kind] = kinds.get(kind, 0.0) + cpu - before.get(pid, (kind, cpu))[1]
    for kind, cpu in kinds.items():
        say(f"idle: {kind}, all of its processes", cpu / took * 1e3, "ms/s")


STATIONS: dict[str, Callable[[], None]] = {
    "worker": worker, "coordinator": coordinator, "kept": kept, "rank": rank, "decode": decode, "disk": disk,
    "router": http, "fleet": fleet, "has": has, "ledger": ledger, "queue": queue, "vllm": vllm, "idle": idle,
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("stations", nargs="*", help="of those above (default: all)")
    asked = parser.parse_args().stations
    unknown = set(asked) - set(STATIONS)
    if unknown:
        parser.error(f"no station {', '.join(sorted(unknown))}; expected some of {', '.join(STATIONS)}")
    for name in asked or STATIONS:
        STATIONS[name]()
    return 0


if __name__ == "__main__":
    sys.exit(main())
