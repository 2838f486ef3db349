"""Linear layers in fp32 on the CPU: each large product by the library that is faster at it on this processor.

torch gives fp32 products to MKL, which takes its AVX2 path on a processor that Intel did not make. oneDNN, a part of
torch as well, takes AVX-512 where there is one, through an operator that torch's own compiler uses; without AVX-512 it
is slower than MKL at some products, most of all at the gradient of a wide weight. The precision is the same, the order
of summation is not. So the first product of each kind and shape is made by every way there is, twice, and the fastest
is kept for the process (`Ways`). Where sums must not depend on a clock (--reference-mode asks torch for deterministic
algorithms) it is oneDNN, always.

For each new shape oneDNN first compiles a kernel (0.4 ms), and packs differ in length: small products stay with MKL,
and few kernels are kept (`keep_few_kernels`).

The gradient of a weight is added to its sum over the micro-batches where it is made, a block of rows at a time. As a
tensor of its own the gradient of a large vocabulary would be the largest of a step, twice: of the head and of the
embedding, which are one weight in a tied model.

T: packed tokens, K: columns of the input, N: those of the output.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Sequence
from typing import Required, TypedDict, Unpack

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from vime.backends.autograd import Context

BLOCK_ENTRIES = 1 << 21
"""Bytes of a block of a weight's gradient: 8 MiB. Above the largest weight of a layer of small models, and far below
their vocabulary's."""
MIN_FLOPS = 1 << 27
"""Of one product; about 1 ms. Above 0, because oneDNN refuses factors without rows (an expert that got no tokens)."""
NUM_KERNELS = 16
KERNEL_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""Of oneDNN itself, and of torch's wrapper of it, which read these when they are first used."""
NUM_TRIALS = 2
"""Of each way to make a product, the first time that one of its shape is due."""


def keep_few_kernels() -> None:
    """Keep kernels for as many shapes as one pass over the layers has, not for 1,024. Call it before the first product.

    Each kernel takes 600 KB, so a run whose packs differ in length held more than a GB of them after some rounds. They
    lay between the tensors, so memory that one step freed fitted less and less of the next step. Shapes return within a
    pass over the layers, later almost only by chance. The user's environment variable wins."""
    for name in KERNEL_CACHES:
        os.environ.setdefault(name, str(NUM_KERNELS))


class LinearOptions(TypedDict, total=False):
    """What megatron's linear functions are called with beside input and weight."""

    bias: Required[Tensor | None]
    gradient_accumulation_fusion: Required[bool]
    allreduce_dgrad: Required[bool]
    sequence_parallel: Required[bool]
    tp_group: Required[dist.ProcessGroup | None]
    grad_output_buffer: list[Tensor] | None
    wgrad_deferral_limit: int | None
    async_grad_allreduce: bool | None


def with_onednn(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """megatron's linear function (of trained or frozen weights), replaced for the products that `pays` names."""

    @functools.wraps(original)
    def linear_or_original(input: Tensor, weight: Tensor, **options: Unpack[LinearOptions]) -> Tensor:
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
    y_TN: Tensor = _Linear.apply(x.flatten(0, -2), weight_NK, bias_N, group)  # type: ignore[no-untyped-call]
    return y_TN.view(*x.shape[:-1], weight_NK.size(0))


def gradient_sum(weight: Tensor) -> Tensor | None:
    """Return where gradients of this weight are summed: megatron's buffer, when nothing else waits for its gradient
    (`PolicyOptimizer` sets this). None: autograd returns them."""
    return weight.main_grad if getattr(weight, "is_summed_in_place", False) else None  # type: ignore[attr-defined]


def embedding(token_T: Tensor, weight_VK: Tensor) -> Tensor:
    """`F.embedding`, of whose gradient only the rows of the tokens that are there are touched."""
    if gradient_sum(weight_VK) is None:
        return F.embedding(token_T, weight_VK)
    return _Embedding.apply(token_T, weight_VK)  # type: ignore[no-untyped-call,no-any-return]


class _EmbeddingContext(Context):
    sum: Tensor


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _EmbeddingContext, token_T: Tensor, weight_VK: Tensor) -> Tensor:
        ctx.save_for_backward(token_T)
        sum_VK = gradient_sum(weight_VK)
        assert sum_VK is not None
        ctx.sum = sum_VK
        return F.embedding(token_T, weight_VK)

    @staticmethod
    @once_differentiable
    def backward(ctx: _EmbeddingContext, grad_TK: Tensor) -> tuple[None, None]:
        (token_T,) = ctx.saved_tensors
        ctx.sum.index_add_(0, token_T.flatten(), grad_TK.flatten(0, -2).to(ctx.sum.dtype))
        return None, None


class _LinearContext(Context):
    group: dist.ProcessGroup | None
    sum: Tensor | None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _LinearContext, x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, group: dist.ProcessGroup | None
    ) -> Tensor:
        ctx.save_for_backward(x_TK, weight_NK)
        ctx.group, ctx.sum = group, gradient_sum(weight_NK)
        return FORWARD(x_TK, weight_NK.t(), bias_N)

    @staticmethod
    @once_differentiable
    def backward(ctx: _LinearContext, grad_TN: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x_TK, weight_NK = ctx.saved_tensors
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = INPUT_GRADIENT(grad_TN, weight_NK)
            if ctx.group is not None:
                dist.all_reduce(grad_x, group=ctx.group)
        if ctx.needs_input_grad[1]:
            sum_NK = ctx.sum
            if sum_NK is None:
                sum_NK = grad_weight = torch.zeros_like(weight_NK)
            _add_weight_gradient(grad_TN, x_TK, sum_NK)
        if ctx.needs_input_grad[2]:
            grad_bias = grad_TN.sum(0)
        return grad_x, grad_weight, grad_bias, None


def _add_weight_gradient(grad_TN: Tensor, x_TK: Tensor, sum_NK: Tensor) -> None:
    size = max(1, BLOCK_ENTRIES // x_TK.size(1))
    for grad_TB, sum_BK in zip(grad_TN.split(size, 1), sum_NK.split(size), strict=True):
        ADD_WEIGHT_GRADIENT(grad_TB, x_TK, sum_BK)


def _by_onednn(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    # an operator of torch's compiler; torch has no other way to choose oneDNN
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight_NK, bias_N, "none", [], "")  # noqa: SLF001
    return product


def _weight_gradient_from_smaller(grad_TN: Tensor, x_TK: Tensor) -> Tensor:
    """oneDNN copies its first factor when it is transposed: let it be the smaller one. When that is the input, the
    result is transposed; and the gradient must be contiguous, or oneDNN takes a thousand times as long."""
    if grad_TN.size(1) > x_TK.size(1):
        return _by_onednn(x_TK.t(), grad_TN.contiguous().t()).t()
    return _by_onednn(grad_TN.t(), x_TK.t())


class Ways:
    """The ways to make one kind of product, and which is the fastest by shape. The first is that of --reference-mode.

    T counts by its power of 2. The clock is this thread's CPU time: who else wants the core does not enter. A way may
    add its product to the last factor: trials do so to a copy.
    """

    def __init__(self, ways: Sequence[Callable[..., Tensor]]) -> None:
        self.ways = ways
        self.chosen: dict[tuple[int, int, int], Callable[..., Tensor]] = {}

    def __call__(self, first: Tensor, second: Tensor, *others: Tensor | None) -> Tensor:
        if torch.are_deterministic_algorithms_enabled():
            return self.ways[0](first, second, *others)
        shape = (first.size(0).bit_length(), first.size(1), second.size(1))
        way = self.chosen.get(shape)
        if way is None:
            way = self.chosen[shape] = self._fastest(first, second, *others)
        return way(first, second, *others)

    def _fastest(self, first: Tensor, second: Tensor, *others: Tensor | None) -> Callable[..., Tensor]:
        factors = first, second, *(other if other is None else other.clone() for other in others)
        seconds = dict.fromkeys(self.ways, float("inf"))
        for _ in range(NUM_TRIALS):
            for way in self.ways:
                began = time.thread_time()
                way(*factors)
                seconds[way] = min(seconds[way], time.thread_time() - began)
        return min(seconds, key=seconds.__getitem__)


FORWARD = Ways(
    (
        lambda x_TK, weight_KN, bias_N: _by_onednn(x_TK, weight_KN.t(), bias_N),
        lambda x_TK, weight_KN, bias_N: F.linear(x_TK, weight_KN.t(), bias_N),
    )
)
INPUT_GRADIENT = Ways((lambda grad_TN, weight_NK: _by_onednn(grad_TN, weight_NK.t()), torch.mm))
ADD_WEIGHT_GRADIENT = Ways(
    (
        lambda grad_TN, x_TK, sum_NK: sum_NK.add_(_weight_gradient_from_smaller(grad_TN, x_TK)),
        lambda grad_TN, x_TK, sum_NK: sum_NK.add_(_by_onednn(grad_TN.t(), x_TK.t())),
        lambda grad_TN, x_TK, sum_NK: sum_NK.addmm_(grad_TN.t(), x_TK),
    )
)
