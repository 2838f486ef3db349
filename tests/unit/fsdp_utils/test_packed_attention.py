"""Attention over a pack against the formula with a mask, and against each sequence alone."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from vime.backends.fsdp_utils.attention import packed_attention

STARTS = (0, 3, 4, 21)  # sequences of 3, 1 and 17 tokens
QUERY_HEADS, KEY_HEADS, DIMENSION = 4, 2, 8


def draw() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    heads = (QUERY_HEADS, KEY_HEADS, KEY_HEADS)
    query, key, value = (torch.randn(1, number, STARTS[-1], DIMENSION, generator=generator) for number in heads)
    return query, key, value


def by_mask(query: Tensor, key: Tensor, value: Tensor, window: int | None, softcap: float | None) -> Tensor:
    """softmax(q k / sqrt(D)) v in float64 with the T x T mask that says which pairs belong together."""
    query, key, value = query.double(), key.double().repeat_interleave(2, 1), value.double().repeat_interleave(2, 1)
    position = torch.arange(STARTS[-1])
    sequence = torch.bucketize(position, torch.tensor(STARTS), right=True)
    distance = position.unsqueeze(1) - position
    allowed = (sequence.unsqueeze(1) == sequence) & (distance >= 0) & (distance < (window or STARTS[-1]))
    score = query @ key.mT / math.sqrt(DIMENSION)
    if softcap is not None:
        score = softcap * torch.tanh(score / softcap)
    return (score.masked_fill(~allowed, -math.inf).softmax(-1) @ value).transpose(1, 2)


@pytest.mark.parametrize("window", [None, 1, 4, 5, 17, 100])
@pytest.mark.parametrize("softcap", [None, 0.7])
def test_outputs_and_gradients_are_those_of_the_masked_formula(window: int | None, softcap: float | None) -> None:
    inputs = [tensor.requires_grad_() for tensor in draw()]
    found, _ = packed_attention(
        torch.nn.Module(), *inputs, None, sliding_window=window, softcap=softcap, pack_starts=STARTS
    )
    expected = by_mask(*inputs, window, softcap)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-6)
    weight = torch.randn(found.shape, generator=torch.Generator().manual_seed(6))
    gradients = torch.autograd.grad((found * weight).sum(), inputs)
    true_gradients = torch.autograd.grad((expected * weight).sum(), inputs)
    for gradient, true_gradient in zip(gradients, true_gradients, strict=True):
        torch.testing.assert_close(gradient, true_gradient, rtol=0, atol=5e-6)


def test_a_sequence_does_not_see_the_others() -> None:
    query, key, value = draw()
    alone, _ = packed_attention(
        torch.nn.Module(), query[:, :, 4:], key[:, :, 4:], value[:, :, 4:], None, pack_starts=(0, 17)
    )
    key[:, :, :4], value[:, :, :4] = 1e3, -1e3
    packed, _ = packed_attention(torch.nn.Module(), query, key, value, None, pack_starts=STARTS)
    torch.testing.assert_close(packed[:, 4:], alone, rtol=0, atol=1e-6)


@pytest.mark.parametrize("more", [{"s_aux": torch.zeros(4)}, {"pack_starts": None}])
def test_what_it_does_not_compute_is_refused(more: dict[str, object]) -> None:
    with pytest.raises(NotImplementedError, match="expected boundaries alone"):
        packed_attention(torch.nn.Module(), *draw(), None, **{"pack_starts": STARTS, **more})
