"""How long a checkpoint stops the training: written at once, or in the background (--async-save).

    python benchmarks/async_save.py [--hidden 768 --layers 12] [--directory DIR]

One trainer rank on the CPU, a random qwen2 model, AdamW. Prints the pause of each kind of save, the time until the
bytes are on the disk, and a training round with and without a save beside it. Then whole checkpoints in turns with and
without their manifest: what hashing every file costs, and what reading it all again before a load does.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.helpers.megatron_models import SHAPE, make_plan, make_rows
from vime.config.parse import Config
from vime.ray import checkpoint
from vime.ray.backends import make_backend
from vime.training.saved_files import hash_files
from vime.training.worker import TrainWorker
from vime.types import RankInfo
from vime.utils.manifest import Entry, find_damage
from vime.utils.network import free_port


def make_model(directory: Path, *, hidden: int, layers: int) -> int:
    """Answers the number of parameters."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    shape = {**SHAPE, "hidden_size": hidden, "intermediate_size": 4 * hidden, "num_hidden_layers": layers}
    model = Qwen2ForCausalLM(Qwen2Config(**shape))
    model.save_pretrained(directory)
    return sum(parameter.numel() for parameter in model.parameters())


def seconds(call: Callable[[], Any]) -> float:
    started = time.monotonic()
    call()
    return time.monotonic() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--directory", help="where checkpoints are written; default: a temporary one")
    parser.add_argument("--manifest-only", action="store_true", help="leave out all but checkpoints in turns")
    args = parser.parse_args()
    work = Path(tempfile.mkdtemp(dir=args.directory))
    try:
        measure(work, args)
    finally:
        shutil.rmtree(work)


def measure(work: Path, args: argparse.Namespace) -> None:
    count = make_model(work / "model", hidden=args.hidden, layers=args.layers)
    config = Config().replace(hf_checkpoint=str(work / "model"), device="cpu", distributed_backend="gloo")
    address = {"master_address": "127.0.0.1", "master_port": free_port()}
    worker = TrainWorker(
        config, make_backend(config, RankInfo(rank=0, world_size=1, local_rank=0, **address)), total_steps=100
    )
    rows = dict(enumerate(make_rows()))
    plan = make_plan(list(rows.values()), dp_size=1)

    def train() -> None:
        worker.train_round(plan, rows)

    train()
    gigabytes = count * 12 / 1e9  # weights and two moments in fp32
    print(f"{count / 1e6:.0f} M parameters, {gigabytes:.2f} GB a checkpoint, best of {args.repeats}")
    if not args.manifest_only:
        measure_pauses(work, worker, train, args.repeats)
    compare_manifests(work / "turns", worker, args.repeats)
    worker.backend.close()


def measure_pauses(work: Path, worker: TrainWorker, train: Callable[[], None], repeats: int) -> None:
    alone, at_once, pause, written, beside = [], [], [], [], []
    for repeat in range(repeats):
        alone.append(seconds(train))
        at_once.append(seconds(partial(worker.save, work / f"sync{repeat}")))
        started = time.monotonic()
        [pending] = worker.save(work / f"async{repeat}", in_background=True)
        pause.append(time.monotonic() - started)
        beside.append(seconds(train))
        pending.wait(600)
        written.append(time.monotonic() - started)
        for kind in ("sync", "async"):
            shutil.rmtree(work / f"{kind}{repeat}")
    for name, values in (
        ("pause of a save at once", at_once),
        ("pause of a save in the background", pause),
        ("from its call to its last byte", written),
        ("a round alone", alone),
        ("the round beside it", beside),
    ):
        print(f"{name:36s} {min(values):6.2f} s   all: {' '.join(f'{value:.2f}' for value in values)}")


def compare_manifests(root: Path, worker: TrainWorker, repeats: int) -> None:
    """Checkpoints in turns, first without, then with a manifest, then the other way round."""

    def without(directory: Path) -> None:
        worker.save(directory)

    def with_hashes(directory: Path) -> dict[str, Entry]:
        return hash_files(directory, worker.engines, worker.save(directory), rank=0)

    state = checkpoint.RunState(rollout_id=0, version=1, data_source={})
    write_manifest = checkpoint.write_manifest
    names = ("without a manifest", "with a manifest", "read before a load")
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for turn in range(2 * repeats):
        sides = [("without a manifest", without), ("with a manifest", with_hashes)]
        for name, save_model in sides if turn % 2 else reversed(sides):
            checkpoint.write_manifest = write_manifest if save_model is with_hashes else lambda *_: None
            times[name].append(both_clocks(partial(checkpoint.save_checkpoint, root, state, save_model, keep=1)))
            if save_model is with_hashes:
                found = checkpoint.find_latest(root)
                assert found is not None
                times["read before a load"].append(both_clocks(partial(find_damage, found)))
    print(f"\nwhole checkpoints in turns, medians of {2 * repeats}")
    for name, pairs in times.items():
        walls, cpus = zip(*pairs, strict=True)
        spread = f"wall {min(walls):.2f} to {max(walls):.2f}"
        print(f"{name:36s} {statistics.median(walls):6.2f} s wall, {statistics.median(cpus):6.2f} s CPU   {spread}")
    pairs = zip(times["with a manifest"], times["without a manifest"], strict=True)
    ratios = [[one / other for one, other in zip(*pair, strict=True)] for pair in pairs]
    wall, cpu = (statistics.median(column) for column in zip(*ratios, strict=True))
    print(f"{'with over without, of pairs':36s} {wall:6.3f}   wall, {cpu:6.3f}   CPU")


def both_clocks(call: Callable[[], Any]) -> tuple[float, float]:
    """Seconds by the clock, and of CPU in all threads of this process."""
    cpu = time.process_time()
    wall = seconds(call)
    return wall, time.process_time() - cpu


if __name__ == "__main__":
    main()
