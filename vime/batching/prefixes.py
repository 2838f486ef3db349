"""Prompts that several sequences of a pack begin with are computed once for all of them.

The completions of a group have one prompt, and what a causal model computes for it does not depend on later tokens. So
of a pack's T tokens only U are computed: each distinct prompt once, as a head, and after it the tokens of each
sequence, its rest. The gradient of a head is the sum over its sequences, as it would be from its copies.

Example: [a b | c] and [a b | d e], prompts of 2 tokens. Computed are a b, c, d e: U = 5 of T = 7.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vime.batching.pack import PackedBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """`count` beginnings of `length` tokens: prompts, or whole sequences that share none."""

    length: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rests:
    """`count` ends of `length` tokens after heads of `head_length`; `heads` are the numbers of their heads."""

    head_length: int
    length: int
    heads: Tensor  # [count] int64

    @property
    def count(self) -> int:
        return self.heads.numel()


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrompts:
    """The order in which a pack is computed: all heads, shorter ones first, each length together; then all rests."""

    kept_U: Tensor  # int64, the tokens of the pack that are computed, in their order
    place_T: Tensor  # int64, the position of each token of the pack among them
    heads: tuple[Heads, ...]
    rests: tuple[Rests, ...]

    @property
    def sizes(self) -> list[int]:
        """Tokens of each entry of `heads` and `rests`; their sum is U."""
        return [head.length * head.count for head in self.heads] + [rest.length * rest.count for rest in self.rests]


def share_prompts(batch: PackedBatch, *, tokens_per_call: float) -> SharedPrompts | None:
    """Return how the pack is computed; None for a pack without rows. Padding counts as the end of its sequence.

    Each length of heads, and each pair of lengths of rests, is a call of attention in every layer. `tokens_per_call` is
    how many tokens cost as much as one call. Where sharing would save fewer, every sequence is a head."""
    if not batch.row_slices:
        return None
    sequences = list(itertools.pairwise(batch.cu_seqlens))
    tokens = batch.tokens_T.tolist()
    by_prompt: dict[tuple[int, ...], list[int]] = {}
    for number, ((start, _), row_slice) in enumerate(zip(sequences, batch.row_slices, strict=True)):
        # the first response token is predicted at the last token of the prompt
        by_prompt.setdefault(tuple(tokens[start : row_slice.start + 1]), []).append(number)
    shared = _lay_out(sequences, [(len(prompt), members) for prompt, members in by_prompt.items()], batch.num_tokens)
    whole = _lay_out(sequences, [(0, [number]) for number in range(len(sequences))], batch.num_tokens)
    num_saved = batch.num_tokens - shared.kept_U.numel()
    return shared if num_saved > tokens_per_call * (len(shared.sizes) - len(whole.sizes)) else whole


def _lay_out(
    sequences: Sequence[tuple[int, int]], families: Sequence[tuple[int, list[int]]], num_tokens: int
) -> SharedPrompts:
    """Return the layout. `families`: length of the prompt, and the sequences that begin with it; for a single sequence
    the prompt does not matter."""
    heads: dict[int, list[int]] = {}  # length -> first sequence of each head
    rests: dict[tuple[int, int], list[tuple[int, int]]] = {}  # (head's length, length) -> (sequence, head's number)
    for num_prompt, members in families:
        start, end = sequences[members[0]]
        length = num_prompt if len(members) > 1 else end - start
        of_length = heads.setdefault(length, [])
        for member in members if len(members) > 1 else []:
            own = sequences[member][1] - sequences[member][0] - length
            if own:
                rests.setdefault((length, own), []).append((member, len(of_length)))
        of_length.append(members[0])
    lengths, ends = sorted(heads), sorted(rests)
    kept = [_span(sequences[number][0], length) for length in lengths for number in heads[length]]
    kept += [_span(sequences[number][0] + length, own) for length, own in ends for number, _ in rests[length, own]]
    kept_U = torch.cat(kept)
    return SharedPrompts(
        kept_U=kept_U,
        place_T=_places(kept_U, sequences, [members for _, members in families], num_tokens),
        heads=tuple(Heads(length=length, count=len(heads[length])) for length in lengths),
        rests=tuple(
            Rests(head_length=length, length=own, heads=torch.tensor([head for _, head in rests[length, own]]))
            for length, own in ends
        ),
    )


def _places(
    kept_U: Tensor, sequences: Sequence[tuple[int, int]], families: Sequence[list[int]], num_tokens: int
) -> Tensor:
    """Return the place of every token from those of the kept tokens: a copy has the place of its original."""
    place_T = torch.full((num_tokens,), -1)
    place_T[kept_U] = torch.arange(kept_U.numel())
    for members in families:
        first = sequences[members[0]][0]
        for member in members[1:]:
            start, end = sequences[member]
            copies = int((place_T[start:end] < 0).sum())
            place_T[start : start + copies] = place_T[first : first + copies]
    return place_T


def _span(start: int, length: int) -> Tensor:
    return torch.arange(start, start + length)
