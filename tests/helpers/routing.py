"""Routing replay in plain torch: transformers' Qwen3-MoE told which experts to use, and rows that bring experts along.

E experts, K of them a token, T tokens of a row.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.helpers import megatron_models as models
from vime.data.rows import TrainRow

LAYERS, EXPERTS, TOP_K = models.SHAPE["num_hidden_layers"], models.EXPERTS["num_experts"], 2
COLUMN = "rollout_routed_experts"


def with_foreign_experts(rows: Sequence[TrainRow], seed: int = 3) -> list[TrainRow]:
    """Experts drawn at random. The last token has none, as from an engine; every third row lacks its first two tokens
    too, and row 4 brings none at all."""
    draw = random.Random(seed)
    given = []
    for index, row in enumerate(rows):
        chosen = [[draw.sample(range(EXPERTS), TOP_K) for _ in range(LAYERS)] for _ in range(row.total_length)]
        experts = np.array(chosen, dtype=np.int16).reshape(row.total_length, -1)
        experts[-1] = -1
        if index % 3 == 0:
            experts[:2] = -1
        if index == 4:
            experts[:] = -1
        given.append(dataclasses.replace(row, extra={COLUMN: experts}))
    return given


class GivenGate(torch.nn.Module):
    """The router of one layer of transformers' model; tokens with a record go where it says."""

    def __init__(self, gate: Any) -> None:
        super().__init__()
        self.weight, self.is_normalized = gate.weight, gate.norm_topk_prob
        self.given_TK: Tensor | None = None
        self.chosen_TK: Tensor

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits_TE = F.linear(hidden.reshape(-1, self.weight.shape[1]), self.weight)
        prob_TE = logits_TE.softmax(-1, dtype=torch.float32)
        chosen_TK = prob_TE.topk(TOP_K, dim=-1).indices
        if self.given_TK is not None:
            chosen_TK = torch.where(self.given_TK >= 0, self.given_TK, chosen_TK)
        self.chosen_TK = chosen_TK
        weight_TK = prob_TE.gather(-1, chosen_TK)
        if self.is_normalized:
            weight_TK = weight_TK / weight_TK.sum(-1, keepdim=True)
        return logits_TE, weight_TK.to(logits_TE.dtype), chosen_TK


def told(model: torch.nn.Module, rows: Sequence[TrainRow]) -> torch.nn.Module:
    """The same model with replaced routers: a sequence equal to one of `rows` uses that row's experts."""
    gates = []
    for layer in model.model.layers:
        layer.mlp.gate = GivenGate(layer.mlp.gate)
        gates.append(layer.mlp.gate)
    by_tokens = {tuple(row.tokens): torch.tensor(row.extra[COLUMN]).long() for row in rows if COLUMN in row.extra}

    def tell(_model: torch.nn.Module, arguments: tuple[Tensor, ...]) -> None:
        experts = by_tokens.get(tuple(arguments[0][0].tolist()))
        for number, gate in enumerate(gates):
            gate.given_TK = None if experts is None else experts[:, number * TOP_K : (number + 1) * TOP_K]

    model.register_forward_pre_hook(tell)
    return model


@torch.no_grad()
def with_own_experts(model: torch.nn.Module, rows: Sequence[TrainRow]) -> list[TrainRow]:
    """Rows with the experts, and on the response the log-probabilities, that `model` itself gives them."""
    model = told(model, [])
    given = []
    for row in rows:
        tokens = torch.tensor(row.tokens)
        logp_TV = model(tokens[None]).logits[0].float().log_softmax(-1)
        experts = torch.cat([layer.mlp.gate.chosen_TK for layer in model.model.layers], dim=-1).short().numpy()
        experts[-1] = -1
        first = row.total_length - row.response_length
        logp_R = logp_TV[first - 1 : -1].gather(-1, tokens[first:, None])[:, 0]
        given.append(dataclasses.replace(row, extra={COLUMN: experts}, rollout_log_probs=logp_R.tolist()))
    return given


def perturbed(model: torch.nn.Module, scale: float, seed: int = 5) -> torch.nn.Module:
    """Routers as another program's rounding would have them, much exaggerated."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in model.model.layers:
            weight = layer.mlp.gate.weight
            weight.add_(scale * weight.std() * torch.randn(weight.shape, generator=draw))
    return model
