"""Proof at start-up that a model keeps packed sequences apart: the one thing no model family promises.

A recurrent layer, an attention of its own or positions counted by itself would let a sequence see the one before it,
and training would go on with wrong log-probabilities.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from vime.backends.fsdp_utils.model import ValueModel, model_inputs
from vime.batching.pack import pack
from vime.types import ConfigError, EngineSpec, TrainRow

NUM_TOKENS = 6  # of each of the two sequences
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1}
"""Of the root mean square difference, as a share of the outputs' own. In bf16 kernels differ by about 0.01; what a
sequence sees that it should not changes its outputs by the order of themselves."""


@torch.no_grad()
def check_packing(
    spec: EngineSpec, family: PreTrainedModel, model: nn.Module, *, implementation: str, device: torch.device
) -> None:
    """A sequence behind another in a pack must get what it gets alone from transformers' own attention. Collective over
    all ranks, which all find the same."""
    vocabulary = family.config.get_text_config().vocab_size
    first, second = ([(7 * number + start) % vocabulary for number in range(NUM_TOKENS)] for start in (1, 3))

    def outputs(sequences: list[list[int]], chosen: str) -> Tensor:
        batch = pack([_row(tokens) for tokens in sequences], device=device)
        inputs = model_inputs(batch, chosen)
        if chosen == "eager":
            del inputs["pack_starts"]
        answer = model(**inputs)
        whole = answer if isinstance(model, ValueModel) else answer.logits
        return whole[0, -NUM_TOKENS:]

    try:
        packed = outputs([first, second], implementation)
    except (NotImplementedError, TypeError) as error:
        raise ConfigError(f"{spec.flag} {spec.checkpoint}: cannot be trained on packed sequences: {error}.") from error
    family.set_attn_implementation("eager")
    alone = outputs([second], "eager")
    family.set_attn_implementation(implementation)
    difference, size = (
        float((packed - alone).float().square().mean().sqrt()),
        float(alone.float().square().mean().sqrt()),
    )
    if not difference <= TOLERANCE[packed.dtype] * size:
        raise ConfigError(
            f"{spec.flag} {spec.checkpoint}: the outputs of a sequence change by {difference:.3g} of {size:.3g} when "
            f"another one stands before it in a pack: model_type {family.config.model_type!r} does not keep packed "
            "sequences apart. Choose another model, or --train-backend megatron."
        )


def _row(tokens: list[int]) -> TrainRow:
    return TrainRow(
        sample_index=0,
        group_index=0,
        rollout_id=0,
        tokens=tokens,
        response_length=0,
        loss_mask=(),
        rollout_log_probs=(),
        token_policy_versions=(),
        reward=0.0,
        raw_reward=0.0,
        status="completed",
        truncated=False,
    )
