"""The types of what torch hands to a function whose gradient is written out; torch itself says `Any`."""

from __future__ import annotations

from torch import Tensor
from torch.autograd.function import FunctionCtx


class Context(FunctionCtx):
    """`ctx` of `forward` and `backward`. torch makes it; a function that keeps more names it in a subclass."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]
