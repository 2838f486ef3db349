"""The critic's output: one number a token where a language model has its vocabulary.

L: tokens of this context-parallel rank (all T of a pack without), S: those of this rank under sequence parallelism.
"""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from torch import Tensor


class ValueHead(torch.nn.Module):
    """hidden -> 1, the same on every tensor-parallel rank; stands in for `GPTModel.output_layer`.

    It begins at zero unless the checkpoint brings one: every value of the first round is then exactly 0 in any layout,
    so its advantages come from rewards alone and not from noise; the transformer below it learns from the second step
    on. No bias: the final norm's scale carries a constant. Computed and returned in fp32.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))
        self._gathers = config.sequence_parallel
        # each rank sees its own tokens: megatron then sums this gradient over the tensor-parallel ranks
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden_S1H: Tensor, **_: object) -> tuple[Tensor, None]:
        """([L, 1, 1] fp32, no bias): megatron's signature of an output layer. Collective over the tensor group under
        sequence parallelism."""
        value_S11 = torch.nn.functional.linear(hidden_S1H.float(), self.weight.float())
        if not self._gathers:
            return value_S11, None
        # every rank computes the same loss from all values, so backward takes back its own tokens and sums nothing
        return gather_from_sequence_parallel_region(value_S11, tensor_parallel_output_grad=False), None
