"""What an HF config says about the model, in plain numbers; models that would train wrongly are refused here.

Refusing is the point: with a rotary scaling, an attention bias or a sliding window silently dropped a model still
trains, but its log-probabilities differ from the engine's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypedDict

from vime.backends.megatron_utils.deepseek import (
    NORM_EPSILON,
    GroupRouter,
    Latent,
    Yarn,
    latent_of,
    router_of,
    stretched_yarn_of,
    yarn_of,
)
from vime.config.hf_config import ModelShape, read_record, shape_of
from vime.types import ConfigError
from vime.utils.imports import MODELS_OF_TRANSFORMERS, without, without_collector

SUPPORTED_MODEL_TYPES = ("deepseek_v3", "gemma3_text", "gpt_oss", "llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
_DELTA = (
    "It has gated delta-net layers: megatron-core 0.16 and 0.17 compute no packed sequences there, 0.18 is the first "
    "that does (for Python 3.12 and later)."
)
_SOFTMAX = (
    "It has a router of groups with a softmax: megatron-core 0.16 has it, Vime has deepseek_v3 alone, whose router "
    "takes a sigmoid."
)
LACKING = {
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), _DELTA),
    "deepseek_v2": _SOFTMAX,
    "gemma3": "It has images too: only Gemma 3's text model, model_type gemma3_text, is trained.",
}
"""What a family has that the trainer lacks, by model_type."""
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""megatron-core has these numbers of Llama 3 built in; only `factor` is free."""

NUMBERS: dict[str, type] = {
    **dict.fromkeys(("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads"), int),
    **dict.fromkeys(("num_key_value_heads", "vocab_size", "max_position_embeddings"), int),
    "rms_norm_eps": float,
    "tie_word_embeddings": bool,
}
NUMBERS_OF: dict[str, dict[str, type]] = {
    "llama": {**NUMBERS, "head_dim": int},
    "qwen2": NUMBERS,
    "qwen3": {**NUMBERS, "head_dim": int},
    "mistral": {**NUMBERS, "head_dim": int},
}
"""The entries that `read_architecture` reads, with their types in a config.json that needs no defaults from
transformers. A model with experts always needs them: transformers renames its entries. So does Gemma 3, which leaves
much to its class."""

SAID_TO_VLLM = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
"""Of DeepSeek-V3's router: transformers knows no other, but vLLM takes a softmax without these entries, and no bias."""

COMPUTED: dict[str, object] = {
    **dict.fromkeys(("attention_bias", "mlp_bias", "use_sliding_window"), False),
    "hidden_act": "silu",
    "attention_dropout": 0.0,
    "partial_rotary_factor": 1.0,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "llama_4_scaling": None,
}
COMPUTED_OF: dict[str, dict[str, object]] = {
    "llama": {"sliding_window": None},  # transformers ignores it, vLLM does not
    "deepseek_v3": {
        "norm_topk_prob": True,
        "rope_interleave": True,
        "rms_norm_eps": NORM_EPSILON,
        **SAID_TO_VLLM,
        "moe_layer_freq": 1,
        "ep_size": 1,
    },
    "gpt_oss": {
        "attention_bias": True,
        "rms_norm_eps": 1e-5,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
    },  # vLLM has them all built in
    "gemma3_text": {
        "hidden_act": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "use_bidirectional_attention": False,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    },
}
"""Entries of config.json that change log-probabilities, and the one value of each that the trainer computes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture(ModelShape):
    """A decoder with RMSNorm, rotary positions, grouped-query attention and a gated MLP, or experts that are such:
    each token goes to `num_experts_per_token` of them, weighted by a softmax of the router's logits."""

    norm_epsilon: float
    rope_theta: float
    rope_llama3_factor: float | None  # None: positions are not scaled so
    rope_linear_factor: float | None = None  # positions are divided by it
    window_rope_theta: float | None = None  # of layers with a window, never scaled; None: as the others
    is_tied: bool  # one matrix embeds tokens and makes logits
    has_qkv_bias: bool
    has_qk_norm: bool
    normalizes_chosen: bool  # the weights of the chosen experts sum to 1: the softmax runs over these only
    is_gelu: bool = False  # the gate of the MLP is gelu by its tanh formula, else silu
    norms_add_one: bool = False  # a norm multiplies by 1 + weight
    has_sandwich_norms: bool = False  # what attention and MLP give is normalised before it is added
    embedding_scale: float | None = None  # embeddings are multiplied by it
    attention_scale: float | None = None  # of queries times keys; None: 1 / sqrt(head_dim)
    rope_yarn: Yarn | None = None
    rope_scale: float = 1.0  # of cos and sin
    latent: Latent | None = None
    router: GroupRouter | None = None  # None: the softmax of the logits
    has_sinks: bool = False  # GPT-OSS's layers: attention sinks, biases everywhere, stacked experts
    has_value_head: bool = False  # a critic: one number a token instead of logits


def read_architecture(directory: str, *, flag: str = "--hf-checkpoint") -> Architecture:
    """Read DIRECTORY/config.json; ConfigError for a model this trainer cannot compute exactly."""
    where, record = f"{flag} {directory}", read_record(directory, flag=flag)
    model_type = record.get("model_type")
    if model_type not in SUPPORTED_MODEL_TYPES:
        lacking = LACKING.get(str(model_type), "")
        raise ConfigError(
            f"{where}: model_type {model_type!r} is not supported by the trainer. {lacking and lacking + ' '}"
            f"Expected one of {', '.join(SUPPORTED_MODEL_TYPES)}. Choose such a model."
        )
    quantized = record.get("quantization_config")
    if quantized:
        method = quantized.get("quant_method") if isinstance(quantized, dict) else quantized
        raise ConfigError(
            f"{where}: config.json has a quantization_config ({method!r}): quantised weights are not trained. Expected "
            "a checkpoint in bf16 or fp32. Load it with transformers dequantised (for mxfp4: "
            "quantization_config=Mxfp4Config(dequantize=True)), write it with save_pretrained, and give that directory."
        )
    if not is_complete(record):
        # with layer_types transformers calls a mistral ministral, which vLLM has under the first name only
        record = {**_completed(directory), "model_type": model_type}
    _refuse_unsupported(record, where)
    is_gemma = model_type == "gemma3_text"
    if model_type == "deepseek_v3":
        return _deepseek(record, where)
    if model_type == "gpt_oss":
        return _gpt_oss(record, where)
    rope = _ropes_by_layer(record, where) if is_gemma else _rope(record.get("rope_parameters"), where)
    epsilon = record["rms_norm_eps"]
    if not isinstance(epsilon, int | float):
        raise ConfigError(f"{where}: config.json has rms_norm_eps={epsilon!r}, expected a number.")
    shape = shape_of(record, where)
    return Architecture(
        **asdict(shape),
        **rope,
        norm_epsilon=epsilon,
        is_tied=bool(record["tie_word_embeddings"]),
        has_qkv_bias=model_type == "qwen2",
        has_qk_norm=is_gemma or model_type in ("qwen3", "qwen3_moe"),
        normalizes_chosen=bool(record.get("norm_topk_prob", True)),
        is_gelu=is_gemma,
        norms_add_one=is_gemma,
        has_sandwich_norms=is_gemma,
        embedding_scale=shape.hidden_size**0.5 if is_gemma else None,
        attention_scale=_positive(record, "query_pre_attn_scalar", where) ** -0.5 if is_gemma else None,
    )


def _deepseek(record: dict[str, object], where: str) -> Architecture:
    """`record` has passed `_refuse_unsupported`."""
    unsaid = [f"{name}={value!r}" for name, value in SAID_TO_VLLM.items() if record.get(name) is None]
    if unsaid:
        raise ConfigError(
            f"{where}: config.json has no {' and no '.join(unsaid)}: without it vLLM routes tokens in another way than "
            "the trainer. Expected both, as in DeepSeek's own files; transformers leaves them out. Add them."
        )
    latent, router = latent_of(record, where), router_of(record, where)
    said = record.get("rope_parameters")
    parameters: dict[str, object] = dict(said) if isinstance(said, Mapping) else {}
    yarn, scale = None, 1.0
    if parameters.get("rope_type") == "yarn":
        yarn, scale = yarn_of(parameters, where)
        parameters = {"rope_theta": parameters.get("rope_theta")}
    rope = _rope(parameters, where)
    if rope["rope_llama3_factor"] is not None:
        raise ConfigError(f"{where}: rotary scaling 'llama3' is not supported for deepseek_v3. Expected none, or yarn.")
    return Architecture(
        **{**asdict(shape_of(record, where)), "head_dim": latent.num_rotated},
        **rope,
        norm_epsilon=NORM_EPSILON,
        is_tied=bool(record["tie_word_embeddings"]),
        has_qkv_bias=False,
        has_qk_norm=False,
        normalizes_chosen=True,
        attention_scale=scale * latent.num_query**-0.5,
        rope_yarn=yarn,
        latent=latent,
        router=router,
    )


def _gpt_oss(record: dict[str, object], where: str) -> Architecture:
    """`record` has passed `_refuse_unsupported`."""
    kinds, window = record.get("layer_types"), record.get("sliding_window")
    expected = ["full_attention" if number % 2 else "sliding_attention" for number in range(_layers(record))]
    if kinds != expected or type(window) is not int or window <= 0:
        raise ConfigError(
            f"{where}: config.json has sliding_window={window!r} with layer_types {kinds}; expected a window above 0 "
            "in the first layer and every other one, which is built into vLLM. Use another model."
        )
    said = record.get("rope_parameters")
    parameters: dict[str, object] = dict(said) if isinstance(said, Mapping) else {}
    yarn, scale = stretched_yarn_of(parameters, where)
    rope = _rope({"rope_theta": parameters.get("rope_theta")}, where)
    return Architecture(
        **asdict(shape_of(record, where)),
        **rope,
        norm_epsilon=1e-5,
        is_tied=False,
        has_qkv_bias=True,
        has_qk_norm=False,
        normalizes_chosen=True,
        rope_yarn=yarn,
        rope_scale=scale,
        has_sinks=True,
    )


def _layers(record: dict[str, object]) -> int:
    count = record.get("num_hidden_layers")
    return count if isinstance(count, int) else 0


def check_implementation(architecture: Architecture, implementation: str, where: str) -> None:
    """Refuse a model whose layers only --transformer-impl local is made of."""
    is_plain = not architecture.window_layers and not architecture.has_sandwich_norms and architecture.latent is None
    is_plain = is_plain and not architecture.has_sinks
    if implementation != "local" and not is_plain:
        raise ConfigError(
            f"{where}: model_type {architecture.model_type} with --transformer-impl {implementation}: sliding windows, "
            "Gemma's norms, attention sinks and latent attention are there in Vime's own layers only. Expected "
            "--transformer-impl local. Use it."
        )


def is_complete(entries: dict[str, object]) -> bool:
    """Whether the config.json of a supported model has by itself everything that is read here, as transformers writes
    it since 5.0. Then transformers, which imports torch, is not needed: 3 CPU s before a run begins, and 1.5 in each
    trainer.

    What is missing, spelled as before 5.0 or of another type is left to transformers, which knows each model's
    defaults. Of entries that some models do not have, every default is the value that is expected.
    """
    kinds = NUMBERS_OF.get(str(entries["model_type"]))
    if kinds is None:
        return False
    rope, heads, hidden = (entries.get(name) for name in ("rope_parameters", "num_attention_heads", "hidden_size"))
    if entries["model_type"] == "mistral" and "sliding_window" not in entries:
        return False  # its class has one
    return (
        str(entries.get("transformers_version", "")).startswith("5.")
        and all(type(entries.get(name)) is kind for name, kind in kinds.items())
        and isinstance(heads, int)
        and isinstance(hidden, int)
        and heads > 0
        and hidden % heads == 0
        and isinstance(rope, dict)
        and rope.keys() == {"rope_theta", "rope_type"}
        and rope["rope_type"] == "default"
    )


def _completed(directory: str) -> dict[str, object]:
    with without(MODELS_OF_TRANSFORMERS), without_collector():
        from transformers import AutoConfig

        return dict(AutoConfig.from_pretrained(str(Path(directory).expanduser()), local_files_only=True).to_dict())


def as_critic(architecture: Architecture) -> Architecture:
    """Return the same transformer with a value head, so nothing is tied to the embedding."""
    return replace(architecture, is_tied=False, has_value_head=True)


def _refuse_unsupported(record: dict[str, object], where: str) -> None:
    model_type = str(record["model_type"])
    if model_type in ("mistral", "gemma3_text"):
        _refuse_windows(record, where)
    for name, expected in {**COMPUTED, **COMPUTED_OF.get(model_type, {})}.items():
        got = record.get(name)  # some model types do not have it
        if got not in (None, expected):
            raise ConfigError(
                f"{where}: config.json has {name}={got!r}; the trainer computes {name}={expected!r} only, so its "
                "log-probabilities would differ from the engine's. Use another model."
            )


def _refuse_windows(record: dict[str, object], where: str) -> None:
    window, kinds = record.get("sliding_window"), record.get("layer_types")
    named = {str(kind) for kind in kinds} if isinstance(kinds, list) else set()
    if window is not None and (type(window) is not int or window <= 0):
        raise ConfigError(
            f"{where}: config.json has sliding_window={window!r}, expected null or a number of tokens above 0. Write "
            "null for a model without a window."
        )
    expected = {"full_attention", "sliding_attention"} if window else {"full_attention"}
    if not named <= expected:
        raise ConfigError(
            f"{where}: config.json has sliding_window={window!r} with layer_types {', '.join(sorted(named))}; expected "
            f"{' or '.join(sorted(expected))}: the trainer computes no others. Use another model."
        )


def _positive(record: dict[str, object], name: str, where: str) -> float:
    value = record.get(name)
    if not isinstance(value, int | float) or value <= 0:
        raise ConfigError(f"{where}: config.json has {name}={value!r}, expected a number above 0. Add it.")
    return float(value)


class Rope(TypedDict, total=False):
    """The fields of `Architecture` that say how positions are rotated."""

    rope_theta: float
    rope_llama3_factor: float | None
    rope_linear_factor: float | None
    window_rope_theta: float | None


def _ropes_by_layer(record: dict[str, object], where: str) -> Rope:
    """Gemma's: layers with a window have a theta of their own, the others may divide positions by a factor."""
    said = record.get("rope_parameters")
    by_kind: Mapping[str, object] = said if isinstance(said, Mapping) else {}
    seen = by_kind.get("full_attention")
    parameters: dict[str, object] = dict(seen) if isinstance(seen, Mapping) else {}
    linear = None
    if parameters.get("rope_type") == "linear":
        linear = _positive(parameters, "factor", f"{where}, rope_parameters")
        parameters = {"rope_theta": parameters.get("rope_theta")}
    window = _rope(by_kind.get("sliding_attention"), f"{where}, sliding_attention")
    rope = _rope(parameters, where)
    if window["rope_llama3_factor"] is not None or rope["rope_llama3_factor"] is not None:
        raise ConfigError(
            f"{where}: rotary scaling 'llama3' is not supported for model_type gemma3_text. Expected none, or linear "
            "for full_attention. Use another model."
        )
    return {**rope, "rope_linear_factor": linear, "window_rope_theta": window["rope_theta"]}


def _rope(said: object, where: str) -> Rope:
    """transformers 5 gathers theta and scaling in `rope_parameters`."""
    parameters: dict[str, object] = dict(said) if isinstance(said, Mapping) else {}
    theta, kind = parameters.pop("rope_theta", None), parameters.pop("rope_type", "default")
    if not isinstance(theta, int | float):
        raise ConfigError(f"{where}: config.json names no rope_theta. Expected a number; add it.")
    if kind == "default":
        return {"rope_theta": float(theta), "rope_llama3_factor": None}
    factor = parameters.pop("factor", None)
    if kind == "llama3" and isinstance(factor, int | float) and parameters == LLAMA3_ROPE:
        return {"rope_theta": float(theta), "rope_llama3_factor": float(factor)}
    raise ConfigError(
        f"{where}: rotary scaling {kind!r} with {parameters} is not supported. Expected none, or llama3 with "
        f"{LLAMA3_ROPE} and any factor. Use another model."
    )
