"""Make the quick start's tokenizer and warm-started model: what lies in `model/` beside this file, about a minute.

The warm start is supervised training on demonstrations of the task (`prepare.py`), at first only such that think. At
the end 30 % of them think, so that the model mostly guesses although it can think. How fast it gets there differs
between processors: training is chaotic, and a last bit that is rounded otherwise ends in another model (the thinking
share was 2 % on one machine and 61 % on another). Therefore the last phase continues until the measured share lies in
THINK_WINDOW, and the script refuses to write a model that does not come to lie there or cannot do the task by thinking.
The quick start does not run this script: it begins with the model in `model/` on every machine.

    python examples/quickstart/warm_start.py --model-dir models/mine --seed 0

Every prompt starts with `<bos>`: the tokenizer's post-processor adds it, the prompt text does not contain it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

sys.path.insert(0, str(Path(__file__).resolve().parent))  # not there when this file is loaded by its path
from prepare import LETTERS, Problem, sample_problem, say, write_atomically

PAD, BOS, EOS, THINK, END_THINK = range(5)
TOKENS = ["<pad>", "<bos>", "<eos>", "<think>", "</think>", *LETTERS, *"0123456789", *" :=,.?+-*()#"]
VOCAB = {token: number for number, token in enumerate(TOKENS)}
VOCAB_SIZE = 64  # 53 used; a round number divides over tensor-parallel ranks
THINK_WINDOW = (0.25, 0.35)  # share of completions with steps, in which the last phase ends
LEAST_SKILL = 0.85  # share of right answers among completions with steps


@dataclass(frozen=True, kw_only=True)
class WarmStart:
    """The supervised recipe. One schedule and one optimizer: a second stage with a fresh Adam forgets how to think."""

    steps: int = 800
    batch_size: int = 64
    learning_rate: float = 4e-3
    warmup_steps: int = 20
    final_lr_fraction: float = 0.05
    switch_at: float = 0.94  # share of the steps that show thinking only
    think_share_after: float = 0.3  # share of thinking demonstrations after the switch
    more_steps: int = 10  # between two measurements of the thinking share, once the schedule is over
    most_measurements: int = 30


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a model does with fresh problems at temperature 1."""

    accuracy: float
    think_share: float
    accuracy_when_thinking: float


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character; `<think>` and `</think>` are ordinary tokens, so decoding keeps them."""
    core = Tokenizer(models.WordLevel(VOCAB, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    core.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )
    tokenizer.add_tokens(["<think>", "</think>"], special_tokens=False)
    return tokenizer


def build_model(seed: int) -> Qwen3ForCausalLM:
    """111,040 parameters; head_dim 32 is the smallest that vLLM's CPU attention takes."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=192,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        rope_theta=10000.0,
        rms_norm_eps=1e-6,
        initializer_range=0.02,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
        attn_implementation="sdpa",
    )
    return Qwen3ForCausalLM(config)


def encode(problem: Problem, *, thinks: bool) -> tuple[list[int], int]:
    """Token ids of a demonstration and the number of prompt tokens in front."""
    prompt = [BOS, *(VOCAB[letter] for letter in problem.prompt)]
    thought = [THINK, *(VOCAB[letter] for letter in problem.scratchpad), END_THINK] if thinks else []
    return [*prompt, *thought, VOCAB[problem.answer], EOS], len(prompt)


def demonstration_batches(rng: random.Random, batch_size: int, think_share: float) -> list[list[tuple[list[int], int]]]:
    """16 batches of demonstrations in random order. Batches in which all think hold demonstrations of similar length:
    little padding. Mixed ones are not sorted, because that would part those that think from those that do not."""
    demonstrations = []
    for _ in range(batch_size * 16):
        problem = sample_problem(rng)
        demonstrations.append(encode(problem, thinks=rng.random() < think_share))
    if think_share == 1.0:
        demonstrations.sort(key=lambda pair: len(pair[0]))
    batches = [demonstrations[start : start + batch_size] for start in range(0, len(demonstrations), batch_size)]
    rng.shuffle(batches)
    return batches


def response_loss(model: Qwen3ForCausalLM, batch: list[tuple[list[int], int]]) -> torch.Tensor:
    """Mean negative log-likelihood of the response tokens. Right padding is invisible to a causal model."""
    longest = max(len(tokens) for tokens, _ in batch)
    ids = torch.full((len(batch), longest), PAD)
    mask = torch.zeros(len(batch), longest)
    for row, (tokens, prompt_length) in enumerate(batch):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        mask[row, prompt_length : len(tokens)] = 1
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits.float()
    log_probs = torch.log_softmax(logits, -1).gather(2, ids[:, 1:, None])[..., 0]
    return -(log_probs * mask[:, 1:]).sum() / mask[:, 1:].sum()


def warm_start(model: Qwen3ForCausalLM, recipe: WarmStart, seed: int) -> Measured:
    """Train in place, at the end until nothing is to be refused any more. Returns the last measurement."""
    model.train()
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    queue: list[list[tuple[list[int], int]]] = []

    def learn(think_share: float, learning_rate: float) -> float:
        if not queue:
            queue.extend(demonstration_batches(rng, recipe.batch_size, think_share))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        loss = response_loss(model, queue.pop())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    switch = int(recipe.switch_at * recipe.steps)
    for step in range(recipe.steps):
        if step == switch:
            queue.clear()
        warmup = min(1.0, (step + 1) / recipe.warmup_steps)
        decay = max(recipe.final_lr_fraction, 1 - step / recipe.steps)
        share = 1.0 if step < switch else recipe.think_share_after
        loss = learn(share, recipe.learning_rate * warmup * decay)
        if (step + 1) % 100 == 0:
            say(f"warm start: step {step + 1}/{recipe.steps}, loss {loss:.3f}, {time.process_time():.0f} CPU s")
    measured = measure(model)
    for _ in range(recipe.most_measurements):
        say(f"warm start: {measured}")
        if refusal(measured) is None:
            break
        model.train()
        for _ in range(recipe.more_steps):
            learn(recipe.think_share_after, recipe.learning_rate * recipe.final_lr_fraction)
        measured = measure(model)
    return measured


@torch.no_grad()
def measure(model: Qwen3ForCausalLM, *, num_problems: int = 1024, seed: int = 5) -> Measured:
    """Answer fresh problems at temperature 1 with at most 48 tokens each."""
    model.eval()
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    by_length: dict[int, list[Problem]] = {}
    for _ in range(num_problems):
        problem = sample_problem(rng)
        by_length.setdefault(len(problem.prompt), []).append(problem)
    right = thinking = right_thinking = 0
    for same_length in by_length.values():  # equal lengths: no padding
        ids = torch.tensor([[BOS, *(VOCAB[letter] for letter in problem.prompt)] for problem in same_length])
        start = ids.shape[1]
        for _ in range(48):
            logits = model(input_ids=ids, use_cache=False, logits_to_keep=1).logits[:, -1].float()
            ids = torch.cat([ids, torch.multinomial(torch.softmax(logits, -1), 1, generator=generator)], 1)
            if bool((ids[:, start:] == EOS).any(1).all()):
                break
        for problem, row in zip(same_length, ids[:, start:].tolist(), strict=True):
            answer = row[: row.index(EOS)] if EOS in row else []
            after = answer[len(answer) - answer[::-1].index(END_THINK) :] if END_THINK in answer else answer
            is_right = after == [VOCAB[problem.answer]]
            right += is_right
            if row[0] == THINK:
                thinking += 1
                right_thinking += is_right
    return Measured(
        accuracy=right / num_problems,
        think_share=thinking / num_problems,
        accuracy_when_thinking=right_thinking / max(1, thinking),
    )


def refusal(measured: Measured) -> str | None:
    """Why a model is no start for the quick start; None when it is one."""
    low, high = THINK_WINDOW
    if not low <= measured.think_share <= high:
        return f"it thinks in {measured.think_share:.0%} of its completions, expected {low:.0%} to {high:.0%}"
    if measured.accuracy_when_thinking < LEAST_SKILL:
        return (
            f"{measured.accuracy_when_thinking:.0%} of the completions that think are right, expected {LEAST_SKILL:.0%}"
        )
    return None


def make_model(directory: Path, recipe: WarmStart, seed: int) -> None:
    """Warm start, measure, write; or end with a message and exit code 1."""
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    model = build_model(seed)
    say(f"model: {sum(p.numel() for p in model.parameters()):,} parameters, warm start of {recipe.steps} steps")
    measured = warm_start(model, recipe, seed)
    reason = refusal(measured)
    if reason is not None:
        sys.exit(f"warm_start: nothing is written: {reason}. Take another --seed or more --steps.")
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    build_tokenizer().save_pretrained(directory)
    made = {"seed": seed, **asdict(recipe), **{name: round(value, 3) for name, value in asdict(measured).items()}}
    write_atomically(directory / "warm_start.json", json.dumps(made, indent=1) + "\n")
    say(f"model: {directory}; {measured}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model-dir", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0, help="of the first weights and the demonstrations (default: 0)")
    parser.add_argument("--steps", type=int, default=WarmStart.steps, help="of the schedule (default: 800)")
    options = parser.parse_args()
    make_model(options.model_dir, WarmStart(steps=options.steps), options.seed)


if __name__ == "__main__":
    main()
