"""A scripted engine with a tied model, which may keep an older table in one of its two uses; and ranks beside it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from tests.helpers import tiny_models
from vime.backends.vllm_utils.fake import FakeEngine
from vime.data.rows import TrainRow
from vime.types import SamplingRule

USES = ("lm_head", "embed_tokens")


class TiedEngine(FakeEngine):
    """Computes with a tied model of its own, into which it loads what it receives. `keeps`: of which of USES it keeps
    the table that it started with, as a copy inside an engine does that nobody rebuilds. `is_random`: it starts with
    random weights, as an engine that waits for an update, and not with the model's."""

    def __init__(self, model: Path, *, keeps: str = "", is_random: bool = False, name: str = "e0") -> None:
        super().__init__(name=name, score=self._score_by_model)
        self.keeps, self._model = keeps, tiny_models.load(model)
        assert self._model.lm_head.weight is self._model.model.embed_tokens.weight
        self._table = self._model.lm_head.weight.detach().clone()
        if is_random:
            self._table.uniform_(-1e-3, 1e-3, generator=torch.Generator().manual_seed(1))  # as vLLM's

    def _score_by_model(self, prompt: Sequence[int]) -> list[float]:
        own = self._model
        own.load_state_dict(self.weights, strict=False)
        new = self.weights["model.embed_tokens.weight"]
        own.lm_head.weight = torch.nn.Parameter(self._table if self.keeps == "lm_head" else new.clone())
        if self.keeps == "embed_tokens":
            own.model.embed_tokens.weight = torch.nn.Parameter(self._table)
        return tiny_models.log_probs(own, list(prompt))


class RanksOf:
    """`Trainers` that compute with this model."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    def log_probs(self, rows: Sequence[TrainRow], rule: SamplingRule) -> list[list[float]]:
        return [tiny_models.log_probs(self._model, row.tokens.tolist())[-row.response_length :] for row in rows]
