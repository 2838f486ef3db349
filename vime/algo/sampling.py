"""Log-probabilities under a sampling rule, from logits of the whole vocabulary. T: tokens, V: vocabulary.

Training never needs this: it trains what was sampled from the whole vocabulary, at one temperature. The diagnosis of a
mismatch between trainer and engine computes a token's log-probability under other rules.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vime.types import SamplingRule

CHUNK = 256
"""Tokens sorted at a time: 256 x 150,000 logits are 150 MB in fp32."""


def log_probs_under(logits_TV: Tensor, target_T: Tensor, rule: SamplingRule) -> Tensor:
    """Return [T] fp32: log p(target) after temperature, top-k and top-p; -inf where the rule drops the target.

    vLLM's order and borders: divide by the temperature, keep the k likeliest (and ties with the last of them), then of
    those, renormalised, each token with less than top_p of mass above it. Example: p (.5, .3, .2), top_p .7 keeps two:
    (.625, .375, 0).
    """
    parts = [
        _log_probs(logits_CV, target_C, rule)
        for logits_CV, target_C in zip(torch.split(logits_TV, CHUNK), torch.split(target_T, CHUNK), strict=True)
    ]
    return torch.cat(parts) if parts else logits_TV.new_empty(0, dtype=torch.float32)


def _log_probs(logits_TV: Tensor, target_T: Tensor, rule: SamplingRule) -> Tensor:
    x_TV = logits_TV.float() / rule.temperature
    if rule.top_k > 0:
        last_T1 = x_TV.topk(min(rule.top_k, x_TV.size(-1))).values[:, -1:]
        x_TV = x_TV.masked_fill(x_TV < last_T1, float("-inf"))
    if rule.top_p < 1:
        sorted_TV, order_TV = x_TV.sort(-1, descending=True)
        p_TV = sorted_TV.softmax(-1)
        is_dropped_TV = p_TV.cumsum(-1) - p_TV >= rule.top_p
        is_dropped_TV[:, 0] = False
        x_TV = x_TV.masked_fill(is_dropped_TV.scatter(-1, order_TV, is_dropped_TV), float("-inf"))
    return x_TV.log_softmax(-1).gather(-1, target_T.unsqueeze(-1)).squeeze(-1)
