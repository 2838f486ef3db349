"""An adapter as the directory that PEFT, transformers and vLLM load."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from vime.config.lora import AdapterInfo
from vime.weights.hf_files import write_shard


def write_adapter(directory: Path, tensors: Mapping[str, Tensor], adapter: AdapterInfo, *, base: str = "") -> None:
    """Write adapter_config.json and adapter_model.safetensors. `tensors`: by PEFT's names. `base`: where the model is
    that the adapter belongs to."""
    config: dict[str, object] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": adapter["rank"],
        "lora_alpha": adapter["alpha"],
        "target_modules": list(adapter["target_modules"]),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=2))
    copied = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write_shard(directory / "adapter_model.safetensors", copied)
