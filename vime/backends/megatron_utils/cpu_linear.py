"""Linear layers in fp32 on the CPU, by oneDNN where that pays.

torch gives fp32 products to MKL, which reaches half the speed of a core that Intel did not make (85 of 170 GFLOP/s on
an AMD EPYC with AVX-512). oneDNN, a part of torch as well, reaches all of it through an operator that torch's own
compiler uses. The precision is the same, the order of summation is not.

For each new shape oneDNN first compiles a kernel (0.4 ms), and packs differ in length: small products stay with MKL.

T: packed tokens, K: columns of the input, N: those of the output.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

MIN_FLOPS = 1 << 27
"""Of one product; about 1 ms. Above 0, because oneDNN refuses factors without rows (an expert that got no tokens)."""


def with_onednn(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """megatron's linear function (of trained or frozen weights), replaced for the products that `pays` names."""

    @functools.wraps(original)
    def linear_or_original(input: Tensor, weight: Tensor, **options: Any) -> Tensor:
        is_plain = not (options["sequence_parallel"] or options["gradient_accumulation_fusion"])
        if not is_plain or options.get("grad_output_buffer") is not None or not pays(input, weight):
            return original(input, weight, **options)
        group = options["tp_group"] if options["allreduce_dgrad"] else None
        return linear(input, weight, options["bias"], group)

    return linear_or_original


def pays(x: Tensor, weight_NK: Tensor) -> bool:
    return (
        x.device.type == "cpu"
        and x.dtype == weight_NK.dtype == torch.float32
        and 2 * x.numel() * weight_NK.size(0) >= MIN_FLOPS
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def linear(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None, group: dist.ProcessGroup | None) -> Tensor:
    """[..., K] -> [..., N]. With `group`, the ranks that hold the other columns of the weight, the gradient of `x` is
    summed over it: backward is collective then."""
    y_TN: Tensor = _Linear.apply(x.flatten(0, -2), weight_NK, bias_N, group)
    return y_TN.unflatten(0, x.shape[:-1])


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, group: dist.ProcessGroup | None
    ) -> Tensor:
        ctx.save_for_backward(x_TK, weight_NK)
        ctx.group = group
        return _product(x_TK, weight_NK, bias_N)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TN: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x_TK, weight_NK = ctx.saved_tensors
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = _product(grad_TN, weight_NK.t())
            if ctx.group is not None:
                dist.all_reduce(grad_x, group=ctx.group)
        if ctx.needs_input_grad[1]:
            # oneDNN copies its first factor when it is transposed: let it be the smaller one
            is_wide = weight_NK.size(0) > weight_NK.size(1)
            grad_weight = _product(x_TK.t(), grad_TN.t()).t() if is_wide else _product(grad_TN.t(), x_TK.t())
            grad_weight = grad_weight.contiguous()
        if ctx.needs_input_grad[2]:
            grad_bias = grad_TN.sum(0)
        return grad_x, grad_weight, grad_bias, None


def _product(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight_NK, bias_N, "none", [], "")  # type: ignore[no-any-return]
