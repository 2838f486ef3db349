"""Logits that are read a chunk of rows at a time: the same answers, and only the last chunk is held."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from vime.backends.megatron_utils import model
from vime.backends.megatron_utils.model import _read_in_chunks


class Head:
    """A product, and what is read of it: the sum of squares and the first column of each row. Remembers the rows."""

    def __init__(self) -> None:
        self.weight = torch.tensor([[1.0, 2.0, 3.0], [-1.0, 0.5, 2.0]], requires_grad=True)
        self.read: list[tuple[int, int]] = []

    def __call__(self, hidden_C1H: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        logits = hidden_C1H.squeeze(1) @ self.weight
        self.read.append((rows.start, len(logits)))
        return logits.square().sum(-1), logits[:, 0]


def answered(entries: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Head, list[Tensor]]:
    monkeypatch.setitem(model.LOGIT_ENTRIES, "cpu", entries)
    head, hidden = Head(), torch.arange(10.0).view(5, 1, 2).requires_grad_()
    squares, firsts = _read_in_chunks(hidden, head, 3)
    (squares * torch.tensor([1.0, 2.0, 0.0, 1.0, 3.0]) + firsts).sum().backward()
    assert hidden.grad is not None
    assert head.weight.grad is not None
    return head, [squares, firsts, hidden.grad, head.weight.grad]


def test_chunks_answer_what_all_rows_at_once_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, expected = answered(15, monkeypatch)  # 5 rows of 3 columns fit
    assert whole.read == [(0, 5)]
    chunked, got = answered(7, monkeypatch)  # 2 rows fit: chunks of 2, 2 and 1
    # backward begins with the last chunk, which is still there; the others are computed anew
    assert chunked.read == [(0, 2), (2, 2), (4, 1), (2, 2), (0, 2)]
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_row_that_is_wider_than_a_chunk_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(model.LOGIT_ENTRIES, "cpu", 1)
    head = Head()
    with torch.no_grad():  # nothing is kept for a backward pass, so nothing is read twice
        squares, _ = _read_in_chunks(torch.ones(3, 1, 2), head, 3)
    assert head.read == [(0, 1), (1, 1), (2, 1)]
    assert squares.tolist() == [31.25] * 3  # 0, 2.5, 5
