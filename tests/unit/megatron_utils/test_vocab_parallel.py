"""Log-probability and entropy on one rank, by hand. Cut vocabularies are in the dist tier."""

from __future__ import annotations

import math

import pytest
import torch

from vime.backends.megatron_utils.vocab_parallel import logprobs_and_entropy


class OneRank:
    """A group of one: no communication happens."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


def call(logits: torch.Tensor, target: list[int], **options: float) -> tuple[torch.Tensor, torch.Tensor]:
    return logprobs_and_entropy(logits, torch.tensor(target), group=OneRank(), **options)


def test_values_by_hand_with_a_padded_column() -> None:
    # logits ln 1, ln 2, ln 5 and a padded column: p = 1/8, 2/8, 5/8. H = ln 8 - (2 ln 2 + 5 ln 5) / 8
    logits = torch.tensor([[0.0, math.log(2), math.log(5), 50.0]])
    logp, entropy = call(logits, [1], vocab_size=3)
    assert logp.item() == pytest.approx(math.log(2 / 8), rel=1e-6)
    assert entropy.item() == pytest.approx(math.log(8) - (2 * math.log(2) + 5 * math.log(5)) / 8, rel=1e-6)


def test_gradient_by_hand() -> None:
    # p = (1/3, 2/3), target 0: d logp / dx = (1 - 1/3, -2/3). dH/dx_i = -p_i (ln p_i + H); padding gets none
    logits = torch.tensor([[0.0, math.log(2), 3.0]], requires_grad=True)
    logp, entropy = call(logits, [0], vocab_size=2)
    [only_logp] = torch.autograd.grad(logp.sum(), logits, retain_graph=True)
    assert only_logp[0].tolist() == pytest.approx([2 / 3, -2 / 3, 0.0], abs=1e-6)
    [only_entropy] = torch.autograd.grad(entropy.sum(), logits)
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


def test_the_logits_are_left_as_they_were_and_bf16_is_computed_in_fp32() -> None:
    logits = torch.tensor([[0.5, 1.5, -2.0]], dtype=torch.bfloat16, requires_grad=True)
    before = logits.detach().clone()
    logp, _ = call(logits, [2], vocab_size=3)
    assert logp.dtype == torch.float32
    assert logp.item() == pytest.approx(before.float().log_softmax(-1)[0, 2].item(), rel=1e-6)
    assert torch.equal(logits.detach(), before)


def test_a_nan_logit_shows_in_the_answer() -> None:
    logp, _ = call(torch.tensor([[0.0, float("nan")]]), [0], vocab_size=2)
    assert math.isnan(logp.item())
