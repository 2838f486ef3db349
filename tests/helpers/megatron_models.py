"""Tiny random Hugging Face models on disk, and rows to train them on."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vime.data.rows import TrainRow
from vime.types import RoundPlan, StepPlan, VersionSpan

VOCAB_SIZE = 99  # odd: under tensor parallelism the vocabulary is padded
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.08,
}
EXPERTS: dict[str, Any] = {
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "router_aux_loss_coef": 0.0,
}
WINDOW = 6  # most rows are longer
GEMMA: dict[str, Any] = {
    "head_dim": 16,
    "query_pre_attn_scalar": 24,  # another scale than 1 / sqrt(head_dim)
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0},
    },
    "pad_token_id": 0,
}
DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 8,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
}
YARN: dict[str, Any] = {
    "q_lora_rank": None,
    "n_group": 1,
    "topk_group": 1,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "mscale": 0.7,
        "mscale_all_dim": 0.7,
    },
}
GPT_OSS: dict[str, Any] = {
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": WINDOW,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150_000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
    },
}
LENGTHS = ((3, 6), (10, 23), (5, 12), (8, 32), (1, 4), (9, 17), (4, 8), (7, 14))  # (prompt, response) tokens


def make_model(kind: str, directory: Path, *, seed: int = 0) -> Path:
    """`kind`: deepseek, deepseek_yarn, gemma3, gpt_oss, llama_tied, llama3_scaled, mistral, mistral_full,
    mistral_layers, qwen2, qwen2_tied, qwen2_critic, qwen3, qwen3_moe, qwen3_moe_tied.

    fp32 safetensors and config.json. The two models with experts differ in how routing weights are normalised.
    """
    import torch
    from transformers import (
        DeepseekV3Config,
        DeepseekV3ForCausalLM,
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        GptOssConfig,
        GptOssForCausalLM,
        LlamaConfig,
        LlamaForCausalLM,
        MinistralConfig,
        MinistralForCausalLM,
        MistralConfig,
        MistralForCausalLM,
        Qwen2Config,
        Qwen2ForCausalLM,
        Qwen2ForSequenceClassification,
        Qwen3Config,
        Qwen3ForCausalLM,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )

    llama3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    rope = {"rope_type": "default", "rope_theta": 10_000.0}
    model_class, config = {
        "deepseek": (DeepseekV3ForCausalLM, lambda: DeepseekV3Config(**{**SHAPE, **DEEPSEEK})),
        "deepseek_yarn": (DeepseekV3ForCausalLM, lambda: DeepseekV3Config(**{**SHAPE, **DEEPSEEK, **YARN})),
        "gemma3": (Gemma3ForCausalLM, lambda: Gemma3TextConfig(**SHAPE, **GEMMA)),
        "gpt_oss": (GptOssForCausalLM, lambda: GptOssConfig(**{**SHAPE, **GPT_OSS})),
        "mistral": (MistralForCausalLM, lambda: MistralConfig(**SHAPE, head_dim=16, sliding_window=WINDOW)),
        "mistral_layers": (
            MinistralForCausalLM,
            lambda: MinistralConfig(
                **SHAPE, head_dim=16, sliding_window=WINDOW, layer_types=["full_attention", "sliding_attention"] * 2
            ),
        ),
        "mistral_full": (MistralForCausalLM, lambda: MistralConfig(**SHAPE, head_dim=16, sliding_window=None)),
        "qwen2": (Qwen2ForCausalLM, lambda: Qwen2Config(**SHAPE, rope_parameters={**rope, "rope_theta": 1e6})),
        "qwen2_tied": (Qwen2ForCausalLM, lambda: Qwen2Config(**SHAPE, tie_word_embeddings=True, rope_parameters=rope)),
        "qwen2_critic": (
            Qwen2ForSequenceClassification,
            lambda: Qwen2Config(**SHAPE, num_labels=1, rope_parameters={**rope, "rope_theta": 1e6}),
        ),
        "qwen3": (
            Qwen3ForCausalLM,
            lambda: Qwen3Config(**SHAPE, head_dim=16, tie_word_embeddings=False, rope_parameters=rope),
        ),
        "qwen3_moe": (Qwen3MoeForCausalLM, lambda: Qwen3MoeConfig(**SHAPE, **EXPERTS, rope_parameters=rope)),
        "qwen3_moe_tied": (
            Qwen3MoeForCausalLM,
            lambda: Qwen3MoeConfig(
                **SHAPE, **{**EXPERTS, "norm_topk_prob": False}, tie_word_embeddings=True, rope_parameters=rope
            ),
        ),
        "llama_tied": (LlamaForCausalLM, lambda: LlamaConfig(**SHAPE, tie_word_embeddings=True, rope_parameters=rope)),
        "llama3_scaled": (
            LlamaForCausalLM,
            lambda: LlamaConfig(**SHAPE, rope_parameters={**llama3, "rope_type": "llama3", "rope_theta": 5e5}),
        ),
    }[kind]
    torch.manual_seed(seed)
    model = model_class(config()).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # norms of 1 and biases of 0 would hide a wrong mapping
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            if name.endswith("sinks"):
                parameter.normal_(0, 1)
            if name.endswith("bias"):  # in stacked experts wide enough for the clamp at 7
                parameter.normal_(0, 4 if name.endswith("gate_up_proj_bias") else 0.2)
        for name, buffer in model.named_buffers():
            if "e_score_correction_bias" in name:
                buffer.normal_(0, 0.1)
        if kind == "gemma3":
            # embeddings are scaled by sqrt(hidden_size) and tied, so a token would predict itself with certainty
            model.get_input_embeddings().weight.mul_(0.25)
    model.save_pretrained(directory)
    if kind == "mistral_layers":  # as it is published; transformers reads it as a ministral again
        path = directory / "config.json"
        entries = json.loads(path.read_text()) | {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
        path.write_text(json.dumps(entries))
    return directory


def make_models(kinds: Iterable[str], directory: Path) -> Path:
    """One model of each kind, by its name; `reference` and `critic` beside them, of other seeds."""
    for kind in kinds:
        make_model(kind, directory / kind)
    make_model("qwen2", directory / "reference", seed=1)
    make_model("qwen2_critic", directory / "critic", seed=2)
    return directory


def make_rows(*, seed: int = 7, vocab_size: int = VOCAB_SIZE) -> list[TrainRow]:
    """Eight rows of different lengths, rewards of both signs, some tokens not trainable."""
    draw = random.Random(seed)
    rows = []
    for index, (prompt, response) in enumerate(LENGTHS):
        mask = [1] * response
        if index % 3 == 1:
            mask[response // 2] = 0
        rows.append(
            TrainRow(
                sample_index=index,
                group_index=index // 4,
                rollout_id=0,
                tokens=[draw.randrange(vocab_size) for _ in range(prompt + response)],
                response_length=response,
                loss_mask=mask,
                rollout_log_probs=[-draw.uniform(1, 6) for _ in range(response)],
                token_policy_versions=(VersionSpan(0, 0, response),),
                reward=draw.uniform(-1.5, 1.5),
                raw_reward=draw.random(),
                status="completed",
                truncated=False,
            )
        )
    return rows


def make_plan(
    rows: list[TrainRow], *, dp_size: int, num_steps: int = 1, num_micro_batches: int = 2, empty_rank: int | None = None
) -> RoundPlan:
    """Rows dealt out in turn over ranks and micro-batches. `empty_rank` gets nothing; the others share its rows."""
    per_step = len(rows) // num_steps
    working = [rank for rank in range(dp_size) if rank != empty_rank]
    steps = []
    for step in range(num_steps):
        numbers = list(range(step * per_step, (step + 1) * per_step))
        batches: list[list[list[int]]] = [[[] for _ in range(num_micro_batches)] for _ in range(dp_size)]
        for position, row in enumerate(numbers):
            rank = working[position % len(working)]
            batches[rank][(position // len(working)) % num_micro_batches].append(row)
        steps.append(
            StepPlan(
                micro_batches=tuple(tuple(tuple(batch) for batch in rank) for rank in batches),
                num_samples=len(numbers),
                num_tokens=sum(rows[row].num_trainable for row in numbers),
            )
        )
    return RoundPlan(rollout_id=0, steps=tuple(steps))
