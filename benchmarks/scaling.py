"""How the time of a training step grows with its tokens: lengths of one distribution, more and more of them.

    .venv/bin/python benchmarks/scaling.py [--repeats 3] [--max-tokens 4096]

The model, the GRPO step and the thread of `trainer.py`; 1,024 to 16,384 tokens, in micro-batches of --max-tokens. Every
1,024 tokens hold the same eight lengths, so only the number of tokens grows. Prints CPU seconds, and how far each step
is from the straight line through all of them.
"""

import argparse
import random
import sys
import tempfile
from pathlib import Path

import numpy

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.trainer import SHAPE, VOCAB_SIZE
from benchmarks.turns import Step, take_turns
from benchmarks.vime_side import make_model, make_row, make_worker, one_step_plan, to_train_rows

LENGTHS = ((32, 24), (48, 40), (24, 56), (40, 72), (32, 88), (48, 104), (24, 128), (40, 224))  # 1,024 tokens
SIZES = (1, 2, 4, 8, 16)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=3, help="counted steps of each size (default: 3)")
    parser.add_argument("--max-tokens", type=int, default=4096, help="tokens of a micro-batch (default: 4096)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="vime-scaling-") as scratch:
        model = make_model(Path(scratch), **SHAPE)
        sides = {"vime": (build, {"model": str(model), "max_tokens": options.max_tokens})}
        turns = [("vime", str(size)) for size in SIZES]
        costs = take_turns(sides, turns, repeats=options.repeats)
    tokens = numpy.array([1024.0 * size for size in SIZES])
    cpu_s = numpy.array([costs[turn].cpu_s for turn in turns])
    slope, start = numpy.polyfit(tokens, cpu_s, 1, w=1 / cpu_s)  # relative distances count
    distance = (start + slope * tokens) / cpu_s - 1
    print("| tokens | CPU s (min-max) | wall s | tokens / CPU s | the line is off by |\n|---|---|---|---|---|")
    for turn, count, seconds, off in zip(turns, tokens, cpu_s, distance, strict=True):
        cost = costs[turn]
        print(
            f"| {count:.0f} | {seconds:.2f} ({cost.spread}) | {cost.wall_s:.2f} | {count / seconds:.0f} | {off:+.1%} |"
        )
    print(f"\nline: {start:.3f} s + {slope * 1000:.3f} s per 1,000 tokens; at most {abs(distance).max():.1%} off")
    print(f"peak {costs[turns[-1]].peak_mib:.0f} MiB")


def build(model: str, max_tokens: int) -> Step:
    worker = make_worker(model, device="cpu", lr=1e-5)
    draw = random.Random(0)
    rows = {
        str(size): to_train_rows([make_row(draw, *lengths, VOCAB_SIZE) for _ in range(size) for lengths in LENGTHS])
        for size in SIZES
    }
    plans = {size: one_step_plan(batch, max_tokens) for size, batch in rows.items()}

    def step(size: str) -> dict[str, float]:
        return {"loss": worker.train_round(plans[size], dict(enumerate(rows[size])))["train/loss"]}

    return step


if __name__ == "__main__":
    main()
