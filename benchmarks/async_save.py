"""How long a checkpoint stops the training: written at once, or in the background (--async-save).

    python benchmarks/async_save.py [--hidden 768 --layers 12] [--directory DIR]

One trainer rank on the CPU, a random qwen2 model, AdamW. Prints the pause of each kind of save, the time until the
bytes are on the disk, and a training round with and without a save beside it.
"""

from __future__ import annotations

import argparse
import shutil
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
from vime.ray.backends import make_backend
from vime.training.worker import TrainWorker
from vime.types import RankInfo
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
    alone, at_once, pause, written, beside = [], [], [], [], []
    for repeat in range(args.repeats):
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
    worker.backend.close()


if __name__ == "__main__":
    main()
