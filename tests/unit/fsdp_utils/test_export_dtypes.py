"""What the FSDP backend exports in which precision."""

from __future__ import annotations

import pytest
import torch

from vime.backends.fsdp_utils import hf_weights


class Router(torch.nn.Module):
    """As DeepSeek-V3's: the bias that chooses experts is a buffer in fp32, and engines hold it so."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2, 2))
        self.register_buffer("e_score_correction_bias", torch.tensor([0.1618, 0.1623]))


def test_parameters_are_exported_as_they_are_computed_with_and_buffers_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_weights, "revert_weight_conversion", lambda _family, tensors: tensors)
    model = Router()
    weights = hf_weights.HFWeights(model, model, torch.bfloat16)  # type: ignore[arg-type]
    assert {meta.name: meta.dtype for meta in weights.metadata()} == {
        "weight": "bfloat16",
        "e_score_correction_bias": "float32",
    }
    assert torch.equal(dict(weights.export())["e_score_correction_bias"], model.e_score_correction_bias)
