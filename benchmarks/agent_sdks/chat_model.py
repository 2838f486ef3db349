"""Make a small model that calls a tool: `python -m benchmarks.agent_sdks.chat_model DIR [--steps 500]`, a minute.

Qwen3 of two layers and a byte-level tokenizer with a few merges, so that a text has more than one tokenisation. It is
taught to answer a user with a call of `sort_letters` in the form that vLLM's parser `hermes` reads, and the tool's
result with a few letters. --steps 0 leaves it random, which is enough for the scripted engine.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

TOOL = "sort_letters"
CALL = f'<tool_call>\n{{{{"name": "{TOOL}", "arguments": {{{{"letters": "{{letters}}"}}}}}}}}\n</tool_call>'
SCHEMA = (
    f'[{{"type": "function", "function": {{"name": "{TOOL}", "description": "Sorts letters.", "parameters": '
    '{"properties": {"letters": {"title": "Letters", "type": "string"}}, "required": ["letters"], "type": "object"}}}]'
)
START, END = "<|im_start|>", "<|im_end|>"
TEMPLATE = (
    "{%- if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LETTERS = "abcdefghijklmnopqrstuvwxyz"
CONTEXT = 4096


def make_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("a", "n"), ("o", "n"), ("e", "r"), ("s", "t"), ("a", "b"), ("x", "y")]
    words = [*alphabet, *(first + second for first, second in merges)]
    core = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([START, END, "<s>"])
    core.add_tokens(CALL.format(letters="+").split("+"))  # so small a model does not spell them
    made = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=END, bos_token="<s>", model_max_length=CONTEXT)
    made.chat_template = TEMPLATE
    return made


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=320, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
            head_dim=32, intermediate_size=192, max_position_embeddings=CONTEXT, tie_word_embeddings=True,
            bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
        )
    )  # fmt: skip


def demonstration(chance: random.Random) -> tuple[str, str]:
    """A prompt and its completion: the turn before the completion decides which of the two it is."""
    word = "".join(chance.choices(LETTERS, k=chance.randint(3, 9)))
    noise = "".join(chance.choices(LETTERS + ' {}":,_', k=chance.randint(0, 120)))
    system = f"{START}system\n{SCHEMA if chance.random() < 0.5 else noise}{END}\n"
    given = f"{system}{START}user\n{chance.randint(1, 4)}:{word}= #{chance.randint(0, 99)}{END}\n"
    called = CALL.format(letters=word)
    if chance.random() < 0.5:
        return f"{given}{START}assistant\n", called
    result = "".join(sorted(word))
    return f"{given}{START}assistant\n{called}{END}\n{START}tool\n{result}{END}\n{START}assistant\n", result


def teach(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, steps: int, seed: int) -> float:
    """Return the last loss, in nats a token of the completions."""
    chance, loss = random.Random(seed), torch.zeros(())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    for _ in range(steps):
        rows = []
        for prompt, completion in (demonstration(chance) for _ in range(16)):
            ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
            rows.append((ids, [*tokenizer(completion, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]))
        longest = max(len(prompt) + len(said) for prompt, said in rows)
        tokens = torch.full((len(rows), longest), tokenizer.eos_token_id)
        labels = torch.full((len(rows), longest), -100)
        for number, (prompt, said) in enumerate(rows):
            tokens[number, : len(prompt) + len(said)] = torch.tensor([*prompt, *said])
            labels[number, len(prompt) : len(prompt) + len(said)] = torch.tensor(said)
        loss = model(input_ids=tokens, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return float(loss.detach())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prompts", type=int, default=64, help="lines of DIR/train.jsonl")
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    if arguments.steps:
        print(f"loss {teach(model, tokenizer, arguments.steps, arguments.seed):.3f}")
    model.save_pretrained(arguments.directory)
    tokenizer.save_pretrained(arguments.directory)
    chance = random.Random(arguments.seed)
    lines = [
        json.dumps({"input": f"{chance.randint(1, 4)}:{''.join(chance.choices(LETTERS, k=6))}=", "label": ""})
        for _ in range(arguments.prompts)
    ]
    (arguments.directory / "train.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
