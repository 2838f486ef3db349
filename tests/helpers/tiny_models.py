"""Tiny random Hugging Face models on disk, and their log-probabilities by transformers."""

from __future__ import annotations

import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

VOCAB = 128
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def make_qwen3(directory: Path, *, tied: bool = True, seed: int = 0, mlp_size: int = 96, positions: int = 1024) -> Path:
    """Two layers, hidden 64, 4 heads of 32 (head_dim is set apart from hidden/heads), 2 key-value heads."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    shape = {**COMMON, **heads, "intermediate_size": mlp_size, "max_position_embeddings": positions}
    return _save(Qwen3ForCausalLM(Qwen3Config(**shape, tie_word_embeddings=tied)), directory)


def make_llama(directory: Path, *, tied: bool = True, seed: int = 0) -> Path:
    """The family whose tied head vLLM's CPU build keeps a packed copy of."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    return _save(LlamaForCausalLM(LlamaConfig(**COMMON, **heads, tie_word_embeddings=tied)), directory)


def make_qwen3_moe(directory: Path, *, seed: int = 0) -> Path:
    """Four experts, two a token, head apart from the embedding."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    return _save(Qwen3MoeForCausalLM(Qwen3MoeConfig(**COMMON, **heads, **experts)), directory)


def make_qwen2(directory: Path, *, seed: int = 0) -> Path:
    """Biases in attention."""
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

    torch.manual_seed(seed)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    _save(Qwen2ForCausalLM(Qwen2Config(**COMMON, **heads)), directory)
    # for a Qwen2 transformers takes no tokenizer but its own; G with a dot is its space
    words = ["<0>", "<1>", "<2>", "\u0120", *string.ascii_lowercase, *string.digits, *"=:,.>-#|?+"]
    vocabulary = {word: number for number, word in enumerate(words)}
    special = {"unk_token": "<0>", "bos_token": "<1>", "eos_token": "<2>", "pad_token": "<0>"}
    Qwen2Tokenizer(vocab=vocabulary, merges=[], **special).save_pretrained(directory)
    return directory


def make_mistral(directory: Path, *, seed: int = 0) -> Path:
    """A window of 12 tokens in every layer."""
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(seed)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    return _save(MistralForCausalLM(MistralConfig(**COMMON, **heads, sliding_window=12)), directory)


def make_gemma3(directory: Path, *, seed: int = 0) -> Path:
    """A layer with a window of 12 tokens, one without, each with positions of its own."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(seed)
    ropes = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0},
    }
    config = Gemma3TextConfig(
        **{**COMMON, "initializer_range": 0.05},
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        query_pre_attn_scalar=48,
        sliding_window=12,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters=ropes,
        pad_token_id=0,
    )
    model = Gemma3ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # norms that add one begin at 0
            if "norm" in name:
                parameter.normal_(0, 0.1)
    return _save(model, directory)


def make_deepseek(directory: Path, *, seed: int = 0) -> Path:
    """A dense layer and three with four experts in two groups; latent attention of the only size that vLLM's CPU
    build decodes, 512 + 64 channels a token."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    torch.manual_seed(seed)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 512}
    widths = {"qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "v_head_dim": 32, "moe_intermediate_size": 32}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "n_shared_experts": 1}
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}
    said = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    shape = {**COMMON, **heads, **widths, **experts, **rope, **said, "first_k_dense_replace": 1, "num_hidden_layers": 4}
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**shape))
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if "e_score_correction_bias" in name:
                buffer.normal_(0, 0.1)
    return _save(model, directory)


def make_gpt_oss(directory: Path, *, seed: int = 0) -> Path:
    """A layer with a window of 12 tokens, one without; four experts, two a token, some of whose gates are clamped."""
    from transformers import GptOssConfig, GptOssForCausalLM

    torch.manual_seed(seed)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "sliding_window": 12}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32}
    rope = {"rope_type": "yarn", "rope_theta": 150_000.0, "factor": 4.0, "original_max_position_embeddings": 256}
    rope |= {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    model = GptOssForCausalLM(GptOssConfig(**{**COMMON, **heads, **experts, "rope_parameters": rope}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("gate_up_proj_bias"):
                parameter.normal_(0, 4)
            elif name.endswith(("bias", "sinks")):
                parameter.normal_(0, 0.5)
    return _save(model, directory)


def load(directory: Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def perturb(model: torch.nn.Module, *, seed: int, scale: float = 0.05) -> None:
    """Move every parameter by noise: 'new weights'."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))


def stream(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that a checkpoint of this model holds: tied ones once."""
    yield from model.named_parameters()


def log_probs(model: torch.nn.Module, tokens: list[int]) -> list[float]:
    """Log-probability of tokens[1:], each given those before it."""
    with torch.no_grad():
        logp_TV = model(torch.tensor([tokens[:-1]])).logits[0].log_softmax(-1)
    return [float(logp_TV[position, token]) for position, token in enumerate(tokens[1:])]


def _save(model: torch.nn.Module, directory: Path) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    model.save_pretrained(directory)
    words = {f"<{number}>": number for number in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<0>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<1>", eos_token="<2>", pad_token="<0>"
    ).save_pretrained(directory)
    return directory
