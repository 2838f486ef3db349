"""Deadlines grow with the model."""

import numpy as np
import pytest
from safetensors.numpy import save_file

from vime.config.deadlines import health_deadline_s, update_deadline_s
from vime.config.parse import Config


@pytest.mark.parametrize(
    ("sizes", "more_s"),
    [
        ([], 0),
        ([499_999_999], 0),  # below a GB in fp32
        ([500_000_000], 1),
        ([4_000_000_000, 4_000_000_000], 16),  # 4B in bf16: 16 GB in fp32
    ],
)
def test_an_update_has_a_second_more_for_each_gigabyte_in_fp32(tmp_path, sizes, more_s):
    for number, size in enumerate(sizes):
        with (tmp_path / f"model-{number}.safetensors").open("wb") as file:
            file.truncate(size)  # takes no space
    config = Config().replace(hf_checkpoint=str(tmp_path), update_weight_timeout_secs=100.0)
    assert update_deadline_s(config) == 100 + more_s


@pytest.mark.parametrize(("device", "more_s"), [("cuda", 0), ("cpu", 13)])
def test_an_engine_on_a_cpu_may_be_in_a_step_of_prompts_when_it_is_asked_how_it_is(tmp_path, device, more_s):
    """2,048 tokens of 16 million parameters at 5e9 operations a second. At 60 s a healthy engine of 135 M was ended."""
    save_file(
        {"a": np.zeros((4000, 3000), np.float16), "b": np.zeros(4_000_000, np.float16)}, tmp_path / "m.safetensors"
    )
    config = Config().replace(hf_checkpoint=str(tmp_path), device=device, engine_health_timeout_secs=60.0)
    assert health_deadline_s(config) == 60 + more_s
