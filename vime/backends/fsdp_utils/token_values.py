"""Log-probability and entropy per token from whole logits, in fp32 and in chunks of tokens.

T packed tokens, V vocabulary. Autograd over a plain log_softmax would hold several T x V tensors in fp32; here the
logits as the model made them are all that is kept, and the backward pass adds one gradient of their size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_NUMEL = 1 << 23  # 32 MiB of fp32 a temporary


def logprobs_and_entropy(logits_TV: Tensor, label_T: Tensor, *, temperature: float) -> tuple[Tensor, Tensor]:
    """(log p(label) [T], entropy [T]), fp32, of softmax(logits / temperature). Differentiable in both."""
    logp_T, entropy_T = _LogprobEntropy.apply(logits_TV, label_T, temperature)
    return logp_T, entropy_T


class _LogprobEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, label_T: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        logp_T, entropy_T, log_total_T = torch.empty(3, label_T.numel(), device=logits_TV.device).unbind()
        for part in _chunks(logits_TV):
            x_CV = logits_TV[part].float() / temperature
            log_total_C = x_CV.logsumexp(-1)
            logp_T[part] = x_CV.gather(-1, label_T[part].unsqueeze(-1)).squeeze(-1) - log_total_C
            p_CV = (x_CV - log_total_C.unsqueeze(-1)).exp_()
            entropy_T[part] = log_total_C - torch.linalg.vecdot(p_CV, x_CV)
            log_total_T[part] = log_total_C
        ctx.save_for_backward(logits_TV, label_T, entropy_T, log_total_T)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        return logp_T, entropy_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logp_T: Tensor | None, grad_entropy_T: Tensor | None) -> tuple[Tensor | None, ...]:
        """d log p(y) / dx = [column is y] - p;  d H / dx = -p (log p + H)."""
        logits_TV, label_T, entropy_T, log_total_T = ctx.saved_tensors
        grad_TV = torch.empty_like(logits_TV)
        for part in _chunks(logits_TV):
            log_p_CV = (logits_TV[part].float() / ctx.temperature).sub_(log_total_T[part].unsqueeze(-1))
            p_CV = log_p_CV.exp()
            grad_CV = torch.zeros_like(p_CV)
            if grad_entropy_T is not None:
                grad_CV -= p_CV * log_p_CV.add_(entropy_T[part].unsqueeze(-1)) * grad_entropy_T[part].unsqueeze(-1)
            if grad_logp_T is not None:
                grad_CV -= p_CV * grad_logp_T[part].unsqueeze(-1)
                grad_CV.scatter_add_(-1, label_T[part].unsqueeze(-1), grad_logp_T[part].unsqueeze(-1))
            grad_TV[part] = grad_CV.div_(ctx.temperature)
        return grad_TV, None, None


def _chunks(logits_TV: Tensor) -> Iterator[slice]:
    num_tokens, vocabulary = logits_TV.shape
    size = max(1, CHUNK_NUMEL // vocabulary)
    for start in range(0, num_tokens, size):
        yield slice(start, start + size)
