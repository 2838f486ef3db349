"""Log-probability and entropy per token from whole logits, in fp32 and in blocks of tokens.

A tokens that are predicted, V vocabulary. [A, V] is the largest tensor of a step. Autograd over a plain log_softmax
would hold several of them in fp32; here the logits as the model made them are all there is, and backward turns them
into their gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCK_ENTRIES = {"cpu": 1 << 18, "cuda": 1 << 27}
"""Entries of one block: 1 MiB of a core's cache; on a GPU a bound of what is held beside the logits, 512 MiB."""


def logprobs_and_entropy(logits_AV: Tensor, label_A: Tensor, *, temperature: float) -> tuple[Tensor, Tensor]:
    """(log p(label) [A], entropy [A]), fp32, of softmax(logits / temperature). Differentiable in both, once:
    backward uses the logits up."""
    logp_A, entropy_A = _LogprobEntropy.apply(logits_AV, label_A, temperature)
    return logp_A, entropy_A


class _LogprobEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_AV: Tensor, label_A: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        logp_A, entropy_A, log_total_A = torch.empty(3, label_A.numel(), device=logits_AV.device).unbind()
        for part in _blocks(logits_AV):
            x_BV = logits_AV[part].float() / temperature
            log_total_A[part] = x_BV.logsumexp(-1)
            log_p_BV = x_BV.sub_(log_total_A[part].unsqueeze(-1))
            logp_A[part] = log_p_BV.gather(-1, label_A[part].unsqueeze(-1)).squeeze(-1)
            entropy_A[part] = torch.linalg.vecdot(log_p_BV.exp(), log_p_BV).neg_()
        ctx.save_for_backward(logits_AV, label_A, entropy_A, log_total_A)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        return logp_A, entropy_A

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logp_A: Tensor | None, grad_entropy_A: Tensor | None) -> tuple[Tensor | None, ...]:
        """d log p(y) / dx = [column is y] - p;  d H / dx = -p (log p + H)."""
        logits_AV, label_A, entropy_A, log_total_A = ctx.saved_tensors
        for part in _blocks(logits_AV):
            log_p_BV = (logits_AV[part].float() / ctx.temperature).sub_(log_total_A[part].unsqueeze(-1))
            p_BV = log_p_BV.exp()
            grad_BV = torch.zeros_like(p_BV)
            if grad_entropy_A is not None:
                grad_BV -= p_BV * log_p_BV.add_(entropy_A[part].unsqueeze(-1)) * grad_entropy_A[part].unsqueeze(-1)
            if grad_logp_A is not None:
                grad_BV -= p_BV * grad_logp_A[part].unsqueeze(-1)
                grad_BV.scatter_add_(-1, label_A[part].unsqueeze(-1), grad_logp_A[part].unsqueeze(-1))
            logits_AV[part] = grad_BV.div_(ctx.temperature)
        return logits_AV, None, None


def _blocks(logits_AV: Tensor) -> Iterator[slice]:
    num_tokens, vocabulary = logits_AV.shape
    size = max(1, BLOCK_ENTRIES[logits_AV.device.type] // vocabulary)
    for start in range(0, num_tokens, size):
        yield slice(start, start + size)
