"""Tokens a second, TFLOP/s, HFU, MFU and peak memory of one trainer rank on a random model; on a GPU, or tiny on a CPU.

    .venv/bin/python benchmarks/gpu_trainer.py --size 0.5b                       # a GPU: bf16, NCCL
    .venv/bin/python benchmarks/gpu_trainer.py --size 1.7b --transformer-impl transformer_engine
    .venv/bin/python benchmarks/gpu_trainer.py --size 0.5b --plain               # beside transformers in plain torch
    .venv/bin/python benchmarks/gpu_trainer.py --size tiny                       # any machine; the path, not a figure

One GRPO step after another over packed rows, no generation. HFU counts recomputed work, MFU does not; both are shares
of the dense bf16 peak of the device by its name (`vime/batching/flops.py`), n/a where that is not known.

--plain: the same model, micro-batches, loss and settings of AdamW by transformers and torch alone, in turns with Vime's
steps. Attention is torch's own, sequence by sequence (flash attention in bf16); logits are of the completions only;
AdamW is fused. Under bf16 its weights, gradients and moments are bf16, without autocast: 8 bytes a parameter, where
Vime keeps 18 (fp32 gradients, main weights and moments), and it does not compute the entropy. Both must find the same
gradient norm in the first step, or the benchmark ends with an error. Both are on the device together: where that is
too much, take a smaller --max-tokens.
"""

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.vime_side import Row, make_model, make_row, make_worker, one_step_plan, to_train_rows

WARM_UP = 2  # steps of each side that are not counted
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


Step = Callable[[], float]
"""One optimizer step. Returns its gradient norm, so the device is done."""


@dataclass
class Side:
    """One of those that take turns, and what its steps were like."""

    step: Step
    norms: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    peak_gib: float = 0.0  # in the first steps, in which the other side makes none

    def turn(self) -> None:
        import torch

        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # what the other side's step has left
            torch.cuda.synchronize()
        started = time.perf_counter()
        self.norms.append(self.step())
        self.seconds.append(time.perf_counter() - started)

    @property
    def step_s(self) -> float:
        return statistics.median(self.seconds[WARM_UP:])


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
    parser.add_argument("--plain", action="store_true", help="beside transformers and torch alone")
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
    config = Config().replace(hf_checkpoint=model, **flags)
    worker = make_worker(model, **flags)
    device = worker.backend.device
    token_rows = make_rows(options.tokens, SIZES[options.size]["vocab_size"])
    rows = to_train_rows(token_rows)
    plan = one_step_plan(rows, options.max_tokens)
    sides = {"vime": lambda: lambda: worker.train_round(plan, dict(enumerate(rows)))["train/grad_norm"]}
    if options.plain:
        [batches] = plan.steps[0].micro_batches
        packs = [[token_rows[number] for number in batch] for batch in batches]
        sides["plain"] = lambda: plain_step(model, packs, config.optimizer, device=device, bf16=bf16)
    built = {}
    for name, build in sides.items():
        peak_memory_gib(device)  # of what came before
        side = built[name] = Side(build())
        for _ in range(WARM_UP):
            side.turn()
        side.peak_gib = peak_memory_gib(device)
    check_norms(built, bf16=bf16)
    for _ in range(options.steps):
        for side in built.values():
            side.turn()
    sizes = [(row.total_length, row.response_length) for row in rows]
    described = np.array(sizes, dtype=[("total_length", np.int64), ("response_length", np.int64)])
    work = round_work(config, read_model_shape(model), plan, described)
    step_s = built["vime"].step_s
    return {
        "device": device_name(device),
        "parameters": sum(meta.nbytes for meta in worker.actor.weight_metadata()) // (2 if bf16 else 4),
        "tokens": work.num_tokens,
        "micro-batches": len(plan.steps[0].micro_batches[0]),
        "step_s": step_s,
        "peak_gib": built["vime"].peak_gib,
        "plain_s": built["plain"].step_s if options.plain else None,
        **work.rates(step_s, num_ranks=1, device_name=device_name(device), bf16=bf16),
    }


def plain_step(model: str, packs: list[list[Row]], optimizer: Any, *, device: Any, bf16: bool) -> Step:
    """transformers and torch alone: one optimizer step over micro-batches of packed rows, as one would write it."""
    import torch
    import torch.nn.functional as F
    from transformers import AttentionInterface, AutoModelForCausalLM

    lengths: list[int] = []  # of the pack that is computed

    def attention(
        _module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        _mask: Any,
        *,
        scaling: float,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        parts = zip(*(tensor.split(lengths, dim=2) for tensor in (query, key, value)), strict=True)
        outputs = [
            F.scaled_dot_product_attention(*part, is_causal=True, scale=scaling, enable_gqa=True) for part in parts
        ]
        return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None

    AttentionInterface.register("by_sequence", attention)
    dtype = torch.bfloat16 if bf16 else torch.float32
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, attn_implementation="by_sequence")
    policy.to(device).train()
    betas = (optimizer.adam_beta1, optimizer.adam_beta2)
    adam = torch.optim.AdamW(
        policy.parameters(), optimizer.lr, betas, optimizer.adam_eps, optimizer.weight_decay, fused=True
    )
    num_rows = sum(map(len, packs))

    def loss_of(rows: list[Row]) -> torch.Tensor:
        lengths[:] = [len(row["prompt"]) + len(row["response"]) for row in rows]
        tokens, positions, predicting, weights = [], [], [], []
        for row in rows:
            first = len(tokens) + len(row["prompt"]) - 1
            predicting += range(first, first + len(row["response"]))
            tokens += row["prompt"] + row["response"]
            positions += range(len(row["prompt"]) + len(row["response"]))
            weights += [row["advantage"] / len(row["response"]) / num_rows] * len(row["response"])
        tokens_T, place_A = torch.tensor(tokens, device=device), torch.tensor(predicting, device=device)
        weight_A = torch.tensor(weights, device=device)
        position_T = torch.tensor(positions, device=device)
        logits_AV = policy(
            tokens_T[None], position_ids=position_T[None], logits_to_keep=place_A, use_cache=False
        ).logits[0]
        logp_A = -F.cross_entropy(logits_AV.float(), tokens_T[place_A + 1], reduction="none")
        return -((logp_A - logp_A.detach()).exp() * weight_A).sum()  # the first step of a round: nothing is clipped

    def step() -> float:
        for rows in packs:
            loss_of(rows).backward()
        norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), optimizer.clip_grad)
        adam.step()
        adam.zero_grad()
        found = norm.item()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return found

    return step


def check_norms(sides: dict[str, Side], *, bf16: bool) -> None:
    """Both sides computed the same first step; bf16 sums a gradient of many micro-batches coarsely."""
    first = {name: side.norms[0] for name, side in sides.items()}
    if max(first.values()) > min(first.values()) * (1.05 if bf16 else 1.001):
        sys.exit(f"gradient norms of the first step: {first}; expected the same")


def make_rows(tokens: int, vocab_size: int) -> list[Row]:
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
    if figures["plain_s"] is not None:
        print(f"plain     {figures['tokens'] / figures['plain_s']:.0f} tokens/s ({figures['plain_s']:.3f} s a step)")
        print(f"ratio     {figures['plain_s'] / figures['step_s']:.2f} (Vime's tokens/s over plain torch's)")


if __name__ == "__main__":
    main()
