"""CPU seconds of one generation request: the engine client against httpx, which it used before (decision 0013).

    .venv/bin/python benchmarks/http_client.py

Both ask the same server, in a process of its own, with as many requests at once as the first column says, in turn. The
first round opens the connections and does not count.
"""

import argparse
import asyncio
import multiprocessing
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any

import httpx

from vime.backends.vllm_utils.fake import FakeEngine
from vime.rollout.engine_client import ROUTE, EngineClient

CONCURRENT = (16, 64, 128, 256)
PROMPT, PARAMS = list(range(1, 200)), {"max_tokens": 100, "temperature": 1.0}
TOKEN_S = 0.005  # all responses take equally long: connections are open together, as in a run
DEADLINE_S = 60.0
Ask = Callable[[], Awaitable[Any]]


def serve(pipe: Any) -> None:
    with FakeEngine(token_s=TOKEN_S) as engine:
        pipe.send(engine.address.url)
        pipe.recv()  # until the benchmark has ended


async def measure(url: str, number: int, repeats: int) -> dict[str, float]:
    client = EngineClient(url, max_in_flight=number, timeout_s=DEADLINE_S)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=number)
    before = httpx.AsyncClient(base_url=url, trust_env=False, timeout=DEADLINE_S, limits=limits)
    body = {"token_ids": PROMPT, "stream": False, "sampling_params": {**PARAMS, "n": 1, "logprobs": 0}}

    async def ask_httpx() -> Any:
        return (await before.post(ROUTE, json=body)).json()

    sides: dict[str, Ask] = {"EngineClient": lambda: client.generate(PROMPT, PARAMS), "httpx": ask_httpx}
    costs: dict[str, list[float]] = {name: [] for name in sides}
    for repeat in range(repeats + 1):
        for name, ask in sides.items():
            started = time.process_time()
            await asyncio.gather(*(ask() for _ in range(number)))
            if repeat:
                costs[name].append((time.process_time() - started) / number)
    await client.aclose()
    await before.aclose()
    return {name: statistics.median(values) for name, values in costs.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=5, help="rounds of requests that count (default: 5)")
    repeats = parser.parse_args().repeats
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs,), daemon=True)
    server.start()
    url = ours.recv()
    print("| requests at once | EngineClient, CPU ms a request | httpx | times |\n|---|---|---|---|")
    for number in CONCURRENT:
        found = asyncio.run(measure(url, number, repeats))
        ours_ms, before_ms = 1e3 * found["EngineClient"], 1e3 * found["httpx"]
        print(f"| {number} | {ours_ms:.2f} | {before_ms:.2f} | {before_ms / ours_ms:.1f} |", flush=True)
    ours.send(None)
    server.join(10)


if __name__ == "__main__":
    main()
