"""Make the quick-start's tokenizer, warm-started model and data: no download, one thread, about 50 CPU seconds.

Task "k-th largest letter, think or guess". The prompt `4:xlzwxuqa=` asks for the 4th largest letter. The policy may
guess (`w`) or write a scratchpad first (`<think>alquwxxz</think>w`: sort, then answer). The reward looks only at the
text after the last `</think>`; length and format are not rewarded. The warm start leaves a model that can think but
mostly guesses (30 % think demonstrations in the last 6 % of supervised training), so reinforcement learning has
something to find out: thinking pays. Most of the gain is strategy selection, not skill learned from nothing.

    python examples/quickstart/prepare.py --model-dir models/quickstart --data-dir data/quickstart

Running it again does nothing while the outputs match the arguments (see `warm_start.json` and `data.json`).
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

LETTERS = "abcdefghijklmnopqrstuvwxyz"
PAD, BOS, EOS, THINK, END_THINK = range(5)
TOKENS = ["<pad>", "<bos>", "<eos>", "<think>", "</think>", *LETTERS, *"0123456789", *" :=,.?+-*()#"]
VOCAB = {token: number for number, token in enumerate(TOKENS)}
VOCAB_SIZE = 64  # 53 used; a round number divides over tensor-parallel ranks
RECIPE = 1  # raise when anything below changes what the seed produces


@dataclass(frozen=True)
class Problem:
    """One prompt with its answer and the sorted letters a thinking answer writes."""

    prompt: str
    answer: str
    scratchpad: str
    k: int


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


def sample_problem(rng: random.Random) -> Problem:
    """4 + Exp(mean 5) letters, at most 24, repeats allowed; k uniform in 1..4."""
    size = min(24, 4 + int(rng.expovariate(1 / 5.0)))
    letters = [rng.choice(LETTERS) for _ in range(size)]
    k = rng.choice((1, 2, 3, 4))
    ordered = sorted(letters)
    return Problem(f"{k}:{''.join(letters)}=", ordered[-k], "".join(ordered), k)


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


def batches_by_length(rng: random.Random, batch_size: int, think_share: float) -> list[list[tuple[list[int], int]]]:
    """16 batches of demonstrations of similar length, in random order: little padding."""
    demonstrations = []
    for _ in range(batch_size * 16):
        problem = sample_problem(rng)
        demonstrations.append(encode(problem, thinks=rng.random() < think_share))
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


def warm_start(model: Qwen3ForCausalLM, recipe: WarmStart, seed: int) -> None:
    """Supervised training in place."""
    model.train()
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    queue: list[list[tuple[list[int], int]]] = []
    has_switched, started = False, time.process_time()
    for step in range(recipe.steps):
        progress = step / recipe.steps
        warmup = min(1.0, (step + 1) / recipe.warmup_steps)
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * warmup * max(recipe.final_lr_fraction, 1 - progress)
        if not queue or (progress >= recipe.switch_at and not has_switched):
            has_switched = progress >= recipe.switch_at
            queue = batches_by_length(rng, recipe.batch_size, recipe.think_share_after if has_switched else 1.0)
        loss = response_loss(model, queue.pop())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 100 == 0:
            spent = time.process_time() - started
            say(f"warm start: step {step + 1}/{recipe.steps}, loss {loss.item():.3f}, {spent:.0f} CPU s")


@torch.no_grad()
def sampled_accuracy(model: Qwen3ForCausalLM, *, num_problems: int = 256, seed: int = 5) -> tuple[float, float]:
    """Share of right answers and share of thinking answers at temperature 1, at most 48 tokens."""
    model.eval()
    rng = random.Random(seed)
    torch.manual_seed(seed)
    problems = [sample_problem(rng) for _ in range(num_problems)]
    right = thinking = 0
    by_length: dict[int, list[Problem]] = {}
    for problem in problems:
        by_length.setdefault(len(problem.prompt), []).append(problem)
    for same_length in by_length.values():  # equal lengths: no padding
        ids = torch.tensor([[BOS, *(VOCAB[letter] for letter in problem.prompt)] for problem in same_length])
        start = ids.shape[1]
        for _ in range(48):
            logits = model(input_ids=ids, use_cache=False, logits_to_keep=1).logits[:, -1].float()
            ids = torch.cat([ids, torch.multinomial(torch.softmax(logits, -1), 1)], 1)
            if bool((ids[:, start:] == EOS).any(1).all()):
                break
        for problem, row in zip(same_length, ids[:, start:].tolist(), strict=True):
            answer = row[: row.index(EOS)] if EOS in row else []
            thinking += row[0] == THINK
            after = answer[len(answer) - answer[::-1].index(END_THINK) :] if END_THINK in answer else answer
            right += after == [VOCAB[problem.answer]]
    return right / num_problems, thinking / num_problems


def write_data(directory: Path, *, num_train: int, num_eval: int, seed: int) -> None:
    """train.jsonl and eval.jsonl; no evaluation prompt is in the training file."""
    directory.mkdir(parents=True, exist_ok=True)
    rng = random.Random(1000 + seed)
    problems: dict[str, Problem] = {}
    while len(problems) < num_train + num_eval:
        problem = sample_problem(rng)
        problems.setdefault(problem.prompt, problem)
    ordered = list(problems.values())
    for name, part in (("eval.jsonl", ordered[:num_eval]), ("train.jsonl", ordered[num_eval:])):
        lines = [
            json.dumps({"input": p.prompt, "label": p.answer, "metadata": {"k": p.k, "letters": len(p.scratchpad)}})
            for p in part
        ]
        write_atomically(directory / name, "\n".join(lines) + "\n")


def write_atomically(path: Path, text: str) -> None:
    temporary = path.with_suffix(path.suffix + ".tmp")
    temporary.write_text(text)
    temporary.replace(path)


def stamp_matches(path: Path, wanted: dict[str, object], outputs: list[str]) -> bool:
    """Whether the stamp records these arguments and every output is there."""
    if not path.is_file() or not all((path.parent / name).is_file() for name in outputs):
        return False
    try:
        made = json.loads(path.read_text())
    except ValueError:
        return False
    return all(made.get(key) == value for key, value in wanted.items())


def make_model(directory: Path, recipe: WarmStart, seed: int) -> None:
    wanted = {"recipe": RECIPE, "seed": seed, **asdict(recipe)}
    stamp = directory / "warm_start.json"
    if stamp_matches(stamp, wanted, ["config.json", "model.safetensors", "tokenizer.json"]):
        say(f"model: {directory} is up to date ({stamp.read_text()})")
        return
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    model = build_model(seed)
    say(f"model: {sum(p.numel() for p in model.parameters()):,} parameters, warm start of {recipe.steps} steps")
    warm_start(model, recipe, seed)
    accuracy, think_share = sampled_accuracy(model)
    directory.mkdir(parents=True, exist_ok=True)
    stamp.unlink(missing_ok=True)
    model.save_pretrained(directory)
    build_tokenizer().save_pretrained(directory)
    made = {**wanted, "sampled_accuracy": round(accuracy, 3), "think_share": round(think_share, 3)}
    write_atomically(stamp, json.dumps(made))
    say(f"model: {directory}; base accuracy {accuracy:.3f}, thinks in {think_share:.0%} of its answers")


def make_data(directory: Path, *, num_train: int, num_eval: int, seed: int) -> None:
    wanted = {"recipe": RECIPE, "seed": seed, "train": num_train, "eval": num_eval}
    stamp = directory / "data.json"
    if stamp_matches(stamp, wanted, ["train.jsonl", "eval.jsonl"]):
        say(f"data: {directory} is up to date")
        return
    stamp.unlink(missing_ok=True)
    write_data(directory, num_train=num_train, num_eval=num_eval, seed=seed)
    write_atomically(stamp, json.dumps(wanted))
    say(f"data: {num_train} training and {num_eval} evaluation problems in {directory}")


def say(text: str) -> None:
    sys.stdout.write(f"prepare: {text}\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model-dir", type=Path, default=Path("models/quickstart"))
    parser.add_argument("--data-dir", type=Path, default=Path("data/quickstart"))
    parser.add_argument("--seed", type=int, default=0, help="of model, warm start and data (default: 0)")
    parser.add_argument("--steps", type=int, default=WarmStart.steps, help="warm-start steps (default: 800)")
    parser.add_argument("--num-train", type=int, default=4096, help="training problems (default: 4096)")
    parser.add_argument("--num-eval", type=int, default=64, help="evaluation problems (default: 64)")
    options = parser.parse_args()
    make_data(options.data_dir, num_train=options.num_train, num_eval=options.num_eval, seed=options.seed)
    make_model(options.model_dir, WarmStart(steps=options.steps), options.seed)


if __name__ == "__main__":
    main()
