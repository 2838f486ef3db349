"""Element-wise parts of a layer with their gradients written out: fewer passes over memory than autograd takes.

Each does what its torch formula does, in the same precision. H: hidden size, F: MLP columns of this rank,
D: channels of a head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from vime.backends.autograd import Context


def swiglu(gate_up: Tensor) -> Tensor:
    """[..., 2 F] -> [..., F]: silu of the first half times the second."""
    return _Swiglu.apply(gate_up)  # type: ignore[no-untyped-call,no-any-return]


def geglu(gate_up: Tensor) -> Tensor:
    """[..., 2 F] -> [..., F]: gelu, by its tanh formula, of the first half times the second."""
    return _Geglu.apply(gate_up)  # type: ignore[no-untyped-call,no-any-return]


def rms_norm(x: Tensor, weight_H: Tensor, eps: float, *, adds_one: bool = False) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension; normalised in fp32, cast back before the weight.
    `adds_one`: times 1 + weight instead, in fp32 too, and cast back behind it (Gemma)."""
    return _RMSNorm.apply(x, weight_H, eps, adds_one)  # type: ignore[no-untyped-call,no-any-return]


def rotation(angle_LD: Tensor, dtype: torch.dtype, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """What `rotate` takes, [L, 1, D] each: cos, and sin with the sign of its place, times `scale`. The halves of
    `angle_LD` are alike."""
    sin_LD, cos_LD = angle_LD.sin().mul_(scale), angle_LD.cos().mul_(scale)
    sin_LD[:, : angle_LD.size(1) // 2].neg_()
    return cos_LD.to(dtype).unsqueeze(1), sin_LD.to(dtype).unsqueeze(1)


def rotate(x_LND: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary positions of N heads: x cos + (-second half, first half) sin (RoFormer, Su et al. 2021; halves paired as
    in GPT-NeoX). The rotation is a constant."""
    return _Rotate.apply(x_LND, *rotation)  # type: ignore[no-untyped-call,no-any-return]


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad: Tensor) -> Tensor:
        """d/d up = silu(gate); d/d gate = silu'(gate) up."""
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, -1)
        grad_gate_up = torch.empty_like(gate_up)
        grad_gate, grad_up = grad_gate_up.chunk(2, -1)
        torch.mul(grad, F.silu(gate), out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=grad_gate)
        return grad_gate_up


class _Geglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, -1)
        return F.gelu(gate, approximate="tanh").mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad: Tensor) -> Tensor:
        """d/d up = gelu(gate); d/d gate = gelu'(gate) up."""
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, -1)
        grad_gate_up = torch.empty_like(gate_up)
        grad_gate, grad_up = grad_gate_up.chunk(2, -1)
        torch.mul(grad, F.gelu(gate, approximate="tanh"), out=grad_up)
        grad_gate.copy_(torch.ops.aten.gelu_backward(grad * up, gate, approximate="tanh"))
        return grad_gate_up


class _KeptNorm(Context):
    adds_one: bool


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _KeptNorm, x: Tensor, weight_H: Tensor, eps: float, adds_one: bool) -> Tensor:
        x32 = x.float()
        scale = torch.linalg.vector_norm(x32, dim=-1, keepdim=True).square_().div_(x.size(-1)).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight_H, scale)
        ctx.adds_one = adds_one
        normal: Tensor = x32 * scale
        return normal.mul_(1 + weight_H.float()).to(x.dtype) if adds_one else normal.to(x.dtype) * weight_H

    @staticmethod
    @once_differentiable
    def backward(ctx: _KeptNorm, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """With n = x s normalised and g = grad * weight: d/dx = s (g - n mean(g n)); d/d weight = sum of grad n."""
        x, weight_H, scale = ctx.saved_tensors
        normal = x.float() * scale
        grad_weight = torch.linalg.vecdot(grad.flatten(0, -2).float(), normal.flatten(0, -2), dim=0)
        scaled = grad.float() * (1 + weight_H.float()) if ctx.adds_one else (grad * weight_H).float()
        mean = torch.linalg.vecdot(scaled, normal, dim=-1).unsqueeze(-1).div_(x.size(-1))
        grad_x = scaled.addcmul_(normal, mean, value=-1).mul_(scale).to(x.dtype)
        return grad_x, grad_weight.to(weight_H.dtype), None, None


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin, sign=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, None, None]:
        """The rotation back."""
        cos, sin = ctx.saved_tensors
        return _rotated(grad, cos, sin, sign=-1), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, *, sign: int) -> Tensor:
    first, second = x.chunk(2, -1)
    return (x * cos).addcmul_(torch.cat([second, first], -1), sin, value=sign)
