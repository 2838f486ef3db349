"""Rows to one packed micro-batch: sequences follow each other without padding between them.

T: packed tokens. R: response tokens of a row. Position t of a sequence predicts its token t + 1, so response token j
of a row with P prompt tokens is predicted at position P - 1 + j of that row: every per-token column of the response
(mask, advantage, log-probabilities) is there. A trainer computes `logp_T[t] = log p(labels_T[t] | tokens up to t)`
and all columns line up.

Prompts that several sequences of a pack begin with are computed once for all of them. The completions of a group have
one prompt, and what a causal model computes for it does not depend on later tokens. So of a pack's T tokens only U are
computed: each distinct prompt once, as a head, and after it the tokens of each sequence, its rest. The gradient of a
head is the sum over its sequences, as it would be from its copies.

Example: [a b | c] and [a b | d e], prompts of 2 tokens. Computed are a b, c, d e: U = 5 of T = 7.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vime.data.rows import TrainRow
from vime.types import NOT_RECORDED, HandoffError

MIN_DUMMY_TOKENS = 2
ROUTED_EXPERTS = "rollout_routed_experts"


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch:
    """One micro-batch in the form that the model takes. All tensors have T entries; W: layers x top-k.

    Padding (token 0, mask 0) is the tail of a sequence: `cu_seqlens[-1] == T` always, and causal attention keeps it
    from reaching real tokens. A batch without rows is one dummy sequence with mask 0 and `row_slices == []`.
    """

    tokens_T: Tensor  # int64
    labels_T: Tensor  # int64, the next token; 0 at a sequence's last position and in padding
    position_T: Tensor  # int64, counts from 0 in each sequence
    mask_T: Tensor  # float32, 1 where the position predicts a trainable response token
    advantage_T: Tensor  # float32, the row's reward on its response positions, else 0
    rollout_logp_T: Tensor  # float32, the engine's log-probabilities on response positions, else 0
    extra_T: dict[str, Tensor] = field(default_factory=dict)  # further response columns by name, else 0
    routed_experts_TW: Tensor | None = None  # int16, when the rows carry them; NOT_RECORDED in padding
    cu_seqlens: list[int]  # where each sequence starts, and T
    max_seqlen: int  # longest sequence, padding included
    row_slices: list[slice]  # the prediction positions of each row's response, R long

    @property
    def num_tokens(self) -> int:
        return self.cu_seqlens[-1]


def pack(
    rows: Sequence[TrainRow],
    *,
    pad_to_multiple: int = 1,
    sequence_multiple: int = 1,
    device: str | torch.device = "cpu",
    extra: Mapping[str, Sequence[Tensor]] | None = None,
) -> PackedBatch:
    """Pack `rows` one after the other, each padded to a multiple of `sequence_multiple` (context parallel splits every
    sequence into equal chunks), the total to a multiple of `pad_to_multiple` (sequence parallel splits the pack).

    `extra[name][i]` is the [R] tensor of row i for a further column, aligned like its `rollout_log_probs`.
    """
    if pad_to_multiple < 1 or sequence_multiple < 1:
        raise ValueError(
            f"pack: pad_to_multiple {pad_to_multiple}, sequence_multiple {sequence_multiple}; expected >= 1"
        )
    _check_predictable(rows)
    starts, num_tokens = pack_layout([row.total_length for row in rows], pad_to_multiple, sequence_multiple)
    cu_seqlens = [*starts, num_tokens] if rows else [0, num_tokens]
    tokens_T = torch.zeros(num_tokens, dtype=torch.int64)
    labels_T = torch.zeros(num_tokens, dtype=torch.int64)
    for row, start in zip(rows, starts, strict=True):
        row_tokens = torch.as_tensor(row.tokens, dtype=torch.int64)
        tokens_T[start : start + row.total_length] = row_tokens
        labels_T[start : start + row.total_length - 1] = row_tokens[1:]
    row_slices = [
        slice(start + row.total_length - row.response_length - 1, start + row.total_length - 1)
        for row, start in zip(rows, starts, strict=True)
    ]
    lengths = [end - start for start, end in itertools.pairwise(cu_seqlens)]
    masks = [torch.as_tensor(row.loss_mask, dtype=torch.float32) for row in rows]
    advantages = [torch.full((row.response_length,), row.reward, dtype=torch.float32) for row in rows]
    rollout_logps = [torch.as_tensor(row.rollout_log_probs, dtype=torch.float32) for row in rows]
    return PackedBatch(
        tokens_T=tokens_T.to(device),
        labels_T=labels_T.to(device),
        position_T=torch.cat([torch.arange(length) for length in lengths]).to(device),
        mask_T=_place(masks, row_slices, num_tokens, "loss_mask").to(device),
        advantage_T=_place(advantages, row_slices, num_tokens, "reward").to(device),
        rollout_logp_T=_place(rollout_logps, row_slices, num_tokens, "rollout_log_probs").to(device),
        extra_T={
            name: _place(columns, row_slices, num_tokens, name).to(device) for name, columns in (extra or {}).items()
        },
        routed_experts_TW=_place_experts(rows, starts, num_tokens, device),
        cu_seqlens=cu_seqlens,
        max_seqlen=max(lengths),
        row_slices=row_slices,
    )


def pack_layout(lengths: Sequence[int], pad_to_multiple: int, sequence_multiple: int) -> tuple[list[int], int]:
    """Return where each sequence starts, and how many tokens the pack has with its padding."""
    starts, end = [], 0
    for length in lengths:
        starts.append(end)
        end += _round_up(length, sequence_multiple)
    return starts, _round_up(max(end, MIN_DUMMY_TOKENS), math.lcm(pad_to_multiple, sequence_multiple))


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _check_predictable(rows: Sequence[TrainRow]) -> None:
    for row in rows:
        if not 0 <= row.response_length < row.total_length:
            raise HandoffError(
                f"sample {row.sample_index}: {row.total_length} tokens, {row.response_length} of them the response. "
                "Expected at least one prompt token, because position t predicts token t + 1; check the rollout."
            )


def _place(columns: Sequence[Tensor], row_slices: Sequence[slice], num_tokens: int, name: str) -> Tensor:
    """Write the [R] tensor of each row to its prediction positions, in the column's dtype; 0 elsewhere."""
    placed_T = torch.zeros(num_tokens, dtype=columns[0].dtype if len(columns) else torch.float32)
    if len(columns) != len(row_slices):
        raise ValueError(f"pack: column {name!r} has {len(columns)} rows, expected {len(row_slices)}")
    for column_R, positions in zip(columns, row_slices, strict=True):
        expected = positions.stop - positions.start
        if column_R.numel() != expected:
            raise HandoffError(
                f"pack: column {name!r} has {column_R.numel()} entries for a response of {expected} tokens."
            )
        placed_T[positions] = column_R.detach().cpu()
    return placed_T


def _place_experts(
    rows: Sequence[TrainRow], starts: Sequence[int], num_tokens: int, device: str | torch.device
) -> Tensor | None:
    """Return [T, W] when a row has the column. The entry of a token holds the experts of that token itself."""
    held = {
        start: torch.tensor(row.extra[ROUTED_EXPERTS], dtype=torch.int16)
        for row, start in zip(rows, starts, strict=True)
        if ROUTED_EXPERTS in row.extra
    }
    if not held:
        return None
    width = next(iter(held.values())).shape[1]
    placed_TW = torch.full((num_tokens, width), NOT_RECORDED, dtype=torch.int16)
    for start, experts in held.items():
        placed_TW[start : start + len(experts)] = experts
    return placed_TW.to(device)


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
