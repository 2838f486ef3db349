r"""How fast weights are hashed, beside copying memory and BLAKE2b, and what that makes of an update of larger models.

    .venv/bin/python benchmarks/weight_hash.py [--mebibytes 512] [--turns 5] [--link 25] [--load 25] [--gpu-hash 60]
    .venv/bin/python benchmarks/weight_hash.py --at-least 5       # exit code 1 when one thread hashes fewer GB/s
    .venv/bin/python benchmarks/weight_hash.py --device cuda      # a GPU's hash is measured too, not assumed

Measured: GB/s of one tensor on this machine's processor, best of the turns, which are taken alternately. The table's
seconds follow from them: `before` is BLAKE2b at the sender and then at the engine, one after the other; `now` is the
slowest of travelling, loading and hashing, since all of them overlap, and one bucket's hash. --link, --load and
--gpu-hash (GB/s) are assumptions: no GPU was measured. With --device cuda the hash of a tensor on a GPU is: whole
pieces alone (the reduction), and the content hash as sender and engine make it; and copies on it and from the host.
"""

import argparse
import sys
import threading
import time
from collections.abc import Callable

import torch

from vime.weights.device_hash import PIECE_BYTES, piece_digests
from vime.weights.hashing import ContentHash, OrderedHash
from vime.weights.plan import TensorMeta

MODELS = {"4B": 8.0, "30B-A3B": 61.0, "70B": 141.0, "235B-A22B": 470.0}  # GB in bf16
BUCKET_GB = 0.537
ON_DEVICE = "content hash on the device"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mebibytes", type=int, default=512, help="of the tensor (default: 512)")
    parser.add_argument("--turns", type=int, default=5, help="(default: 5)")
    parser.add_argument("--link", type=float, default=25.0, help="GB/s to each engine, assumed (default: 25)")
    parser.add_argument("--load", type=float, default=25.0, help="GB/s that an engine loads, assumed (default: 25)")
    parser.add_argument("--gpu-hash", type=float, default=60.0, help="GB/s on a GPU, assumed (default: 60)")
    parser.add_argument("--device", default="cpu", help="cuda: measure the hash on that GPU too (default: cpu)")
    parser.add_argument("--at-least", type=float, default=0.0, help="GB/s of the content hash, or exit code 1")
    options = parser.parse_args()
    torch.set_num_threads(1)
    source = torch.randint(0, 256, (options.mebibytes << 20,), dtype=torch.uint8)
    speeds = measure(source, options.turns)
    if options.device != "cpu":
        speeds |= measure_on(torch.device(options.device), source, options.turns)
        options.gpu_hash = speeds[ON_DEVICE]
    for name, speed in speeds.items():
        print(f"{name:32} {speed:6.2f} GB/s")
    blake, on_cpu = speeds["BLAKE2b, one thread"], speeds["content hash, one thread"]
    print("\n| model | GB in bf16 | hashes before, s | update now on CPUs, s | update now on GPUs, s |")
    print("|---|---|---|---|---|")
    for name, gigabytes in MODELS.items():
        slowest = [min(options.link, options.load, hash_speed) for hash_speed in (on_cpu, options.gpu_hash)]
        now = [
            gigabytes / speed + BUCKET_GB / hash_speed
            for speed, hash_speed in zip(slowest, (on_cpu, options.gpu_hash), strict=True)
        ]
        print(f"| {name} | {gigabytes:g} | {2 * gigabytes / blake:.0f} | {now[0]:.1f} | {now[1]:.1f} |")
    if on_cpu < options.at_least:
        sys.exit(f"the content hash does {on_cpu:.2f} GB/s on one thread, expected at least {options.at_least:g}")


def measure(source: torch.Tensor, turns: int) -> dict[str, float]:
    target = source.clone()
    halves = list(source.chunk(2))
    tasks: dict[str, Callable[[], object]] = {
        "memcpy, one thread": lambda: target.copy_(source),
        "memcpy, two threads": lambda: in_two(lambda half: half.copy_(source[: half.numel()]), list(target.chunk(2))),
        "BLAKE2b, one thread": lambda: add(OrderedHash(), source),
        "content hash, one thread": lambda: add(ContentHash(), source),
        "content hash, two threads": lambda: in_two(lambda half: add(ContentHash(), half), halves),
        "the reduction for GPUs, here": lambda: reduce(source),
    }
    return best_of(tasks, source.numel(), turns)


def measure_on(device: torch.device, source: torch.Tensor, turns: int) -> dict[str, float]:
    """The same on a device: GB/s of a copy there, the reduction of whole pieces, and the whole hash, whose digest must
    be that of the processor."""
    there, target = source.to(device), torch.empty_like(source, device=device)
    if add(ContentHash(), there) != add(ContentHash(), source):
        raise SystemExit(f"the hash on {device} is not the one of the processor")
    tasks: dict[str, Callable[[], object]] = {
        "copy on the device": lambda: (target.copy_(there), target[-1].item()),  # reads: the copy is done
        "copy from the host, not locked": lambda: (target.copy_(source), target[-1].item()),
        "the reduction on the device": lambda: reduce(there),
        ON_DEVICE: lambda: add(ContentHash(), there),
    }
    return best_of(tasks, source.numel(), turns)


def best_of(tasks: dict[str, Callable[[], object]], num_bytes: int, turns: int) -> dict[str, float]:
    best = dict.fromkeys(tasks, float("inf"))
    for _ in range(turns):
        for name, task in tasks.items():
            began = time.perf_counter()
            task()
            best[name] = min(best[name], time.perf_counter() - began)
    return {name: num_bytes / seconds / 1e9 for name, seconds in best.items()}


def add(content: ContentHash | OrderedHash, tensor: torch.Tensor) -> str:
    content.add(TensorMeta.of("weight", tensor), tensor)
    return content.hexdigest()


def reduce(source: torch.Tensor) -> bytes:
    return piece_digests([source.view(-1, PIECE_BYTES)])


def in_two(task: Callable[[torch.Tensor], object], halves: list[torch.Tensor]) -> None:
    threads = [threading.Thread(target=task, args=(half,)) for half in halves]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
