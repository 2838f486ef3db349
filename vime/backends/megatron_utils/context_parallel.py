"""Context parallelism: the ranks of one group share every sequence, each computing two chunks of it.

A sequence of 2 C chunks (C: ranks) gives chunks r and 2 C - 1 - r to rank r, so that under causal attention all ranks
do the same work ("zigzag", as Megatron-LM and Transformer Engine cut it). A pack is cut after it was made and its
log-probabilities are put together before the loss, so planning, packing and every loss see only whole sequences, and
their denominators do not change.

T: tokens of a pack, L = T / C: tokens of this rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor
from torch.autograd.function import once_differentiable

from vime.backends.autograd import Context


def zigzag_positions(cu_seqlens: Sequence[int], *, rank: int, size: int) -> list[int]:
    """Positions of a pack that `rank` of `size` computes, in the order in which it holds them.

    Example: sequences of 8 and 4 tokens on 2 ranks: rank 0 has 0 1 6 7 and 8 11, rank 1 has 2 3 4 5 and 9 10.
    """
    positions: list[int] = []
    for start, end in itertools.pairwise(cu_seqlens):
        chunk, rest = divmod(end - start, 2 * size)
        if rest:
            raise ValueError(f"zigzag_positions: a sequence of {end - start} tokens, expected a multiple of {2 * size}")
        for number in (rank, 2 * size - 1 - rank):
            positions.extend(range(start + number * chunk, start + (number + 1) * chunk))
    return positions


@dataclass(frozen=True, slots=True)
class ContextCut:
    """How one pack is cut over the context-parallel group."""

    group: dist.ProcessGroup
    here_L: Tensor  # positions of this rank
    here_on_host_L: Tensor
    order_T: Tensor  # where each position stands in what all ranks hold, laid end to end

    def part(self, values_T: Tensor) -> Tensor:
        """This rank's entries."""
        return values_T[self.here_L]

    def whole(self, values_NL: Tensor) -> Tensor:
        """Gather [N, T] in sequence order from every rank's [N, L]. Collective over the group; all get the same result.

        Backward takes the gradient of this rank's part and sums nothing: every rank computes the same loss from the
        result, and only this rank's part of the graph depends on its own entries.
        """
        return _Whole.apply(values_NL, self)  # type: ignore[no-untyped-call,no-any-return]


def context_cut(cu_seqlens: Sequence[int], device: torch.device) -> ContextCut | None:
    """None without context parallelism."""
    group = parallel_state.get_context_parallel_group()
    size = group.size()
    if size == 1:
        return None
    by_rank = [torch.tensor(zigzag_positions(cu_seqlens, rank=rank, size=size)) for rank in range(size)]
    order_T = torch.cat(by_rank).argsort()
    here_L = by_rank[group.rank()]
    return ContextCut(group, here_L.to(device), here_L, order_T.to(device))


class _Kept(Context):
    cut: ContextCut


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Kept, values_NL: Tensor, cut: ContextCut) -> Tensor:
        ctx.cut = cut
        count, length = values_NL.shape
        by_rank = values_NL.new_empty(cut.group.size() * count, length)
        dist.all_gather_into_tensor(by_rank, values_NL.contiguous(), group=cut.group)
        return by_rank.view(-1, count, length).transpose(0, 1).reshape(count, -1)[:, cut.order_T]

    @staticmethod
    @once_differentiable
    def backward(ctx: _Kept, grad_NT: Tensor) -> tuple[Tensor, None]:
        return grad_NT[:, ctx.cut.here_L], None
