"""The other sides of end_to_end.py, each a process: `end_to_end_loops.py SIDE TASK.json ROUNDS.jsonl`.

torch: a loop as one would write it for speed with transformers and torch alone. Each prompt is read once for all its
samples; keys and values lie in buffers of their final length; completions that have ended leave the batch. Training:
rows sorted by length into micro-batches, padded on the right (so that no mask is needed), logits of the completions'
places only, fused AdamW. In a round of one step the policy is its own old policy: no ratio, no clipping.
torch-onednn: the same, with the linear layers of Vime's trainer (backends/megatron_utils/cpu_linear.py), which choose.
trl, trl-vllm: TRL's GRPOTrainer as it is, with its generation by transformers or by vLLM in the same process (without
vLLM's packed weights, which TRL 1.16 cannot renew).

A line of ROUNDS.jsonl is written when a round's optimizer step is done: its wall clock, and the mean reward.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.cache_utils import Cache, DynamicLayer

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.end_to_end_rewards import score

Task = dict[str, Any]  # end_to_end.Task as JSON, with rounds, seed and micro_tokens
Note = Callable[[float], None]
Row = tuple[list[int], list[int]]  # prompt, answer


def main() -> None:
    side, task_file, out = sys.argv[1:]
    task = json.loads(Path(task_file).read_text())
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    torch.manual_seed(task["seed"])
    with Path(out).open("w", buffering=1) as lines:

        def note(reward: float) -> None:
            lines.write(json.dumps({"t": time.time(), "reward": reward}) + "\n")

        if side.startswith("trl"):
            run_trl(task, note, with_vllm=side == "trl-vllm")
        else:
            run_torch(task, note, with_onednn=side == "torch-onednn")
    os._exit(0)  # what these libraries do on their way out is not measured


def records(task: Task) -> list[dict[str, Any]]:
    """The prompts of all rounds, in the order of the file."""
    lines = Path(task["data"]).read_text().splitlines()
    return [json.loads(line) for line in lines[: task["rounds"] * task["prompts"]]]


def run_torch(task: Task, note: Note, *, with_onednn: bool) -> None:
    tokenizer = AutoTokenizer.from_pretrained(task["model"])
    policy = AutoModelForCausalLM.from_pretrained(task["model"], dtype=torch.float32, attn_implementation="sdpa")
    if with_onednn:
        use_onednn(policy)
    betas = (0.9, task["beta2"])
    optimizer = torch.optim.AdamW(policy.parameters(), lr=0.0, betas=betas, eps=1e-8, weight_decay=0.0, fused=True)
    everything, end = records(task), tokenizer.eos_token_id
    for number in range(task["rounds"]):
        asked = everything[number * task["prompts"] :][: task["prompts"]]
        prompts = [tokenizer(record["input"])["input_ids"] for record in asked]
        answers = generate(policy, prompts, samples=task["samples"], length=task["response"], end=end)
        rewards = [
            score(
                task["reward"],
                tokens=answer,
                text=tokenizer.decode(answer, skip_special_tokens=True),
                label=asked[row // task["samples"]]["label"],
                has_ended=answer[-1] == end,
            )
            for row, answer in enumerate(answers)
        ]
        groups = torch.tensor(rewards).view(-1, task["samples"])
        advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)
        rows = [(prompts[row // task["samples"]], answer) for row, answer in enumerate(answers)]
        optimizer.param_groups[0]["lr"] = task["lr"] * min(1.0, number / task["warmup"])
        learn(policy, optimizer, rows, advantages.flatten(), max_tokens=task["micro_tokens"])
        note(sum(rewards) / len(rewards))


def use_onednn(policy: Any) -> None:
    from vime.backends.megatron_utils.cpu_linear import linear, pays

    class Linear(torch.nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if not pays(x, self.weight):
                return F.linear(x, self.weight, self.bias)
            return linear(x, self.weight, self.bias, None)

    for module in policy.modules():
        if type(module) is torch.nn.Linear:
            module.__class__ = Linear


class BufferedLayer(DynamicLayer):
    """Keys and values in buffers of their final length: torch.cat would copy all of them for each token."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self._length = length
        self._buffers: list[Tensor] = []  # keys, values: [rows, heads, length, channels]

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if not self._buffers:
            self.lazy_initialization(keys, values)
            self._buffers = [new.new_empty(*new.shape[:2], self._length, new.size(3)) for new in (keys, values)]
        start = self.get_seq_length()
        stop = start + keys.size(2)
        for buffer, new in zip(self._buffers, (keys, values), strict=True):
            buffer[:, :, start:stop] = new
        self.keys, self.values = (buffer[:, :, :stop] for buffer in self._buffers)
        return self.keys, self.values

    def keep(self, rows: Tensor) -> None:
        """These rows only, each as often as it is named."""
        filled = self.get_seq_length()
        chosen = []
        for buffer in self._buffers:
            other = buffer.new_empty(len(rows), *buffer.shape[1:])
            torch.index_select(buffer[:, :, :filled], 0, rows, out=other[:, :, :filled])
            chosen.append(other)
        self._buffers = chosen
        self.keys, self.values = (buffer[:, :, :filled] for buffer in chosen)


@torch.no_grad()
def generate(policy: Any, prompts: Sequence[list[int]], *, samples: int, length: int, end: int) -> list[list[int]]:
    """Sample `samples` completions of each prompt, at temperature 1, of at most `length` tokens, `end` included."""
    policy.eval()
    longest = max(map(len, prompts))
    layers = [BufferedLayer(longest + length) for _ in range(policy.config.num_hidden_layers)]
    cache = Cache(layers=layers)
    tokens = torch.tensor([[end] * (longest - len(prompt)) + prompt for prompt in prompts])
    seen = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    is_padded = bool((seen == 0).any())
    positions = (seen.cumsum(1) - 1).clamp(min=0)
    answers: list[list[int]] = [[] for _ in range(len(prompts) * samples)]
    open_rows = torch.arange(len(answers))  # which answers the rows of the batch are
    for number in range(length):
        logits = policy(
            tokens,
            attention_mask=seen if is_padded else None,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        if number == 0:
            rows = torch.arange(len(prompts)).repeat_interleave(samples)
            logits, seen, positions = logits[rows], seen[rows], positions[rows, -1:]
            for layer in layers:
                layer.keep(rows)
        drawn = torch.multinomial(logits.softmax(-1), 1)
        for row, token in zip(open_rows.tolist(), drawn.squeeze(1).tolist(), strict=True):
            if not answers[row] or answers[row][-1] != end:
                answers[row].append(token)
        is_open = torch.tensor([answers[row][-1] != end for row in open_rows.tolist()])
        if not is_open.any():
            break
        tokens, positions = drawn, positions + 1
        seen = torch.cat([seen, seen.new_ones(len(seen), 1)], 1)
        if is_open.float().mean() < 0.75:  # a copy of the rest pays when enough have ended
            kept = is_open.nonzero().squeeze(1)
            tokens, positions, seen, open_rows = tokens[kept], positions[kept], seen[kept], open_rows[kept]
            for layer in layers:
                layer.keep(kept)
    return answers


def learn(policy: Any, optimizer: Any, rows: list[Row], advantages: Tensor, *, max_tokens: int) -> None:
    """Take one step: the mean over all completion tokens of -advantage log p."""
    policy.train()
    count = sum(len(answer) for _, answer in rows)
    for batch in micro_batches(rows, max_tokens):
        longest = max(len(rows[row][0]) + len(rows[row][1]) for row in batch)
        tokens = torch.zeros(len(batch), longest, dtype=torch.long)
        is_answer = torch.zeros(len(batch), longest, dtype=torch.bool)  # predicted from the place before
        for place, row in enumerate(batch):
            prompt, answer = rows[row]
            tokens[place, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
            is_answer[place, len(prompt) : len(prompt) + len(answer)] = True
        hidden = policy.model(tokens, use_cache=False).last_hidden_state
        logits = policy.lm_head(hidden[:, :-1][is_answer[:, 1:]])
        cost = F.cross_entropy(logits, tokens[is_answer], reduction="none")
        weight = advantages[batch].unsqueeze(1).expand(-1, longest)[is_answer]
        (cost * weight).sum().div(count).backward()
        del logits, cost
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def micro_batches(rows: list[Row], max_tokens: int) -> Iterator[list[int]]:
    """Row numbers by length, at most `max_tokens` with their padding."""
    order = sorted(range(len(rows)), key=lambda row: len(rows[row][0]) + len(rows[row][1]))
    batch: list[int] = []
    for row in order:
        if batch and (len(batch) + 1) * (len(rows[row][0]) + len(rows[row][1])) > max_tokens:
            yield batch
            batch = []
        batch.append(row)
    yield batch


def run_trl(task: Task, note: Note, *, with_vllm: bool) -> None:
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    last: list[float] = []

    def reward(completions: list[str], completion_ids: list[list[int]], label: list[str], **_: Any) -> list[float]:
        rewards = [
            score(task["reward"], tokens=ids, text=text, label=expected, has_ended=ids[-1] == tokenizer.eos_token_id)
            for text, ids, expected in zip(completions, completion_ids, label, strict=True)
        ]
        last[:] = [sum(rewards) / len(rewards)]
        return rewards

    class Note(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            note(last[0])

    batch = task["prompts"] * task["samples"]
    engine = {}
    if with_vllm:
        from vllm import _custom_ops

        # Packed copies take the place of the weights, and TRL, which loads tensor by tensor, then finds none to load.
        _custom_ops._supports_onednn = False
        context = task["context"]
        engine = {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": context}
    tokenizer = AutoTokenizer.from_pretrained(task["model"], padding_side="left")
    settings = GRPOConfig(
        output_dir=tempfile.mkdtemp(prefix="vime-trl-"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,  # on by default there: a third forward pass
        loss_type="dapo",  # the mean over all tokens of the step
        beta=0.0,
        epsilon=0.2,
        epsilon_high=0.28,
        num_generations=task["samples"],
        max_completion_length=task["response"],
        per_device_train_batch_size=task["trl_rows"],
        gradient_accumulation_steps=batch // task["trl_rows"],
        shuffle_dataset=False,
        learning_rate=task["lr"],
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=task["warmup"],
        adam_beta2=task["beta2"],
        weight_decay=0.0,
        max_grad_norm=1.0,
        max_steps=task["rounds"],
        seed=task["seed"],
        optim="adamw_torch_fused",
        model_init_kwargs={"dtype": torch.float32},
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        report_to=[],
        **engine,
    )
    rows = [{"prompt": record["input"], "label": record["label"]} for record in records(task)]
    trainer = GRPOTrainer(
        model=task["model"],
        reward_funcs=reward,
        args=settings,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[Note()],
    )
    trainer.train()


if __name__ == "__main__":
    main()
