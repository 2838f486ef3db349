"""Tokens per CPU-second of one GRPO training step: Vime's trainer, transformers in plain torch, and TRL's GRPOTrainer.

    .venv/bin/pip install -e '.[benchmarks]'        # TRL, once
    .venv/bin/python benchmarks/trainer.py [--without-trl] [--repeats 5] [--without-onednn]

One random Qwen2, the same weights, tokens, advantages and AdamW on every side, fp32, one thread each, one optimizer
step over one batch: forward, backward, clip, update. No old or reference log-probabilities are computed on any side (a
round of one step needs none); every side reports the entropy except plain torch, which computes nothing but the loss.
`variable`: long-tailed completion lengths; Vime packs them, the others pad. `equal`: all rows alike, nothing to pad.
`--without-onednn`: large products of Vime's linear layers by torch's default library too, as the other sides have them.
Only real tokens count as tokens. The loss and the gradient norm of the sides must agree, or the run ends with an error.
"""

import argparse
import importlib.util
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.turns import Costs, Step, take_turns
from benchmarks.vime_side import Row, make_model, make_row, make_worker, one_step_plan, to_train_rows

LR, BETAS, EPS, WEIGHT_DECAY, CLIP = 1e-5, (0.9, 0.95), 1e-8, 0.01, 1.0
VOCAB_SIZE = 16_384
SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": VOCAB_SIZE,
}
PAD = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=5, help="counted steps a side and batch (default: 5)")
    parser.add_argument("--rows", type=int, default=8, help="sequences of a batch (default: 8)")
    parser.add_argument("--without-trl", action="store_true", help="leave TRL out")
    parser.add_argument("--without-onednn", action="store_true", help="products of Vime as torch makes them by default")
    options = parser.parse_args()
    if not options.without_trl and importlib.util.find_spec("trl") is None:
        sys.exit("TRL is not installed. Install it with pip install -e '.[benchmarks]', or pass --without-trl.")
    batches = {"variable": variable_rows(options.rows), "equal": equal_rows(options.rows)}
    with tempfile.TemporaryDirectory(prefix="vime-trainer-") as scratch:
        model = make_model(Path(scratch), **SHAPE)
        make_tokenizer(model)
        arguments = {"model": str(model), "batches": batches}
        vime = arguments | {"with_onednn": not options.without_onednn}
        sides = {"vime": (build_vime, vime), "torch": (build_torch, arguments)}
        if not options.without_trl:
            sides["trl"] = (build_trl, arguments)
        turns = [(side, batch) for batch in batches for side in sides]
        costs = take_turns(sides, turns, repeats=options.repeats)
    check_agreement(costs)
    report(costs, batches)


def variable_rows(count: int) -> list[Row]:
    """Make prompts of 32 to 128 tokens; completions log-normal around 120, cut at 768: most are short, few are long."""
    draw = random.Random(0)
    lengths = [(draw.randint(32, 128), min(768, max(8, int(draw.lognormvariate(4.8, 0.9))))) for _ in range(count)]
    return [make_row(draw, prompt, response, VOCAB_SIZE) for prompt, response in lengths]


def equal_rows(count: int) -> list[Row]:
    draw = random.Random(1)
    return [make_row(draw, 80, 176, VOCAB_SIZE) for _ in range(count)]


def make_tokenizer(directory: Path) -> None:
    """TRL wants one; nothing is tokenized."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": PAD, "<eos>": 1, "<unk>": 2}
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<unk>")), pad_token="<pad>", eos_token="<eos>"
    ).save_pretrained(directory)


def build_vime(model: str, batches: dict[str, list[Row]], with_onednn: bool = True) -> Step:
    """The trainer of a run: rows and a plan as the RolloutManager makes them, one packed micro-batch."""
    from vime.backends.megatron_utils import cpu_linear

    if not with_onednn:
        cpu_linear.MIN_FLOPS = sys.maxsize
    worker = make_worker(
        model,
        device="cpu",
        lr=LR,
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        adam_eps=EPS,
        weight_decay=WEIGHT_DECAY,
        clip_grad=CLIP,
    )
    rows = {name: to_train_rows(batch) for name, batch in batches.items()}
    plans = {name: one_step_plan(batch) for name, batch in rows.items()}

    def step(name: str) -> dict[str, float]:
        metrics = worker.train_round(plans[name], dict(enumerate(rows[name])))
        return {"loss": metrics["train/loss"], "grad_norm": metrics["train/grad_norm"]}

    return step


def padded(rows: list[Row]) -> dict[str, Any]:
    """Pad prompts on the left and completions on the right, as TRL lays out a batch."""
    import torch

    prompt = max(len(row["prompt"]) for row in rows)
    response = max(len(row["response"]) for row in rows)
    prompts = [[PAD] * (prompt - len(row["prompt"])) + row["prompt"] for row in rows]
    responses = [row["response"] + [PAD] * (response - len(row["response"])) for row in rows]
    return {
        "prompt_ids": torch.tensor(prompts),
        "prompt_mask": (torch.tensor(prompts) != PAD).long(),
        "completion_ids": torch.tensor(responses),
        "completion_mask": (torch.tensor(responses) != PAD).long(),
        "advantages": torch.tensor([row["advantage"] for row in rows]),
    }


def build_torch(model: str, batches: dict[str, list[Row]]) -> Step:
    """transformers and torch alone, without waste where padding allows: logits of the completions only, fused AdamW."""
    import torch
    import torch.nn.functional as F
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa").train()
    optimizer = torch.optim.AdamW(
        policy.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, fused=True
    )
    tensors = {name: padded(rows) for name, rows in batches.items()}

    def step(name: str) -> dict[str, float]:
        batch = tensors[name]
        tokens = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
        seen = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
        positions = (seen.cumsum(1) - 1).clamp(min=0)
        has_padding = bool((seen == 0).any())
        predicting = torch.arange(batch["prompt_ids"].size(1) - 1, tokens.size(1) - 1)
        answers, mask = batch["completion_ids"], batch["completion_mask"].float()
        logits = policy(
            tokens,
            attention_mask=seen if has_padding else None,
            position_ids=positions,
            logits_to_keep=predicting,  # the places themselves: one more, sliced off, would cost a copy of all logits
            use_cache=False,
        ).logits
        logp = -F.cross_entropy(logits.flatten(0, 1), answers.flatten(), reduction="none").view_as(mask)
        ratio, advantage = torch.exp(logp - logp.detach()), batch["advantages"].unsqueeze(1)
        value = torch.maximum(-ratio * advantage, -ratio.clamp(0.8, 1.2) * advantage)
        loss = ((value * mask).sum(1) / mask.sum(1)).mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": loss.item(), "grad_norm": norm.item()}

    return step


def build_trl(model: str, batches: dict[str, list[Row]]) -> Step:
    """TRL's own training step: `GRPOTrainer.training_step` (its loss, its backward), its clipping and its optimizer, on
    batches in the form that its generation returns. Gradient checkpointing, on by default there, is off."""
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    class Prepared(GRPOTrainer):
        def _prepare_inputs(self, generation_batch: Any) -> Any:
            return generation_batch  # generated and scored already

    rows = len(next(iter(batches.values())))
    settings = GRPOConfig(
        output_dir=tempfile.mkdtemp(prefix="vime-trl-"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        loss_type="grpo",
        beta=0.0,
        num_generations=rows,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=1,
        learning_rate=LR,
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        adam_epsilon=EPS,
        weight_decay=WEIGHT_DECAY,
        max_grad_norm=CLIP,
        lr_scheduler_type="constant",
        model_init_kwargs={"dtype": torch.float32},
        report_to=[],
    )
    trainer = Prepared(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=settings,
        train_dataset=Dataset.from_list([{"prompt": "a"}] * rows),
        processing_class=AutoTokenizer.from_pretrained(model, padding_side="left"),
    )
    trainer.create_optimizer()
    policy, optimizer = trainer.accelerator.prepare(trainer.model, trainer.optimizer)
    trainer.current_gradient_accumulation_steps = 1
    tensors = {name: padded(rows) for name, rows in batches.items()}

    def step(name: str) -> dict[str, float]:
        policy.train()
        loss = trainer.training_step(policy, tensors[name], None)
        norm = trainer.accelerator.clip_grad_norm_(policy.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": loss.item(), "grad_norm": norm.item()}

    return step


def check_agreement(costs: dict[tuple[str, str], Costs]) -> None:
    """Every side learned the same: loss and gradient norm of each counted step within 1e-3 of Vime's."""
    for (side, batch), mine in costs.items():
        for number, (step, ours) in enumerate(zip(mine.steps, costs["vime", batch].steps, strict=True)):
            loss, norm = (abs(step.values[name] - ours.values[name]) for name in ("loss", "grad_norm"))
            if loss > 1e-3 or norm > 1e-3 * ours.values["grad_norm"]:
                sys.exit(
                    f"step {number}, {batch}: {side} computed {step.values}, vime {ours.values}; expected the same"
                )


def report(costs: dict[tuple[str, str], Costs], batches: dict[str, list[Row]]) -> None:
    print("| batch | side | tokens / CPU s | Vime is | CPU s a step (min-max) | wall s | peak MiB | of it before |")
    print("|---|---|---|---|---|---|---|---|")
    for batch, rows in batches.items():
        tokens = sum(len(row["prompt"]) + len(row["response"]) for row in rows)
        longest = sum(max(len(row[part]) for row in rows) for part in ("prompt", "response")) * len(rows)
        for (side, of), cost in costs.items():
            if of == batch:
                faster = cost.cpu_s / costs["vime", batch].cpu_s
                print(
                    f"| {batch} | {side} | {tokens / cost.cpu_s:.0f} | {faster:.2f}x "
                    f"| {cost.cpu_s:.2f} ({cost.spread}) | {cost.wall_s:.2f} "
                    f"| {cost.peak_mib:.0f} | {cost.built_mib:.0f} |"
                )
        print(f"\n{batch}: {tokens} tokens in {len(rows)} rows; padded {longest} ({longest / tokens:.2f}x)\n")


if __name__ == "__main__":
    main()
