"""Deadlines grow with the model."""

import numpy as np
import pytest
from safetensors.numpy import save_file

from vime.config.deadlines import generate_deadline_s, health_deadline_s, start_deadline_s, update_deadline_s
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


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_part_that_reads_the_checkpoint_has_a_second_more_for_each_100_megabytes_of_it(tmp_path, name):
    with (tmp_path / name).open("wb") as file:
        file.truncate(61_000_000_000)  # 30B in bf16
    config = Config().replace(hf_checkpoint=str(tmp_path), start_timeout_secs=300.0)
    assert start_deadline_s(config) == 300 + 610


@pytest.mark.parametrize(("train", "evaluation", "more_s"), [(8, None, 0), (32_768, None, 1228), (100, 16_000, 390)])
def test_a_request_has_a_second_more_for_each_20_tokens_of_a_long_answer(train, evaluation, more_s):
    lengths = {"rollout_max_response_len": train, "eval_max_response_len": evaluation}
    assert generate_deadline_s(Config().replace(generate_timeout_secs=600.0, **lengths)) == 600 + more_s
