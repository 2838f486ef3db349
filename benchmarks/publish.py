r"""What a weight update costs: HTTP calls, milliseconds in which engines do not generate, CPU milliseconds by process.

    .venv/bin/python benchmarks/publish.py [--updates 20] [--turns 5] [--engines 1] [--transport shm] \
        [--model DIR] [--checkout DIR ...]

The quick start's model, or --model, goes to real vLLM engines, again and again, from one process as a trainer rank does
it. With several checkouts each has engines of its own and they take turns, so that a machine whose speed drifts slows
all of them alike. Medians of the turns; a turn is `--updates` updates.
"""

import argparse
import inspect
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "examples/quickstart/model"
DEADLINE_S = 200.0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--updates", type=int, default=20, help="updates of a turn (default: 20)")
    parser.add_argument("--turns", type=int, default=5, help="turns of each checkout that count (default: 5)")
    parser.add_argument("--engines", type=int, default=1, help="engines of a fleet (default: 1)")
    parser.add_argument("--transport", default="shm", help="shm, gloo or disk (default: shm)")
    parser.add_argument("--model", type=Path, default=MODEL, help="a checkpoint (default: the quick start's)")
    parser.add_argument("--checkout", type=Path, action="append", help="a checkout to measure (default: this one)")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.engines, options.transport, options.model)
        return
    checkouts = [checkout.resolve() for checkout in options.checkout or [ROOT]]
    sides = {checkout: begin(checkout, options) for checkout in checkouts}
    found: dict[Path, list[dict[str, float]]] = defaultdict(list)
    for turn in range(options.turns + 1):
        for checkout, side in sides.items():
            answer = ask(side, options.updates)
            if turn:  # the first opens what stays open
                found[checkout].append(answer)
    for side in sides.values():
        side.stdin.close()
        side.wait(60)
    print(f"{options.transport}, {options.engines} engines, {options.turns} turns of {options.updates} updates\n")
    print(f"| an update | {' | '.join(map(str, checkouts))} |\n|---|{'---|' * len(checkouts)}")
    for name in dict.fromkeys(name for turns in found.values() for turn in turns for name in turn):
        cells = []
        for turns in found.values():
            values = [turn[name] for turn in turns if name in turn]
            cells.append(f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})" if values else "")
        print(f"| {name} | {' | '.join(cells)} |")


def begin(checkout: Path, options: argparse.Namespace) -> Any:
    command = [sys.executable, str(Path(__file__).resolve()), "--serve", "--transport", options.transport]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(checkout)}
    return subprocess.Popen(
        [*command, "--engines", str(options.engines), "--model", str(options.model.resolve())],
        cwd=checkout, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip


def ask(side: Any, updates: int) -> dict[str, float]:
    side.stdin.write(f"{updates}\n")
    side.stdin.flush()
    while line := side.stdout.readline():
        if line.startswith("{"):
            return dict(json.loads(line))
    sys.exit("a side ended early; its words are above")


def serve(num_engines: int, transport: str, model: Path) -> None:
    """Engines of the checkout on PYTHONPATH, and a turn for each line of stdin."""
    from safetensors.torch import load_file

    from vime.backends.vllm_utils.control import Fanout, FleetControl
    from vime.backends.vllm_utils.engine import EngineProcess
    from vime.config.parse import Config
    from vime.weights.plan import TensorMeta
    from vime.weights.publish import publish
    from vime.weights.transports import make_sender

    config = Config().replace(
        hf_checkpoint=str(model), device="cpu", rollout_max_context_len=64, vllm_kv_cache_memory_bytes=32 << 20
    )
    calls: list[tuple[str, float, float]] = []
    call = Fanout._checked

    async def timed(fanout: Fanout, *arguments: Any) -> Any:
        began = time.monotonic()
        response = await call(fanout, *arguments)
        calls.append((arguments[2], began, time.monotonic()))
        return response

    def timed_before(fanout: Fanout, *arguments: Any) -> Any:
        """Of a checkout from before decision 0031, whose calls are in threads."""
        began = time.monotonic()
        answer: Any = call(fanout, *arguments)
        calls.append((arguments[1], began, time.monotonic()))
        return answer

    is_async = inspect.iscoroutinefunction(call)
    Fanout._checked = timed if is_async else timed_before  # type: ignore[method-assign, assignment]
    weights = load_file(model / "model.safetensors")
    metadata = [TensorMeta.of(name, tensor) for name, tensor in weights.items()]
    with tempfile.TemporaryDirectory(prefix="vime-publish-") as directory:
        engines = [EngineProcess(config, index=index, run_dir=Path(directory)) for index in range(num_engines)]
        try:
            for engine in engines:
                engine.start()
            for engine in engines:
                engine.wait_ready(DEADLINE_S)
            fleet = FleetControl([engine.address for engine in engines], timeout_s=60)
            sender = make_sender(transport, bucket_bytes=None, directory=Path(directory) / "weights", timeout_s=60)
            sender.connect(fleet)
            version = 0
            for line in sys.stdin:
                updates, spans, paused = int(line), [], []
                calls.clear()
                cpu_s, began = cpu_seconds(engines), time.monotonic()
                for _ in range(updates):
                    first = len(calls)
                    report = publish(
                        iter(weights.items()), metadata, version=(version := version + 1), fleet=fleet, sender=sender,
                        pause_mode="wait", deadline_s=60,
                    )  # fmt: skip
                    paused.append(report.pause_s)
                    spans.append(max(end for *_, end in calls[first:]) - min(start for _, start, _ in calls[first:]))
                wall_s, after_s = time.monotonic() - began, cpu_seconds(engines)
                answer = {"HTTP calls": len(calls) / updates / num_engines, "wall ms": 1e3 * wall_s / updates}
                answer["paused ms"] = 1e3 * statistics.median(paused)
                answer["wall ms, first call to last answer"] = 1e3 * statistics.median(spans)
                for name in cpu_s:
                    answer[f"CPU ms, {name}"] = 1e3 * (after_s[name] - cpu_s[name]) / updates
                answer["CPU ms, all"] = sum(value for name, value in answer.items() if name.startswith("CPU"))
                for route in dict.fromkeys(route for route, *_ in calls):
                    answer[f"wall ms of {route}"] = 1e3 * statistics.median(e - s for r, s, e in calls if r == route)
                print(json.dumps(answer), flush=True)
            sender.close()
            fleet.close()
        finally:
            for engine in engines:
                engine.stop()


def cpu_seconds(engines: list[Any]) -> dict[str, float]:
    """By process, since it started: this one plays the trainer."""
    found = {"trainer": time.process_time(), "API server": 0.0, "EngineCore": 0.0}
    for engine in engines:
        for process in psutil.Process(engine.pid).children(recursive=True):
            name = "EngineCore" if process.parent().pid != engine.pid else "API server"
            found[name] += sum(map(nanoseconds, Path(f"/proc/{process.pid}/task").iterdir())) / 1e9
    return found


def nanoseconds(task: Path) -> int:
    return int((task / "schedstat").read_text().split()[0])


if __name__ == "__main__":
    main()
