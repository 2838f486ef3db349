"""Log-probabilities, entropies and gradients: by hand, and in blocks against one float64 softmax. A vocabulary cut over
ranks is in the dist tier."""

from __future__ import annotations

import math

import pytest
import torch

from vime.backends.logprobs import BLOCK_ENTRIES, logprobs_and_entropy


@pytest.mark.parametrize("block_entries", [1, 100, 1 << 18], ids=["one-row", "few-rows", "whole"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_padding", [0, 2])
def test_values_and_gradients_are_those_of_one_softmax(
    monkeypatch: pytest.MonkeyPatch, num_padding: int, dtype: torch.dtype, block_entries: int
) -> None:
    monkeypatch.setitem(BLOCK_ENTRIES, "cpu", block_entries)
    vocab_size, draw = 31 - num_padding, torch.Generator().manual_seed(0)
    logits_TV = (4 * torch.randn(13, 31, generator=draw)).to(dtype)
    logits_TV[3, 0] = -400.0  # its probability is 0 in fp32
    target_T = torch.randint(0, vocab_size, (13,), generator=draw)
    weight_T = torch.randn(13, generator=draw)
    true = logits_TV.double().requires_grad_()
    log_p = (true[:, :vocab_size] / 0.7).log_softmax(-1)
    true_logp_T, true_entropy_T = log_p.gather(-1, target_T.unsqueeze(-1)).squeeze(-1), -(log_p.exp() * log_p).sum(-1)
    leaf = logits_TV.clone().requires_grad_()
    logp_T, entropy_T = logprobs_and_entropy(leaf * 1, target_T, temperature=0.7, vocab_size=vocab_size)
    assert logp_T.dtype == entropy_T.dtype == torch.float32
    torch.testing.assert_close(logp_T.double(), true_logp_T, rtol=1e-6, atol=5e-6)
    torch.testing.assert_close(entropy_T.double(), true_entropy_T, rtol=1e-6, atol=5e-6)
    (logp_T * weight_T + entropy_T * weight_T.flip(0)).sum().backward()
    (true_logp_T * weight_T + true_entropy_T * weight_T.flip(0)).sum().backward()
    tolerance = 5e-6 if dtype is torch.float32 else 2**-7  # the gradient has the dtype of the logits
    torch.testing.assert_close(leaf.grad.double(), true.grad, rtol=tolerance, atol=tolerance)


def test_the_entropy_alone_or_the_log_probability_alone_has_its_gradient() -> None:
    # three equal logits: log p = -log 3, entropy log 3; d log p(0) = (2/3, -1/3, -1/3), d entropy = 0
    for pick, gradient in ((0, [2 / 3, -1 / 3, -1 / 3]), (1, [0.0, 0.0, 0.0])):
        leaf = torch.zeros(1, 3, requires_grad=True)
        values = logprobs_and_entropy(leaf * 1, torch.tensor([0]), temperature=1.0)
        values[pick].sum().backward()
        torch.testing.assert_close(leaf.grad, torch.tensor([gradient]), rtol=0, atol=1e-6)


def call(
    logits: torch.Tensor, target: list[int], *, vocab_size: int, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    return logprobs_and_entropy(logits * 1, torch.tensor(target), temperature=temperature, vocab_size=vocab_size)


def test_values_by_hand_with_a_padded_column() -> None:
    # logits ln 1, ln 2, ln 5 and a padded column: p = 1/8, 2/8, 5/8. H = ln 8 - (2 ln 2 + 5 ln 5) / 8
    logits = torch.tensor([[0.0, math.log(2), math.log(5), 50.0]])
    logp, entropy = call(logits, [1], vocab_size=3)
    assert logp.item() == pytest.approx(math.log(2 / 8), rel=1e-6)
    assert entropy.item() == pytest.approx(math.log(8) - (2 * math.log(2) + 5 * math.log(5)) / 8, rel=1e-6)


def test_gradient_by_hand() -> None:
    # p = (1/3, 2/3), target 0: d logp / dx = (1 - 1/3, -2/3). dH/dx_i = -p_i (ln p_i + H); padding gets none
    logits = torch.tensor([[0.0, math.log(2), 3.0]], requires_grad=True)
    [only_logp] = torch.autograd.grad(call(logits, [0], vocab_size=2)[0].sum(), logits)
    assert only_logp[0].tolist() == pytest.approx([2 / 3, -2 / 3, 0.0], abs=1e-6)
    [only_entropy] = torch.autograd.grad(call(logits, [0], vocab_size=2)[1].sum(), logits)
    value = -(math.log(1 / 3) / 3 + 2 * math.log(2 / 3) / 3)
    expected = [-(math.log(1 / 3) + value) / 3, -2 * (math.log(2 / 3) + value) / 3, 0.0]
    assert only_entropy[0].tolist() == pytest.approx(expected, abs=1e-6)


def test_temperature_divides_the_logits_and_the_gradient() -> None:
    # logits 0, ln 4 at temperature 2 are 0, ln 2: p = 1/3, 2/3; d/dx carries 1/2
    logits = torch.tensor([[0.0, math.log(4)]], requires_grad=True)
    logp, _ = call(logits, [1], vocab_size=2, temperature=2.0)
    assert logp.item() == pytest.approx(math.log(2 / 3), rel=1e-6)
    logp.sum().backward()
    assert logits.grad[0].tolist() == pytest.approx([-1 / 6, 1 / 6], abs=1e-6)


def test_forward_leaves_the_logits_as_they_were_and_bf16_is_computed_in_fp32() -> None:
    logits = torch.tensor([[0.5, 1.5, -2.0]], dtype=torch.bfloat16)
    before = logits.clone()
    logp, _ = logprobs_and_entropy(logits, torch.tensor([2]), temperature=1.0)
    assert logp.dtype == torch.float32
    assert logp.item() == pytest.approx(before.float().log_softmax(-1)[0, 2].item(), rel=1e-6)
    assert torch.equal(logits, before)


def test_a_nan_logit_shows_in_the_answer() -> None:
    logp, _ = call(torch.tensor([[0.0, float("nan")]]), [0], vocab_size=2)
    assert math.isnan(logp.item())
