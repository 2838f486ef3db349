"""Written-out gradients against autograd through the formula they stand for."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from vime.backends.megatron_utils.fused import geglu, rms_norm, rotate, rotation, swiglu
from vime.backends.megatron_utils.stacked_experts import clamped_swiglu

EPS = 1e-6


def plain_norm(x: Tensor, weight_H: Tensor) -> Tensor:
    x32 = x.float()
    return (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + EPS)).to(x.dtype) * weight_H


def plain_norm_adding_one(x: Tensor, weight_H: Tensor) -> Tensor:
    x32 = x.float()
    return (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + EPS) * (1 + weight_H.float())).to(x.dtype)


def plain_geglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.gelu(gate, approximate="tanh") * up


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
@pytest.mark.parametrize("adds_one", [False, True])
def test_the_norm_is_its_formula(shape: tuple[int, ...], dtype: torch.dtype, tolerance: float, adds_one: bool) -> None:
    draw = torch.Generator().manual_seed(1)
    x = (3 * torch.randn(shape, generator=draw)).to(dtype)
    weight_H = (1 + torch.randn(12, generator=draw) / 5).to(dtype)
    mine = answers(lambda x, weight_H: rms_norm(x, weight_H, EPS, adds_one=adds_one), x, weight_H)
    plain = plain_norm_adding_one if adds_one else plain_norm
    for got, expected in zip(mine, answers(plain, x, weight_H), strict=True):
        assert got.dtype == dtype
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))


@pytest.mark.parametrize(("function", "plain"), [(swiglu, plain_swiglu), (geglu, plain_geglu)])
def test_the_activation_is_its_formula(function: Callable[..., Tensor], plain: Callable[..., Tensor]) -> None:
    gate_up = 4 * torch.randn(9, 1, 16, generator=torch.Generator().manual_seed(2))
    for got, expected in zip(answers(function, gate_up), answers(plain, gate_up), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)


def test_the_clamped_activation_is_its_formula() -> None:
    # gates 8 (taken for 7), 1, -9; ups 2, -8 (taken for -7), 0.5
    gate_up = torch.tensor([[8.0, 2.0, 1.0, -8.0, -9.0, 0.5]], requires_grad=True)
    value = clamped_swiglu(gate_up)

    def gated(gate: float, up: float) -> float:
        return gate / (1 + math.exp(-1.702 * gate)) * (up + 1)

    assert value.tolist() == [pytest.approx([gated(7, 2), gated(1, -7), gated(-9, 0.5)], rel=1e-6)]
    (gradient,) = torch.autograd.grad(value.sum(), gate_up)
    assert [gradient[0, place].item() for place in (0, 3)] == [0, 0]  # what is clamped does not learn
    assert all(gradient[0, [1, 2, 4, 5]] != 0)


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
