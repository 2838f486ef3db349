"""How long ranks wait for the heaviest one, without --balance-data and with it, by length and by FLOPs. No training.

    .venv/bin/python benchmarks/balance.py [--dp 8] [--rows 128] [--rounds 50]

Rounds of long-tailed completions (log-normal, cut at 8,192 tokens) to prompts of 64 to 512 tokens, for the shape of
Qwen2.5-1.5B; planned as the RolloutManager does, in micro-batches of 16,384 tokens. Medians over rounds.
"""

import argparse
import random
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from vime.batching.flops import train_flops
from vime.batching.measure import plan_metrics
from vime.batching.plan import plan_round
from vime.config.hf_config import ModelShape

SHAPE = ModelShape(
    model_type="qwen2",
    num_layers=28,
    hidden_size=1536,
    num_attention_heads=12,
    num_key_value_heads=2,
    head_dim=128,
    intermediate_size=8960,
    num_experts=0,
    num_experts_per_token=0,
    moe_intermediate_size=0,
    vocab_size=151_936,
    max_position_embeddings=32_768,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--dp", type=int, default=8, help="data-parallel ranks (default: 8)")
    parser.add_argument("--rows", type=int, default=128, help="samples of a step (default: 128)")
    parser.add_argument("--rounds", type=int, default=50, help="rounds (default: 50)")
    options = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {"no": [], "length": [], "flops": []}
    for seed in range(options.rounds):
        lengths, loads = draw_round(random.Random(seed), options.rows)
        for balance, by_round in found.items():
            plan = plan_round(
                seed,
                lengths,
                [1] * len(lengths),
                dp_size=options.dp,
                samples_per_step=options.rows,
                micro_batch_size=None,
                max_tokens_per_micro_batch=16_384,
                loads={"no": None, "length": loads["tokens"], "flops": loads["flops"]}[balance],
            )
            by_round.append(plan_metrics(plan, lengths, loads, pack_multiple=1, sequence_multiple=1))
    names = ("perf/dp_imbalance_tokens", "perf/dp_imbalance_flops")
    print(f"| balanced by | {' | '.join(f'{name}: median (max)' for name in names)} |\n|---|---|---|")
    for balance, by_round in found.items():
        cells = []
        for name in names:
            values = [metrics[name] for metrics in by_round]
            cells.append(f"{statistics.median(values):.4f} ({max(values):.4f})")
        print(f"| {balance} | {' | '.join(cells)} |")


def draw_round(draw: random.Random, rows: int) -> tuple[list[int], dict[str, list[int]]]:
    """Total lengths, and what each row weighs by either measure."""
    responses = [min(8192, max(16, int(draw.lognormvariate(6.5, 1.0)))) for _ in range(rows)]
    lengths = [draw.randint(64, 512) + response for response in responses]
    flops = [train_flops(SHAPE, *size) for size in zip(lengths, responses, strict=True)]
    return lengths, {"tokens": lengths, "flops": flops}


if __name__ == "__main__":
    main()
