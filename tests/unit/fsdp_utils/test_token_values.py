"""Log-probabilities, entropies and their gradients in blocks against one float64 softmax."""

from __future__ import annotations

import pytest
import torch

from vime.backends.fsdp_utils import token_values
from vime.backends.fsdp_utils.token_values import logprobs_and_entropy


@pytest.mark.parametrize("block_entries", [1, 100, 1 << 18], ids=["one-row", "few-rows", "whole"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients_are_those_of_one_softmax(
    monkeypatch: pytest.MonkeyPatch, block_entries: int, dtype: torch.dtype
) -> None:
    monkeypatch.setitem(token_values.BLOCK_ENTRIES, "cpu", block_entries)
    draw = torch.Generator().manual_seed(0)
    logits_AV = (4 * torch.randn(13, 31, generator=draw)).to(dtype)
    label_A = torch.randint(0, 31, (13,), generator=draw)
    weight_A = torch.randn(13, generator=draw)
    true = logits_AV.double().requires_grad_()
    log_p = (true / 0.7).log_softmax(-1)
    true_logp_A, true_entropy_A = log_p.gather(-1, label_A.unsqueeze(-1)).squeeze(-1), -(log_p.exp() * log_p).sum(-1)
    leaf = logits_AV.clone().requires_grad_()
    logp_A, entropy_A = logprobs_and_entropy(leaf * 1, label_A, temperature=0.7)
    assert logp_A.dtype == entropy_A.dtype == torch.float32
    torch.testing.assert_close(logp_A.double(), true_logp_A, rtol=0, atol=5e-6)
    torch.testing.assert_close(entropy_A.double(), true_entropy_A, rtol=0, atol=5e-6)
    (logp_A * weight_A + entropy_A * weight_A.flip(0)).sum().backward()
    (true_logp_A * weight_A + true_entropy_A * weight_A.flip(0)).sum().backward()
    tolerance = 5e-6 if dtype is torch.float32 else 2**-7  # the gradient has the dtype of the logits
    torch.testing.assert_close(leaf.grad.double(), true.grad, rtol=tolerance, atol=tolerance)


def test_the_entropy_alone_or_the_log_probability_alone_has_its_gradient() -> None:
    # three equal logits: log p = -log 3, entropy log 3; d log p(0) = (2/3, -1/3, -1/3), d entropy = 0
    for pick, gradient in ((0, [2 / 3, -1 / 3, -1 / 3]), (1, [0.0, 0.0, 0.0])):
        leaf = torch.zeros(1, 3, requires_grad=True)
        values = logprobs_and_entropy(leaf * 1, torch.tensor([0]), temperature=1.0)
        values[pick].sum().backward()
        torch.testing.assert_close(leaf.grad, torch.tensor([gradient]), rtol=0, atol=1e-6)
