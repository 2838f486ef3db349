"""Log-probability and entropy per token from logits, whose vocabulary may be cut over the tensor-parallel group.

T: tokens, V: vocabulary columns of this rank. Unlike megatron-core's `vocab_parallel_cross_entropy` it leaves the
padded columns out (they are no tokens; counting them was wrong by 0.88 nats in a test), gives the entropy as well and
applies the sampling temperature. fp32 inside; two all-reduces where the vocabulary is cut.

[T, V] is the largest tensor of a step. Autograd over a plain log_softmax would hold several of them in fp32; here the
logits as the model made them are all there is, and backward turns them into their gradient. The work goes over them in
blocks of rows that stay in the processor's cache. Powers are of 2: torch takes three times as long for those of e on a
CPU whose maker is not Intel.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from vime.backends.autograd import Context

BLOCK_ENTRIES = {"cpu": 1 << 18, "cuda": 1 << 27}
"""Entries of one block: 1 MiB of a core's cache; on a GPU a bound of what is held beside the logits, 512 MiB."""


def logprobs_and_entropy(
    logits_TV: Tensor,
    target_T: Tensor,
    *,
    temperature: float,
    vocab_size: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """(log p(target) [T], entropy [T]), fp32, of softmax(logits / temperature) over the true vocabulary.

    Differentiable in both, once: backward uses the logits up. Collective over `group`: every tensor-parallel rank calls
    it with its own columns (rank r holds columns r V .. (r + 1) V) and the same targets; all get the same values.
    Without a group the vocabulary is not cut. `vocab_size` None: no column is padding.
    """
    values: tuple[Tensor, Tensor] = _LogprobEntropy.apply(logits_TV, target_T, temperature, vocab_size, group)  # type: ignore[no-untyped-call]
    return values


class _Kept(Context):
    temperature: float
    valid: int  # columns of this rank that are no padding


class _LogprobEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Kept,
        logits_TV: Tensor,
        target_T: Tensor,
        temperature: float,
        vocab_size: int | None,
        group: dist.ProcessGroup | None,
    ) -> tuple[Tensor, Tensor]:
        num_rows, columns = logits_TV.shape
        rank, size = (0, 1) if group is None else (group.rank(), group.size())
        first = rank * columns
        valid = columns if vocab_size is None else min(columns, max(0, vocab_size - first))  # the others are padding
        x_TV = logits_TV[:, :valid]
        index_T = target_T - first
        is_here_T = (index_T >= 0) & (index_T < valid)
        index_T = index_T.clamp(0, max(0, valid - 1))
        top_T = torch.full((num_rows,), float("-inf"), device=x_TV.device)
        for block in _blocks(x_TV):
            top_T[block] = x_TV[block].amax(-1)
        if size > 1:
            dist.all_reduce(top_T, op=dist.ReduceOp.MAX, group=group)
        # with x in units of log 2: of 2^x, of x 2^x, and the target's x; one all-reduce
        sums_3T = torch.zeros(3, num_rows, device=x_TV.device)
        unit = 1 / (math.log(2) * temperature)
        for block in _blocks(x_TV):
            x = _scaled(x_TV[block], top_T[block], unit)
            sums_3T[2, block] = x.gather(-1, index_T[block].unsqueeze(-1)).squeeze(-1)
            weight = x.exp2()
            sums_3T[0, block] = weight.sum(-1)
            sums_3T[1, block] = x.mul_(weight).sum(-1)
        sums_3T[2].masked_fill_(~is_here_T, 0.0)
        if size > 1:
            dist.all_reduce(sums_3T, group=group)
        total_T, weighted_T, picked_T = sums_3T
        log_total_T = total_T.log2()
        logp_T = (picked_T - log_total_T) * math.log(2)
        entropy_T = (log_total_T - weighted_T / total_T) * math.log(2)
        ctx.save_for_backward(logits_TV, index_T, is_here_T, top_T, log_total_T, entropy_T)
        ctx.temperature, ctx.valid = temperature, valid
        ctx.set_materialize_grads(False)
        return logp_T, entropy_T

    @staticmethod
    @once_differentiable
    def backward(ctx: _Kept, grad_logp_T: Tensor | None, grad_entropy_T: Tensor | None) -> tuple[Tensor | None, ...]:
        """d log p(y) / dx = [column is y] - p;  d H / dx = -p (log p + H)."""
        logits_TV, index_T, is_here_T, top_T, log_total_T, entropy_T = ctx.saved_tensors
        logits_TV[:, ctx.valid :] = 0.0
        x_TV = logits_TV[:, : ctx.valid]
        unit = 1 / (math.log(2) * ctx.temperature)
        scale_T = torch.zeros_like(top_T) if grad_logp_T is None else grad_logp_T / ctx.temperature
        for block in _blocks(x_TV):
            x = _scaled(x_TV[block], top_T[block], unit).sub_(log_total_T[block].unsqueeze(-1))  # log2 p
            scale = scale_T[block].unsqueeze(-1)
            if grad_entropy_T is None:
                x.exp2_().mul_(-scale)
            else:
                spread = (grad_entropy_T[block] / ctx.temperature).unsqueeze(-1)
                p = x.exp2()
                x.mul_(-math.log(2) * spread).sub_(entropy_T[block].unsqueeze(-1) * spread + scale).mul_(p)
            x.scatter_add_(-1, index_T[block].unsqueeze(-1), scale * is_here_T[block].unsqueeze(-1))
            x_TV[block] = x
        return logits_TV, None, None, None, None


def _scaled(x_BV: Tensor, top_B: Tensor, unit: float) -> Tensor:
    """A copy in fp32, at most 0, in units of `unit`."""
    return x_BV.to(torch.float32, copy=True).sub_(top_B.unsqueeze(-1)).mul_(unit)


def _blocks(x_TV: Tensor) -> Iterator[slice]:
    num_rows, columns = x_TV.shape
    if columns == 0:  # this rank holds padding alone
        return
    size = max(1, BLOCK_ENTRIES[x_TV.device.type] // columns)
    for start in range(0, num_rows, size):
        yield slice(start, start + size)
