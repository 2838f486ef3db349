"""Deadlines grow with the model."""

import numpy as np
import pytest
from safetensors.numpy import save_file

from vime.config.deadlines import (
    generate_deadline_s,
    health_deadline_s,
    request_deadline_s,
    rollout_deadline_s,
    start_deadline_s,
    update_deadline_s,
)
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
    assert generate_deadline_s(Config().replace(**lengths)) == 600 + more_s
    assert generate_deadline_s(Config().replace(generate_timeout_secs=700.0, **lengths)) == 700


@pytest.mark.parametrize(
    ("prompts", "length", "plugin", "more_s"),
    [
        (256, 1024, None, 0),  # two answers after each other, 2,048 tokens
        (128, 32_768, None, 1228),  # all at once: (32,768 - 8,192) / 20
        (129, 32_768, None, 2867),  # one has to wait: (2 * 32,768 - 8,192) / 20
        (128, 32_768, "agents.py:generate", 12_697),  # each of 1,024 samples asks for itself: (8 * 32,768 - 8,192) / 20
    ],
)
def test_a_round_has_a_second_more_for_each_20_tokens_that_answers_after_each_other_have(
    prompts, length, plugin, more_s
):
    config = Config().replace(
        rollout_batch_size=prompts,
        n_samples_per_prompt=8,
        rollout_max_response_len=length,
        rollout_num_engines=2,
        vllm_server_concurrency=64,
        custom_generate_function_path=plugin,
    )
    assert rollout_deadline_s(config) == 3600 + more_s
    assert rollout_deadline_s(config.replace(rollout_timeout_secs=5000.0)) == 5000
    wider = config.replace(over_sampling_batch_size=2 * prompts, rollout_max_response_len=8192)
    assert rollout_deadline_s(wider) > rollout_deadline_s(config.replace(rollout_max_response_len=8192))


def test_a_round_has_at_least_the_time_of_one_request():
    config = Config().replace(generate_timeout_secs=9000.0)
    assert rollout_deadline_s(config) == 9000
    assert rollout_deadline_s(config.replace(rollout_timeout_secs=100.0)) == 100


def test_under_reference_mode_an_engine_answers_one_prompt_at_a_time():
    """32 prompts of 8,192 tokens after each other: (32 - 1) * 8,192 / 20."""
    config = Config().replace(reference_mode=True, rollout_batch_size=32, rollout_max_response_len=8192)
    assert rollout_deadline_s(config) == 3600 + 12_697


def test_requests_and_rounds_have_the_time_of_the_longest_set_of_evaluation(tmp_path):
    sets = tmp_path / "sets.toml"
    sets.write_text('[[datasets]]\nname = "own"\npath = "a.jsonl"\nmax_response_len = 32768\n')
    config = Config().replace(eval_config=str(sets), rollout_max_response_len=8)
    assert (generate_deadline_s(config), request_deadline_s(config)) == (600, 1828)
    assert rollout_deadline_s(config) == 4828
