"""The directory of an adapter, as PEFT reads it."""

import warnings
from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForCausalLM

from tests.helpers import tiny_models
from tests.helpers.adapters import make_adapter, merged
from vime.config.lora import AdapterInfo
from vime.weights.adapter_files import write_adapter

TOKENS = [5, 9, 3, 7, 11, 2]


@pytest.mark.parametrize("targets", [["q_proj", "down_proj"], ["gate_proj"]])
def test_peft_finds_the_base_and_computes_with_the_adapter(tmp_path: Path, targets: list[str]) -> None:
    base = tiny_models.make_llama(tmp_path / "base")
    model = tiny_models.load(base)
    info = AdapterInfo(rank=3, alpha=8.0, target_modules=targets)
    adapter = make_adapter(model, 1, info)
    (tmp_path / "adapter").mkdir()
    write_adapter(tmp_path / "adapter", adapter, info, base=str(base))
    with warnings.catch_warnings():  # a tensor that PEFT does not find, or does not know, is a warning of its own
        warnings.simplefilter("error")
        loaded = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    by_peft = tiny_models.log_probs(loaded, TOKENS)
    assert by_peft == pytest.approx(tiny_models.log_probs(merged(model, adapter, info), TOKENS), abs=1e-5)
    plain = torch.tensor(tiny_models.log_probs(model, TOKENS))
    assert (torch.tensor(by_peft) - plain).abs().max() > 1e-2


def test_whoever_may_read_the_directory_may_read_the_adapter(tmp_path: Path) -> None:
    tmp_path.chmod(0o750)
    info = AdapterInfo(rank=1, alpha=1.0, target_modules=["q_proj"])
    write_adapter(tmp_path, {"w": torch.zeros(1)}, info)
    assert (tmp_path / "adapter_model.safetensors").stat().st_mode & 0o777 == 0o640
