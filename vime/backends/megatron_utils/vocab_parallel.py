"""Log-probability and entropy per token from logits whose vocabulary is cut over the tensor-parallel group.

T: tokens, V: vocabulary columns of this rank. Unlike megatron-core's `vocab_parallel_cross_entropy` it leaves the
padded columns out (they are no tokens; counting them was wrong by 0.88 nats in a test), gives the entropy as well and
applies the sampling temperature. fp32 inside, two all-reduces.

[T, V] is the largest tensor of a step: the work goes over it in blocks of rows that stay in the processor's cache, and
one buffer serves as logits, as what backward needs, and as the gradient. Powers are of 2: torch takes three times as
long for those of e on a CPU whose maker is not Intel.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCK_ENTRIES = {"cpu": 1 << 18, "cuda": 1 << 27}
"""Entries of one block: 1 MiB of a core's cache; on a GPU a bound of what is held beside the buffer, 512 MiB."""


def logprobs_and_entropy(
    logits_TV: Tensor,
    target_T: Tensor,
    *,
    group: dist.ProcessGroup,
    vocab_size: int,
    temperature: float = 1.0,
    overwrite: bool = False,
) -> tuple[Tensor, Tensor]:
    """(log p(target) [T], entropy [T]), fp32, of softmax(logits / temperature) over the true vocabulary.

    Differentiable in both. Collective over `group`: every tensor-parallel rank calls it with its own columns (rank r
    holds columns r V .. (r + 1) V) and the same targets; all get the same answer. `overwrite`: fp32 logits that nobody
    reads afterwards are the buffer, and backward runs once; without it they are copied.
    """
    return _LogprobEntropy.apply(logits_TV, target_T, group, vocab_size, temperature, overwrite)


def _blocks(num_rows: int, num_columns: int, device: torch.device) -> Iterator[slice]:
    size = max(1, BLOCK_ENTRIES[device.type] // max(1, num_columns))
    return (slice(start, start + size) for start in range(0, num_rows, size))


class _LogprobEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_TV: Tensor,
        target_T: Tensor,
        group: dist.ProcessGroup,
        vocab_size: int,
        temperature: float,
        overwrite: bool,
    ) -> tuple[Tensor, Tensor]:
        num_rows, columns = logits_TV.shape
        first = group.rank() * columns
        valid = min(columns, max(0, vocab_size - first))  # the others are padding
        buffer_TV = logits_TV.to(torch.float32, copy=not overwrite)
        x_TV = buffer_TV[:, :valid]
        index_T = target_T - first
        is_here_T = (index_T >= 0) & (index_T < valid)
        index_T = index_T.clamp(0, max(0, valid - 1))
        top_T = torch.full((num_rows,), float("-inf"), device=x_TV.device)
        # with x in units of log 2: of 2^x, of x 2^x, and the target's x; one all-reduce
        sums_3T = torch.zeros(3, num_rows, device=x_TV.device)
        blocks = list(_blocks(num_rows, valid, x_TV.device)) if valid else []
        is_cut = group.size() > 1
        for block in blocks if is_cut else []:
            top_T[block] = x_TV[block].amax(-1)
        if is_cut:
            dist.all_reduce(top_T, op=dist.ReduceOp.MAX, group=group)
        for block in blocks:
            x = x_TV[block]
            if not is_cut:
                top_T[block] = x.amax(-1)
            x.sub_(top_T[block].unsqueeze(-1)).mul_(1 / (math.log(2) * temperature))
            sums_3T[2, block] = x.gather(-1, index_T[block].unsqueeze(-1)).squeeze(-1)
            weight = x.exp2()
            sums_3T[0, block] = weight.sum(-1)
            sums_3T[1, block] = x.mul_(weight).sum(-1)
            x.copy_(weight)
        sums_3T[2].masked_fill_(~is_here_T, 0.0)
        if is_cut:
            dist.all_reduce(sums_3T, group=group)
        sums_3T[1:].mul_(math.log(2))
        total_T, weighted_T, picked_T = sums_3T
        log_total_T = total_T.log()
        logp_T, entropy_T = picked_T - log_total_T, log_total_T - weighted_T / total_T
        # the buffer holds 2^x now: p of a column is that divided by the total
        ctx.save_for_backward(buffer_TV, index_T, is_here_T, total_T, entropy_T)
        ctx.temperature, ctx.dtype, ctx.valid, ctx.overwrite = temperature, logits_TV.dtype, valid, overwrite
        ctx.set_materialize_grads(False)
        return logp_T, entropy_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logp_T: Tensor | None, grad_entropy_T: Tensor | None) -> tuple[Tensor | None, ...]:
        """d log p(y) / dx = [column is y] - p;  d H / dx = -p (log p + H)."""
        saved_TV, index_T, is_here_T, total_T, entropy_T = ctx.saved_tensors
        grad_TV = saved_TV if ctx.overwrite else saved_TV.clone()
        grad_TV[:, ctx.valid :] = 0.0
        p_TV = grad_TV[:, : ctx.valid]
        scale_T = torch.zeros_like(total_T) if grad_logp_T is None else grad_logp_T / ctx.temperature
        for block in _blocks(*p_TV.shape, p_TV.device) if ctx.valid else []:
            p, scale = p_TV[block], scale_T[block].unsqueeze(-1)
            if grad_entropy_T is None:
                p.mul_(-scale / total_T[block].unsqueeze(-1))
            else:
                p.div_(total_T[block].unsqueeze(-1))
                spread = (grad_entropy_T[block] / ctx.temperature).unsqueeze(-1)
                spread_p = torch.xlogy(p, p).mul_(spread)  # 0 where p is too small for fp32
                p.mul_(entropy_T[block].unsqueeze(-1) * spread + scale).add_(spread_p).neg_()
        if ctx.valid:
            p_TV.scatter_add_(-1, index_T.unsqueeze(-1), (scale_T * is_here_T).unsqueeze(-1))
        return grad_TV.to(ctx.dtype), None, None, None, None, None
