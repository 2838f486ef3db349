"""The same training round in plain torch and transformers, written from the papers: what the trainer must reproduce.

One sequence at a time, no packing, no parallelism, nothing imported from vime's formulas.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from vime.data.rows import TrainRow
from vime.types import RoundPlan, SamplingRule

CLIP, KL_COEF, ENTROPY_COEF = 0.2, 0.1, 0.01
PEAK_LR, FINAL_LR, TOTAL_STEPS = 1e-3, 1e-4, 8
TEMPERATURE, WEIGHT_DECAY, MAX_NORM, ADAM_EPS = 0.8, 0.1, 1.0, 1e-3


def load(directory: Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    model.get_input_embeddings().padding_idx = None  # in a row the padding token is a token: it is learned
    return model


def named_weights(model: torch.nn.Module) -> dict[str, Tensor]:
    """Weights by the names of the files. In memory transformers keeps all experts of a layer in two tensors."""
    if model.config.model_type == "gpt_oss":
        return dict(model.state_dict())  # the files have them so too
    named = {}
    for name, tensor in model.state_dict().items():
        prefix, is_fused, part = name.partition(".experts.")
        if not is_fused:
            named[name] = tensor
        elif part == "down_proj":
            named |= {f"{prefix}.experts.{number}.down_proj.weight": expert for number, expert in enumerate(tensor)}
        else:
            for number, expert in enumerate(tensor):
                gate, up = expert.chunk(2)
                named |= {
                    f"{prefix}.experts.{number}.gate_proj.weight": gate,
                    f"{prefix}.experts.{number}.up_proj.weight": up,
                }
    return named


def response_values(model: torch.nn.Module, row: TrainRow, temperature: float) -> tuple[Tensor, Tensor]:
    """(log p of the response tokens [R], entropies [R])."""
    tokens = torch.tensor(row.tokens)
    logits = model(tokens[None]).logits[0].float() / temperature
    first = row.total_length - row.response_length
    log_p = logits[first - 1 : -1].log_softmax(-1)
    return log_p.gather(-1, tokens[first:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


@torch.no_grad()
def log_probs(model: torch.nn.Module, rows: Sequence[TrainRow], temperature: float) -> list[Tensor]:
    return [response_values(model, row, temperature)[0] for row in rows]


@torch.no_grad()
def log_probs_under(model: torch.nn.Module, row: TrainRow, rule: SamplingRule) -> Tensor:
    """log p of the response tokens [R] under a sampling rule, one token at a time: keep the k likeliest, then of those
    the likeliest until they hold top_p."""
    tokens, first = torch.tensor(row.tokens), row.total_length - row.response_length
    logits_RV = model(tokens[None]).logits[0].float()[first - 1 : -1] / rule.temperature
    answer = torch.full_like(logits_RV, float("-inf"))
    for position, logits_V in enumerate(logits_RV):
        order = logits_V.argsort(descending=True)[: rule.top_k if rule.top_k > 0 else None]
        kept, mass = [], 0.0
        for token, share in zip(order.tolist(), logits_V[order].softmax(-1).tolist(), strict=True):
            if mass < rule.top_p:
                kept.append(token)
            mass += share
        answer[position, kept] = logits_V[kept].log_softmax(-1)
    return answer.gather(-1, tokens[first:, None])[:, 0]


def train_round(
    model: torch.nn.Module, reference: torch.nn.Module, rows: Sequence[TrainRow], plan: RoundPlan, *, per_token: bool
) -> list[dict[str, float]]:
    """GRPO with KL (k3) and entropy terms, gradient clipping, AdamW, cosine rate; loss, norm and rate of each step."""
    old = log_probs(model, rows, TEMPERATURE)
    anchor = log_probs(reference, rows, TEMPERATURE)

    def step_loss(numbers: list[int]) -> Tensor:
        trainable = sum(sum(rows[row].loss_mask) for row in numbers)
        loss = torch.zeros(())
        for row in numbers:
            logp, entropy = response_values(model, rows[row], TEMPERATURE)
            ratio, advantage = (logp - old[row]).exp(), rows[row].reward
            policy = -torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
            kl = (anchor[row] - logp).exp() - 1 - (anchor[row] - logp)
            mask = torch.tensor(rows[row].loss_mask, dtype=torch.float32)
            total = ((policy + KL_COEF * kl - ENTROPY_COEF * entropy) * mask).sum()
            loss = loss + (total / trainable if per_token else total / mask.sum() / len(numbers))
        return loss

    return run_steps(model, plan, step_loss)


def run_steps(
    model: torch.nn.Module, plan: RoundPlan, step_loss: Callable[[list[int]], Tensor], *, peak: float = PEAK_LR
) -> list[dict[str, float]]:
    """AdamW with gradient clipping and a cosine rate from `peak`; `step_loss` gets the row numbers of each step."""
    named = list(model.named_parameters())  # biases of stacked experts have a row for each
    matrices = [parameter for name, parameter in named if parameter.ndim > 1 and not name.endswith("bias")]
    vectors = [parameter for name, parameter in named if parameter.ndim == 1 or name.endswith("bias")]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}],
        lr=peak,
        betas=(0.9, 0.95),
        eps=ADAM_EPS,
    )
    steps = []
    for number, step in enumerate(plan.steps):
        loss = step_loss(sorted(row for rank in step.micro_batches for batch in rank for row in batch))
        optimizer.zero_grad()
        loss.backward()
        rate = FINAL_LR + (peak - FINAL_LR) * 0.5 * (1 + math.cos(math.pi * number / TOTAL_STEPS))
        for group in optimizer.param_groups:
            group["lr"] = rate
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        steps.append({"loss": float(loss.detach()), "grad_norm": float(norm), "lr": rate})
    return steps
