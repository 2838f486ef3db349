"""Which models are read, and which are refused because they would train wrongly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.helpers.megatron_models import DEEPSEEK as SMALL_DEEPSEEK
from tests.helpers.megatron_models import GPT_OSS as SMALL_GPT_OSS
from tests.helpers.megatron_models import YARN
from vime.backends.megatron_utils.architecture import check_implementation, is_complete, read_architecture
from vime.backends.megatron_utils.deepseek import GroupRouter, Latent, Yarn
from vime.backends.megatron_utils.lora_layers import check_adapter
from vime.config.cluster import ParallelConfig
from vime.config.hf_config import read_model_shape
from vime.config.lora import LoraConfig
from vime.types import ConfigError

DEEPSEEK = {**SMALL_DEEPSEEK, "model_type": "deepseek_v3"}
GPT_OSS = {**SMALL_GPT_OSS, "model_type": "gpt_oss"}
BASE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 99,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
}


def write(directory: Path, **changes: Any) -> str:
    (directory / "config.json").write_text(json.dumps({**BASE, **changes}))
    return str(directory)


def test_numbers_are_those_of_the_config(tmp_path: Path) -> None:
    found = read_architecture(write(tmp_path, tie_word_embeddings=True, rope_theta=500_000.0))
    assert (found.num_layers, found.num_attention_heads, found.num_key_value_heads, found.head_dim) == (4, 8, 4, 8)
    assert (found.hidden_size, found.intermediate_size, found.vocab_size) == (64, 128, 99)
    assert (found.is_tied, found.has_qkv_bias, found.has_qk_norm) == (True, False, False)
    assert (found.rope_theta, found.rope_llama3_factor) == (500_000.0, None)


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Qwen3", "Mistral"])
def test_a_config_that_transformers_wrote_is_read_alike_with_and_without_transformers(
    kind: str, tmp_path: Path
) -> None:
    numbers = {name: value for name, value in BASE.items() if name != "model_type"}
    rope = {"rope_type": "default", "rope_theta": 250_000.0}
    made = getattr(transformers, f"{kind}Config")(**numbers, rope_parameters=rope, tie_word_embeddings=True)
    made.save_pretrained(tmp_path)
    entries = json.loads((tmp_path / "config.json").read_text())
    assert is_complete(entries)
    found = read_architecture(str(tmp_path))
    del entries["transformers_version"]
    assert not is_complete(entries)
    (tmp_path / "config.json").write_text(json.dumps(entries))
    assert read_architecture(str(tmp_path)) == found


@pytest.mark.parametrize(
    "changes",
    [
        {"num_key_value_heads": None},
        {"hidden_size": "64"},
        {"num_hidden_layers": True},
        {"hidden_size": 63},
        {"num_attention_heads": 0},
        {"rope_parameters": None},
        {"rope_parameters": {"rope_type": "default"}},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "factor": 8.0}},
        {"transformers_version": "4.57.0"},
        {"model_type": "qwen3_moe"},
        {"model_type": "gemma3_text"},
        {"model_type": "mistral"},  # without a sliding_window
        {"head_dim": None},
        {"tie_word_embeddings": None},
    ],
)
def test_what_a_config_does_not_say_plainly_is_left_to_transformers(changes: dict[str, Any]) -> None:
    rope = {"rope_type": "default", "rope_theta": 250_000.0}
    said = {**BASE, "transformers_version": "5.19.0", "rope_parameters": rope, "head_dim": 8}
    said["tie_word_embeddings"] = False
    assert is_complete(said)
    assert not is_complete({**said, **changes})
    for name in ("vocab_size", "rms_norm_eps", "num_key_value_heads", "rope_parameters"):
        assert not is_complete({key: value for key, value in said.items() if key != name})


def test_theta_is_read_from_the_old_and_the_new_spelling(tmp_path: Path) -> None:
    new = {"rope_type": "default", "rope_theta": 250_000.0}
    assert read_architecture(write(tmp_path, rope_parameters=new)).rope_theta == 250_000.0
    assert read_architecture(write(tmp_path, rope_theta=250_000.0)).rope_theta == 250_000.0


def test_families_differ_in_bias_norm_and_head_size(tmp_path: Path) -> None:
    qwen2 = read_architecture(write(tmp_path, model_type="qwen2"))
    assert (qwen2.has_qkv_bias, qwen2.has_qk_norm, qwen2.head_dim) == (True, False, 8)
    qwen3 = read_architecture(write(tmp_path, model_type="qwen3", head_dim=32))
    assert (qwen3.has_qkv_bias, qwen3.has_qk_norm, qwen3.head_dim) == (False, True, 32)


def test_experts_are_read_and_a_dense_model_has_none(tmp_path: Path) -> None:
    numbers = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "norm_topk_prob": True}
    found = read_architecture(write(tmp_path, model_type="qwen3_moe", head_dim=16, **numbers))
    assert (found.num_experts, found.num_experts_per_token, found.moe_intermediate_size) == (8, 3, 40)
    assert found.normalizes_chosen
    assert read_architecture(write(tmp_path, model_type="qwen3", head_dim=16)).num_experts == 0


HUB_GEMMA3_1B: dict[str, Any] = {
    "model_type": "gemma3_text", "head_dim": 256, "hidden_size": 1152, "intermediate_size": 6912,
    "max_position_embeddings": 32768, "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000, "rope_scaling": None,
    "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6, "vocab_size": 262144,
    "hidden_activation": "gelu_pytorch_tanh", "attn_logit_softcapping": None, "final_logit_softcapping": None,
}  # fmt: skip
"""As it is published, but for what is of no interest here."""


def test_gemma3_is_read_as_it_is_published(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(HUB_GEMMA3_1B))
    found = read_architecture(str(tmp_path))
    assert (found.rope_theta, found.window_rope_theta, found.rope_linear_factor) == (1e6, 1e4, None)
    assert (found.attention_scale, found.embedding_scale) == (1 / 16, 1152**0.5)
    assert (found.is_gelu, found.norms_add_one, found.has_sandwich_norms, found.has_qk_norm) == (True,) * 4
    assert found.is_tied
    # each sixth of 26 layers sees everything: numbers 5, 11, 17 and 23
    assert (found.window, [number for number in range(26) if number not in found.window_layers]) == (
        512, [5, 11, 17, 23],
    )  # fmt: skip
    shape = read_model_shape(str(tmp_path))  # without transformers, which knows the class
    assert (shape.window, shape.window_layers) == (found.window, found.window_layers)


def test_the_larger_gemma3_divides_positions_of_layers_without_a_window(tmp_path: Path) -> None:
    scaling = {"factor": 8.0, "rope_type": "linear"}
    (tmp_path / "config.json").write_text(json.dumps({**HUB_GEMMA3_1B, "rope_scaling": scaling}))
    assert read_architecture(str(tmp_path)).rope_linear_factor == 8.0


def test_deepseek_is_read_with_its_layers_its_router_and_its_positions(tmp_path: Path) -> None:
    found = read_architecture(write(tmp_path, **DEEPSEEK))
    assert found.latent == Latent(query_rank=24, key_value_rank=32, num_plain=16, num_rotated=8, num_values=12)
    # two shared experts of 32 columns; the first of four layers has none
    assert found.router == GroupRouter(num_groups=4, groups_per_token=2, scale=1.5, shared_size=64, num_dense_layers=1)
    assert (found.head_dim, found.attention_scale, found.rope_yarn) == (8, 24**-0.5, None)
    scaled = read_architecture(write(tmp_path, **{**DEEPSEEK, **YARN}))
    assert scaled.rope_yarn == Yarn(factor=8.0, num_positions=64, beta_fast=32.0, beta_slow=1.0)
    # (0.1 x 0.7 x ln 8 + 1)^2 = 1.3123
    assert scaled.attention_scale == pytest.approx(1.3123 * 24**-0.5, rel=1e-4)


def test_an_adapter_is_refused_beside_latent_attention(tmp_path: Path) -> None:
    found = read_architecture(write(tmp_path, **DEEPSEEK))
    with pytest.raises(ConfigError, match=r"--lora-rank 4: here has latent attention.*Expected another family"):
        check_adapter(LoraConfig(lora_rank=4), ParallelConfig(), found, "here")


def test_gpt_oss_is_read_with_its_sinks_its_windows_and_its_positions(tmp_path: Path) -> None:
    found = read_architecture(write(tmp_path, **GPT_OSS))
    assert (found.has_sinks, found.has_qkv_bias, found.normalizes_chosen) == (True, True, True)
    assert (found.window, found.window_layers) == (6, (0, 2))
    assert (found.num_experts, found.num_experts_per_token, found.moe_intermediate_size) == (4, 2, 128)
    # cos and sin times 0.1 ln 8 + 1
    assert found.rope_scale == pytest.approx(1.207944, rel=1e-6)
    # channel(turns) = 16 ln(64 / (2 pi turns)) / (2 ln 150000): below 0 for 32, 1.5579 for 1; eight pairs
    shares = Yarn(factor=8.0, num_positions=64, beta_fast=32.0, beta_slow=1.0, is_rounded=False)
    assert found.rope_yarn == shares
    assert shares.shares(150_000.0, 16)[:3] == pytest.approx([0, 1 / 1.5579, 1], rel=1e-4)
    with pytest.raises(ConfigError, match=r"--lora-rank 4: here has attention sinks.*or --lora-rank 0"):
        check_adapter(LoraConfig(lora_rank=4), ParallelConfig(), found, "here")
    with pytest.raises(ConfigError, match=r"gpt_oss with --transformer-impl transformer_engine"):
        check_implementation(found, "transformer_engine", "x")


def test_mistral_has_the_window_of_its_config_or_of_its_class(tmp_path: Path) -> None:
    old = read_architecture(write(tmp_path, model_type="mistral"))  # its class has 4096
    assert (old.window, old.window_layers, old.head_dim) == (4096, (0, 1, 2, 3), 8)
    new = read_architecture(write(tmp_path, model_type="mistral", sliding_window=None, head_dim=16))
    assert (new.window, new.window_layers, new.head_dim) == (0, (), 16)
    kinds = ["full_attention", "sliding_attention"] * 2  # transformers calls such a model ministral
    some = read_architecture(write(tmp_path, model_type="mistral", sliding_window=64, layer_types=kinds))
    assert (some.model_type, some.window, some.window_layers) == ("mistral", 64, (1, 3))


def test_layers_that_only_vime_has_are_refused_under_transformer_engine(tmp_path: Path) -> None:
    found = read_architecture(write(tmp_path, model_type="mistral", sliding_window=64))
    check_implementation(found, "local", "x")
    with pytest.raises(ConfigError, match=r"mistral with --transformer-impl transformer_engine.*Expected.*local"):
        check_implementation(found, "transformer_engine", "x")
    plain = read_architecture(write(tmp_path, model_type="mistral", sliding_window=None))
    check_implementation(plain, "transformer_engine", "x")


def test_llama3_scaling_keeps_its_factor(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    found = read_architecture(write(tmp_path, rope_scaling=scaling, rope_theta=5e5, max_position_embeddings=131072))
    assert found.rope_llama3_factor == 32.0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "qwen3_moe", "decoder_sparse_step": 2}, "decoder_sparse_step=2"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [0]}, r"mlp_only_layers=\[0\]"),
        ({"model_type": "mixtral"}, "model_type 'mixtral' is not supported.*llama, mistral, qwen2, qwen3"),
        (
            {**GPT_OSS, "quantization_config": {"quant_method": "mxfp4"}},
            r"quantization_config \('mxfp4'\).*Expected a checkpoint in bf16 or fp32.*Mxfp4Config\(dequantize=True\)",
        ),
        ({**GPT_OSS, "swiglu_limit": 8.0}, "swiglu_limit=8.0; the trainer computes swiglu_limit=7.0 only"),
        ({**GPT_OSS, "rms_norm_eps": 1e-6}, "rms_norm_eps=1e-06; the trainer computes rms_norm_eps=1e-05 only"),
        ({**GPT_OSS, "tie_word_embeddings": True}, "tie_word_embeddings=True; the trainer computes"),
        ({**GPT_OSS, "attention_bias": False}, "attention_bias=False; the trainer computes"),
        ({**GPT_OSS, "sliding_window": None}, "sliding_window=None with layer_types.*expected a window above 0"),
        ({**GPT_OSS, "layer_types": ["full_attention"] * 4}, "layer_types.*first layer and every other one"),
        (
            {**GPT_OSS, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
            "rotary scaling with .*is not supported for gpt_oss. Expected rope_type yarn",
        ),
        (
            {**GPT_OSS, "rope_parameters": {**SMALL_GPT_OSS["rope_parameters"], "attention_factor": 1.5}},
            "none of attention_factor, mscale, mscale_all_dim: vLLM computes no other",
        ),
        ({**DEEPSEEK, "topk_method": None}, "config.json has no topk_method='noaux_tc'.*vLLM routes tokens in another"),
        ({"model_type": "deepseek_v2"}, r"'deepseek_v2' is not supported.*router of groups with a softmax.*one of"),
        ({**DEEPSEEK, "rms_norm_eps": 1e-5}, "rms_norm_eps=1e-05; the trainer computes rms_norm_eps=1e-06 only"),
        ({**DEEPSEEK, "norm_topk_prob": False}, "norm_topk_prob=False; the trainer computes"),
        ({**DEEPSEEK, "rope_interleave": False}, "rope_interleave=False; the trainer computes"),
        ({**DEEPSEEK, "topk_group": 1}, "num_experts_per_tok=4 and topk_group=1.*Expected twice as many"),
        ({**DEEPSEEK, "num_key_value_heads": 4}, "num_key_value_heads=4 and num_attention_heads=8"),
        ({**DEEPSEEK, "first_k_dense_replace": 4}, "first_k_dense_replace=4, expected 0 to 3"),
        (
            {**DEEPSEEK, "rope_parameters": {**YARN["rope_parameters"], "mscale_all_dim": 1.0}},
            "rotary scaling 'yarn' .*mscale equal to mscale_all_dim",
        ),
        (
            {"model_type": "qwen3_5_moe"},
            r"'qwen3_5_moe' is not supported.*delta-net.*0\.18 is the first that does",
        ),
        ({"model_type": "gemma3"}, r"'gemma3' is not supported.*model_type gemma3_text, is trained"),
        ({"sliding_window": 64}, "sliding_window=64; the trainer computes sliding_window=None only"),
        ({"model_type": "mistral", "sliding_window": 0}, "sliding_window=0, expected null or a number of tokens"),
        (
            {"model_type": "mistral", "sliding_window": None, "layer_types": ["sliding_attention"] * 4},
            "sliding_window=None with layer_types sliding_attention; expected full_attention",
        ),
        (
            {"model_type": "mistral", "sliding_window": 64, "layer_types": ["chunked_attention"] * 4},
            "layer_types chunked_attention; expected full_attention or sliding_attention",
        ),
        ({"model_type": "mistral", "llama_4_scaling": {"beta": 0.1}}, "llama_4_scaling="),
        ({"model_type": "gemma3_text", "final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
        ({"model_type": "gemma3_text", "attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ({"model_type": "gemma3_text", "hidden_activation": "silu"}, "hidden_activation='silu'"),
        ({"model_type": "gemma3_text", "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rotary scaling 'yarn'"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "use_sliding_window=True"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rotary scaling 'yarn'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rotary scaling 'linear'"),
    ],
)
def test_a_model_that_would_train_wrongly_is_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_architecture(write(tmp_path, **changes))


def test_a_missing_config_names_flag_and_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--ref-load .*nowhere.*config\.json"):
        read_architecture(str(tmp_path / "nowhere"), flag="--ref-load")
