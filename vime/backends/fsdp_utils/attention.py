"""Causal attention within each sequence of a pack, for every model that uses transformers' attention interface.

transformers would separate the sequences of a pack by a T x T mask. No mask is made here: each sequence is attended
on its own, so cost and memory grow with the tokens of a pack, not with their square, and no token sees another
sequence.

Shapes: T packed tokens, L tokens of one sequence, H query heads, G key/value heads, D head dimension.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

NAME = "vime_packed"
NOT_COMPUTED = ("s_aux", "position_bias", "head_mask")
"""Arguments that some models pass to their attention and that this one does not compute."""


def register() -> None:
    """Make `attn_implementation=NAME` known to transformers in this process."""
    AttentionInterface.register(NAME, packed_attention)


def packed_attention(
    module: torch.nn.Module,  # noqa: ARG001  transformers passes it
    query: Tensor,  # [1, H, T, D]
    key: Tensor,  # [1, G, T, D]
    value: Tensor,  # [1, G, T, D]
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    pack_starts: Sequence[int] | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """([1, T, H, D], None). `pack_starts`: where each sequence starts, and T; the engine hands it to the model.

    Dropout is left out whatever the model's configuration says: the probability ratio must compare like with like.
    """
    given = [name for name in NOT_COMPUTED if others.get(name) is not None]
    if attention_mask is not None or pack_starts is None or given:
        raise NotImplementedError(
            f"packed attention got a mask: {attention_mask is not None}, pack boundaries: {pack_starts is not None}, "
            f"and {given}; expected boundaries alone"
        )
    # split, not slices: the gradient of a slice is as long as the pack, of a split as long as its sequence
    lengths = [end - start for start, end in itertools.pairwise(pack_starts)]
    sequences = zip(*(x.split(lengths, 2) for x in (query, key, value)), strict=True)
    outputs = [_attend(*parts, scale=scaling, window=sliding_window, softcap=softcap) for parts in sequences]
    return torch.cat(outputs, 2).transpose(1, 2).contiguous(), None


def _attend(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float | None, window: int | None, softcap: float | None
) -> Tensor:
    """[1, H, L, D] of one sequence. Position i sees the positions (i - window, i], or all up to i without a window."""
    length = query.size(2)
    is_grouped = query.size(1) != key.size(1)
    if softcap is None and (window is None or window >= length):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=is_grouped)
    block = min(window or length, length)  # a block of queries sees its own keys and those of the block before: linear
    outputs, first = [], 0
    before: tuple[Tensor, Tensor] | None = None
    for queries, own_keys, own_values in zip(*(x.split(block, 2) for x in (query, key, value)), strict=True):
        seen, keys, values = first, own_keys, own_values
        if before is not None:
            seen, keys, values = first - block, torch.cat([before[0], keys], 2), torch.cat([before[1], values], 2)
        row = torch.arange(first, first + queries.size(2), device=query.device).unsqueeze(1)
        column = torch.arange(seen, seen + keys.size(2), device=query.device)
        mask = column <= row
        if window:
            mask &= column > row - window
        if softcap is None:
            out = F.scaled_dot_product_attention(
                queries, keys, values, attn_mask=mask, scale=scale, enable_gqa=is_grouped
            )
        else:
            out = _softcapped(queries, keys, values, mask, scale=scale, softcap=softcap)
        outputs.append(out)
        first, before = first + block, (own_keys, own_values)
    return torch.cat(outputs, 2)


def _softcapped(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *, scale: float | None, softcap: float
) -> Tensor:
    """Compute attention with scores limited to (-softcap, softcap) by tanh, as in Gemma 2; no fused kernel does
    that."""
    groups = query.size(1) // key.size(1)
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    score = query @ key.transpose(2, 3) * (scale if scale is not None else query.size(-1) ** -0.5)
    score = torch.tanh(score / softcap) * softcap
    weight = score.masked_fill(~mask, float("-inf")).softmax(-1, dtype=torch.float32)
    return weight.to(value.dtype) @ value
