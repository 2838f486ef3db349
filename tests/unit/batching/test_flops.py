"""FLOPs of a row, worked by hand on two small shapes, and against what torch counts of a real forward pass."""

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.megatron_models import DEEPSEEK, GPT_OSS, SHAPE
from vime.batching.flops import executed_flops, forward_flops, layer_flops, peak_tflops, train_flops
from vime.config.hf_config import ModelShape, read_model_shape

DENSE = ModelShape(
    model_type="qwen3",
    num_layers=2,
    hidden_size=4,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=3,
    intermediate_size=5,
    num_experts=0,
    num_experts_per_token=0,
    moe_intermediate_size=0,
    max_position_embeddings=64,
    vocab_size=10,
)
EXPERTS = dataclasses.replace(DENSE, num_experts=8, num_experts_per_token=2, moe_intermediate_size=3)


def test_a_dense_row_by_hand() -> None:
    # a token of a layer: q, k, v 2 x 4 x (2 + 2 x 1) x 3 = 96; output 2 x 6 x 4 = 48; MLP 6 x 4 x 5 = 120; 264 in all
    # three tokens see 1 + 2 + 3 keys, each 4 x 2 x 3 = 24 (scores and values): 144
    # two layers: 2 x (3 x 264 + 144) = 1872; logits of two tokens: 2 x 2 x 4 x 10 = 160
    assert layer_flops(DENSE, 3) == 1872
    assert forward_flops(DENSE, 3, 2) == 2032
    assert train_flops(DENSE, 3, 2) == 6096


def test_only_the_active_experts_and_the_router_count() -> None:
    # MLP of a token: router 2 x 4 x 8 = 64 and 2 experts of 6 x 4 x 3 = 72: 208. 2 x (3 x (96 + 48 + 208) + 144) = 2400
    assert layer_flops(EXPERTS, 3) == 2400


def test_a_token_of_a_layer_with_a_window_sees_no_more_keys_than_that() -> None:
    # one of two layers sees at most 2 keys: tokens see 1 + 2 + 2 instead of 1 + 2 + 3, 24 FLOPs a key
    windowed = dataclasses.replace(DENSE, window=2, window_layers=(1,))
    assert layer_flops(windowed, 3) == 1872 - 24
    assert executed_flops(windowed, 3, 2, recompute="selective") == 3 * (2032 - 24) + (1 + 2 + 3 + 1 + 2 + 2) * 24
    # a window that is longer than the sequence changes nothing
    assert layer_flops(dataclasses.replace(windowed, window=3), 3) == 1872


def test_latent_attention_shared_experts_and_dense_layers_are_counted(tmp_path: Path) -> None:
    numbers = {**SHAPE, **DEEPSEEK, "model_type": "deepseek_v3"}
    (tmp_path / "config.json").write_text(json.dumps(numbers))
    shape = read_model_shape(str(tmp_path))
    # 8 heads: queries 64 x 24 + 24 x 8 x (16 + 8); short vector 64 x (32 + 8); keys and values 32 x 8 x (16 + 12);
    # output 8 x 12 x 64: 1536 + 4608 + 2560 + 7168 + 6144 = 22016
    assert shape.attention_weights == 22016
    # dense: 6 x 64 x 128 = 49152; with experts: router 2 x 64 x 8 = 1024, 6 x 64 x (4 x 32 + 64) = 73728
    # scores over 24 channels and values over 12, 1 + 2 keys, 8 heads, 2 FLOPs: 3 x 8 x 2 x 36 = 1728 a layer
    per_token = 4 * 2 * 22016 + 49152 + 3 * (1024 + 73728)
    assert layer_flops(shape, 2) == 2 * per_token + 4 * 1728


def test_gpt_oss_counts_its_experts_and_its_windows(tmp_path: Path) -> None:
    numbers = {**SHAPE, **GPT_OSS, "model_type": "gpt_oss"}
    (tmp_path / "config.json").write_text(json.dumps(numbers))
    shape = read_model_shape(str(tmp_path))
    # 8 heads and 2 x 4 of keys and values of 16: 64 x 256 + 128 x 64 = 24576
    # router 2 x 64 x 4 = 512; two experts of 128 columns: 6 x 64 x 2 x 128 = 98304
    # 10 tokens: 55 keys; in layers 0 and 2, with a window of 6, 21 + 4 x 6 = 45; 4 x 128 FLOPs a key
    assert shape.window_layers == (0, 2)
    assert layer_flops(shape, 10) == 10 * 4 * (2 * 24576 + 512 + 98304) + 4 * 128 * 2 * (55 + 45)


def test_recomputation_counts_as_executed_work() -> None:
    # full: the layers once more, 6096 + 1872; selective: scores and values once more, 6096 + 2 x 144
    assert executed_flops(DENSE, 3, 2, recompute=None) == 6096
    assert executed_flops(DENSE, 3, 2, recompute="full") == 7968
    assert executed_flops(DENSE, 3, 2, recompute="selective") == 6384


def test_torch_counts_the_same_products() -> None:
    """torch's own counter over a transformers model, whose attention computes all n x n scores: ours counts the lower
    half and the diagonal, n (n + 1) / 2."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import Qwen3Config, Qwen3ForCausalLM

    model = Qwen3ForCausalLM(
        Qwen3Config(
            num_hidden_layers=2,
            hidden_size=4,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=4,
            intermediate_size=5,
            vocab_size=10,
            attn_implementation="eager",
        )
    )
    shape = dataclasses.replace(DENSE, head_dim=4)
    tokens = 7
    with FlopCounterMode(display=False) as counter:
        model(torch.arange(tokens).unsqueeze(0))
    unseen = shape.num_layers * 4 * 2 * 4 * (tokens * tokens - tokens * (tokens + 1) // 2)
    assert counter.get_total_flops() == forward_flops(shape, tokens, tokens) + unseen


@given(first=st.integers(1, 500), second=st.integers(1, 500))
def test_one_long_row_costs_more_than_two_short_ones(first: int, second: int) -> None:
    assert layer_flops(DENSE, first + second) > layer_flops(DENSE, first) + layer_flops(DENSE, second)


@pytest.mark.parametrize(
    ("name", "bf16", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", True, 989),
        ("NVIDIA H100 NVL", True, 835),
        ("NVIDIA A100-SXM4-80GB", True, 312),
        ("NVIDIA L40S", True, 362),
        ("NVIDIA H100 80GB HBM3", False, None),
        ("cpu", True, None),
    ],
)
def test_the_peak_is_that_of_the_longest_name_that_fits(name: str, bf16: bool, peak: float | None) -> None:
    assert peak_tflops(name, bf16=bf16) == peak
