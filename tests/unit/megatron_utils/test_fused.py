"""Written-out gradients against autograd through the formula they stand for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from vime.backends.megatron_utils.fused import rms_norm, rotate, rotation, swiglu
from vime.backends.megatron_utils.vocab_parallel import BLOCK_ENTRIES, logprobs_and_entropy

EPS = 1e-6


def plain_norm(x: Tensor, weight_H: Tensor) -> Tensor:
    x32 = x.float()
    return (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + EPS)).to(x.dtype) * weight_H


def plain_swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def answers(function: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in inputs]
    value = function(*leaves)
    direction = torch.linspace(-1, 2, value.numel()).view_as(value).to(value.dtype)
    return [value.detach(), *torch.autograd.grad(value, leaves, direction)]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("shape", [(7, 1, 12), (5, 3, 2, 12)])
def test_the_norm_is_its_formula(shape: tuple[int, ...], dtype: torch.dtype, tolerance: float) -> None:
    draw = torch.Generator().manual_seed(1)
    x = (3 * torch.randn(shape, generator=draw)).to(dtype)
    weight_H = (1 + torch.randn(12, generator=draw) / 5).to(dtype)
    mine = answers(lambda x, weight_H: rms_norm(x, weight_H, EPS), x, weight_H)
    for got, expected in zip(mine, answers(plain_norm, x, weight_H), strict=True):
        assert got.dtype == dtype
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))


def test_the_activation_is_its_formula() -> None:
    gate_up = 4 * torch.randn(9, 1, 16, generator=torch.Generator().manual_seed(2))
    for got, expected in zip(answers(swiglu, gate_up), answers(plain_swiglu, gate_up), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)


def test_a_rotation_is_its_formula() -> None:
    draw = torch.Generator().manual_seed(3)
    x_LND, angle = torch.randn(6, 3, 8, generator=draw), torch.randn(6, 4, generator=draw)
    angle_LD = torch.cat([angle, angle], -1)
    cos_LD, sin_LD = angle_LD.cos(), angle_LD.sin()

    def plain(x_LND: Tensor) -> Tensor:
        first, second = x_LND.chunk(2, -1)
        return x_LND * cos_LD[:, None] + torch.cat([-second, first], -1) * sin_LD[:, None]

    mine = answers(lambda x: rotate(x, rotation(angle_LD, torch.float32)), x_LND)
    for got, expected in zip(mine, answers(plain, x_LND), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)


class OneRank:
    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


@pytest.mark.parametrize("overwrite", [False, True])
def test_blocks_and_one_buffer_change_no_log_probability_and_no_gradient(
    monkeypatch: pytest.MonkeyPatch, overwrite: bool
) -> None:
    monkeypatch.setitem(BLOCK_ENTRIES, "cpu", 25)  # 11 columns: blocks of 2 rows, the last of 1
    draw = torch.Generator().manual_seed(4)
    logits = 5 * torch.randn(7, 11, generator=draw)
    logits[3, 0] = -400.0  # its probability is 0 in fp32
    target = torch.randint(0, 10, (7,), generator=draw)
    leaf = logits.clone().requires_grad_()
    logp, entropy = logprobs_and_entropy(
        leaf * 1.0, target, group=OneRank(), vocab_size=10, temperature=0.7, overwrite=overwrite
    )
    (logp * torch.arange(7) + entropy * 0.3).sum().backward()
    plain = logits.double().requires_grad_()
    log_p = (plain[:, :10] / 0.7).log_softmax(-1)
    expected = log_p.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    expected_entropy = -(log_p.exp() * log_p).sum(-1)
    (expected * torch.arange(7) + expected_entropy * 0.3).sum().backward()
    torch.testing.assert_close(logp.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), expected_entropy, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(leaf.grad.double(), plain.grad, rtol=1e-5, atol=1e-5)
