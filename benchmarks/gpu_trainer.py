"""Tokens a second, TFLOP/s, HFU, MFU and peak memory of one trainer rank on a random model; on a GPU, or tiny on a CPU.

    .venv/bin/python benchmarks/gpu_trainer.py --size 0.5b                       # a GPU: bf16, NCCL
    .venv/bin/python benchmarks/gpu_trainer.py --size 1.7b --transformer-impl transformer_engine
    .venv/bin/python benchmarks/gpu_trainer.py --size tiny                       # any machine; the path, not a figure

One GRPO step after another over packed rows, no generation. HFU counts recomputed work, MFU does not; both are shares
of the dense bf16 peak of the device by its name (`vime/batching/flops.py`), n/a where that is not known.
"""

import argparse
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.vime_side import make_model, make_row, make_worker, one_step_plan, to_train_rows

SIZES: dict[str, dict[str, Any]] = {  # the shapes of Qwen2.5-0.5B and of a model of about 1.7B, random weights
    "tiny": {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 512,
    },
    "0.5b": {
        "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
        "num_key_value_heads": 2, "vocab_size": 151_936,
    },
    "1.7b": {
        "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "vocab_size": 151_936,
    },
}  # fmt: skip


def main() -> None:
    import torch

    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--size", choices=SIZES, default="0.5b" if on_gpu else "tiny", help="shape of the model")
    parser.add_argument("--tokens", type=int, default=65_536 if on_gpu else 2048, help="tokens of a step")
    parser.add_argument("--max-tokens", type=int, default=16_384 if on_gpu else 1024, help="tokens of a micro-batch")
    parser.add_argument("--steps", type=int, default=5, help="counted steps, after two that are not (default: 5)")
    parser.add_argument("--fp32", action="store_true", help="fp32 instead of bf16 (a CPU always takes fp32)")
    parser.add_argument("--transformer-impl", choices=("local", "transformer_engine"), default="local")
    parser.add_argument("--recompute", choices=("full", "selective"), help="--recompute-granularity")
    options = parser.parse_args()
    bf16 = on_gpu and not options.fp32
    with tempfile.TemporaryDirectory(prefix="vime-gpu-") as scratch:
        device = "cuda" if on_gpu else "cpu"  # a CPU takes a minute to draw the weights of a large one
        model = make_model(Path(scratch), dtype="bfloat16" if bf16 else "float32", device=device, **SIZES[options.size])
        report(measure(str(model), options, bf16=bf16), options)


def measure(model: str, options: argparse.Namespace, *, bf16: bool) -> dict[str, Any]:
    """Median seconds of a step, and the round's figures as train.py reports them."""
    import numpy as np
    import torch

    from vime.config.hf_config import read_model_shape
    from vime.config.parse import Config
    from vime.ray.planning import round_work
    from vime.training.device import device_name, peak_memory_gib

    flags: dict[str, Any] = {
        "device": "cuda" if torch.cuda.is_available() else "cpu",
        "bf16": bf16,
        "transformer_impl": options.transformer_impl,
        "recompute_granularity": options.recompute,
    }
    if options.recompute == "full":
        flags |= {"recompute_method": "uniform", "recompute_num_layers": 1}
    worker = make_worker(model, **flags)
    device = worker.backend.device
    rows = to_train_rows(make_rows(options.tokens, SIZES[options.size]["vocab_size"]))
    plan = one_step_plan(rows, options.max_tokens)
    seconds = []
    for _ in range(2 + options.steps):
        if flags["device"] == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        metrics = worker.train_round(plan, dict(enumerate(rows)))  # its metrics are read, so the GPU is done
        seconds.append(time.perf_counter() - started)
    config = Config().replace(hf_checkpoint=model, **flags)
    sizes = [(row.total_length, row.response_length) for row in rows]
    described = np.array(sizes, dtype=[("total_length", np.int64), ("response_length", np.int64)])
    work = round_work(config, read_model_shape(model), plan, described)
    step_s = statistics.median(seconds[2:])
    return {
        "device": device_name(device),
        "parameters": sum(meta.nbytes for meta in worker.actor.weight_metadata()) // (2 if bf16 else 4),
        "tokens": work.num_tokens,
        "micro-batches": plan.steps[0].num_micro_batches,
        "step_s": step_s,
        "peak_gib": peak_memory_gib(device),
        "loss": metrics["train/loss"],
        **work.rates(step_s, num_ranks=1, device_name=device_name(device), bf16=bf16),
    }


def make_rows(tokens: int, vocab_size: int) -> list[Any]:
    """Make prompts of 1/8 and completions of 1/64 to 1/8 of the step, at least 16 rows; long completions are rare."""
    draw = random.Random(0)
    rows, left = [], tokens
    while left > 8:
        prompt = min(draw.randint(4, max(5, tokens // 64)), left // 2)
        response = min(max(4, int(draw.lognormvariate(0, 0.8) * tokens / 48)), left - prompt)
        rows.append(make_row(draw, prompt, response, vocab_size))
        left -= prompt + response
    return rows


def report(figures: dict[str, Any], options: argparse.Namespace) -> None:
    def share(name: str) -> str:
        return f"{figures[name]:.1%}" if name in figures else "n/a"

    print(f"{options.size} ({figures['parameters'] / 1e6:.1f} M parameters) on {figures['device']}")
    print(f"{figures['tokens']} tokens a step in {figures['micro-batches']} micro-batches: {figures['step_s']:.3f} s")
    print(f"tokens/s  {figures['perf/train_tokens_per_sec']:.0f}")
    print(f"TFLOP/s   {figures['perf/train_tflops']:.2f}")
    print(f"HFU       {share('perf/hfu')}")
    print(f"MFU       {share('perf/mfu')}")
    print(f"peak      {figures['peak_gib']:.2f} GiB")


if __name__ == "__main__":
    main()
