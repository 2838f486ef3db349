"""PPO with a critic in plain torch, one answer at a time, written from the papers. Nothing of vime's formulas."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.helpers.reference_policy import run_steps
from vime.data.rows import TrainRow
from vime.types import RoundPlan


class Critic(torch.nn.Module):
    """A transformer without vocabulary, and one number a token."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        from safetensors.torch import load_file
        from transformers import AutoModel

        self.model = AutoModel.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
        self.score = torch.nn.Linear(self.model.config.hidden_size, 1, bias=False)
        head = load_file(directory / "model.safetensors").get("score.weight")
        with torch.no_grad():
            self.score.weight.copy_(torch.zeros_like(self.score.weight) if head is None else head)

    def forward(self, row: TrainRow) -> Tensor:
        """[R]: what is predicted before each response token is chosen."""
        hidden = self.model(torch.tensor(row.tokens)[None]).last_hidden_state[0]
        first = row.total_length - row.response_length
        return self.score(hidden[first - 1 : -1])[:, 0]


def advantages_and_returns(
    reward: float, penalty: Tensor, value: Tensor, mask: Tensor, gamma: float, lambd: float
) -> tuple[Tensor, Tensor]:
    """The sum over l of (gamma lambda)^l delta_{t+l}, in full, over the tokens the policy chose; [R] float64 each."""
    kept = [index for index, is_kept in enumerate(mask.tolist()) if is_kept]
    count = len(kept)
    deltas = []
    for position, token in enumerate(kept):
        is_last = position == count - 1
        to_come = 0.0 if is_last else gamma * float(value[kept[position + 1]])
        deltas.append((reward if is_last else 0.0) - float(penalty[token]) + to_come - float(value[token]))
    advantage, target = torch.zeros(2, len(mask), dtype=torch.float64)
    for position, token in enumerate(kept):
        weights = [(gamma * lambd) ** later for later in range(count - position)]
        advantage[token] = sum(w * delta for w, delta in zip(weights, deltas[position:], strict=True))
        target[token] = advantage[token] + float(value[token])
    return advantage, target


def update_critic(
    critic: Critic,
    rows: Sequence[TrainRow],
    plan: RoundPlan,
    values: Sequence[Tensor],
    targets: Sequence[Tensor],
    flags: dict[str, Any],
) -> list[dict[str, float]]:
    """Every optimizer step of the round on the critic; `values` are those before it."""
    masks = [torch.tensor(row.loss_mask, dtype=torch.float32) for row in rows]
    clip, per_token = flags["value_clip"], flags.get("calculate_per_token_loss", False)

    def step_loss(numbers: list[int]) -> Tensor:
        tokens = sum(float(masks[row].sum()) for row in numbers)
        loss = torch.zeros(())
        for row in numbers:
            value, target = critic(rows[row]), targets[row].float()
            near = torch.minimum(torch.maximum(value, values[row] - clip), values[row] + clip)
            error = torch.maximum((value - target) ** 2, (near - target) ** 2) / 2
            total = (error * masks[row]).sum()
            loss = loss + (total / tokens if per_token else total / masks[row].sum() / len(numbers))
        return loss

    return run_steps(critic, plan, step_loss, peak=flags["critic_lr"])
