"""All experts of a rank in two products (`torch.nn.functional.grouped_mm`) instead of two for each expert.

The parameters stay megatron's, one matrix for each layer of each expert, so that names, checkpoints, exports and
optimizer state are the same with and without. The products want one tensor: it is put together before each of them, in
backward once more, and not kept (a copy of a layer's experts, which a GPU makes in a fraction of a product's time).
How many tokens an expert got stays on the device: nothing waits for it.

E: experts of this rank, T: tokens that were sent here, those of the first expert first, I inputs, O outputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from vime.backends.autograd import Context
from vime.backends.megatron_utils.fused import swiglu


def await_weights(*modules: nn.Module) -> None:
    """Run what megatron does before a module's forward: with --overlap-param-gather it waits there for the module's
    weights, which are used here without that call."""
    for module in modules:
        for hook in module._forward_pre_hooks.values():  # noqa: SLF001 - torch has no other way to run them
            hook(module, ())


class GroupedExperts(SequentialMLP):
    """megatron's experts with a gated SiLU and no biases, behind its token dispatcher."""

    def forward(self, tokens_TH: Tensor, tokens_per_expert_E: Tensor, weight_T: Tensor) -> tuple[Tensor, None]:
        """Return [T, H], times the router's weights; where experts are cut, this rank's part of a sum."""
        for expert in self.local_experts:
            await_weights(expert.linear_fc1, expert.linear_fc2)
        ends_E = tokens_per_expert_E.to(tokens_TH.device).cumsum(0).to(torch.int32)
        wide_TF = grouped_linear(tokens_TH, ends_E, [expert.linear_fc1.weight for expert in self.local_experts])
        inner_TF = swiglu(wide_TF)
        inner_TF = (inner_TF * weight_T.unsqueeze(-1)).to(inner_TF.dtype)
        return grouped_linear(inner_TF, ends_E, [expert.linear_fc2.weight for expert in self.local_experts]), None


def grouped_linear(x_TI: Tensor, ends_E: Tensor, weights: list[Tensor]) -> Tensor:
    """[T, I] -> [T, O]: rows up to `ends_E[0]` times the first weight [O, I] transposed, those up to `ends_E[1]` times
    the second, and so on. `ends_E`: int32, on the device of the rows; the last one is T."""
    return _GroupedLinear.apply(x_TI, ends_E, *weights)  # type: ignore[no-untyped-call,no-any-return]


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x_TI: Tensor, ends_E: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x_TI, ends_E, *weights)
        if not len(x_TI):  # no kernel takes so few
            return x_TI.new_zeros(0, len(weights[0]))
        return F.grouped_mm(x_TI, torch.stack(weights).transpose(1, 2), offs=ends_E)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad_TO: Tensor) -> tuple[Tensor | None, ...]:
        """d/dx = grad W; d/dW = grad^T x, over the rows of each expert."""
        x_TI, ends_E, *weights = ctx.saved_tensors
        if not len(x_TI):
            return torch.zeros_like(x_TI), None, *map(torch.zeros_like, weights)
        grad_TO = grad_TO.contiguous()
        grad_x = F.grouped_mm(grad_TO, torch.stack(weights), offs=ends_E)
        if not any(ctx.needs_input_grad[2:]):  # an adapter is trained, and experts have none
            return grad_x, None, *(None for _ in weights)
        grad_EOI = F.grouped_mm(grad_TO.transpose(0, 1), x_TI, offs=ends_E)
        return grad_x, None, *grad_EOI.unbind()
