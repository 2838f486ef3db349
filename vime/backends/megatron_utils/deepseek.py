"""What DeepSeek-V3 has beside the other families, read from config.json: latent attention, a router of groups, YaRN.

Without torch: preflight reads it too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from vime.types import ConfigError

NORM_EPSILON = 1e-6
"""transformers gives it to the norms of latents, vLLM rms_norm_eps: only where both are one number do they agree."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): keys and values are made from one short
    vector a token, and rotary positions are in channels of their own, which all heads share on the side of keys."""

    query_rank: int  # 0: queries are made from the hidden state
    key_value_rank: int
    num_plain: int  # channels of a query or key that are not rotated
    num_rotated: int
    num_values: int  # channels of a value

    @property
    def num_query(self) -> int:
        return self.num_plain + self.num_rotated


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRouter:
    """Experts by the sigmoid of their logits plus a bias that is not learned, from the best groups; their weights are
    the sigmoids, divided by their sum (DeepSeek-V3, arXiv 2412.19437, section 2.1.2)."""

    num_groups: int  # 1: any expert
    groups_per_token: int
    scale: float  # of the weights
    shared_size: int  # columns of the MLP that every token goes through
    num_dense_layers: int  # the first ones have a plain MLP


@dataclass(frozen=True, slots=True, kw_only=True)
class Yarn:
    """Positions of channels that turn slowly are divided by `factor` (Peng et al. 2023, arXiv 2309.00071)."""

    factor: float
    num_positions: int  # that the model was trained on before
    beta_fast: float
    beta_slow: float
    is_rounded: bool = True  # the channels between which the division begins

    def shares(self, theta: float, channels: int) -> list[float]:
        """How much of each pair of channels is divided, 0 to 1."""

        def channel(turns: float) -> float:
            return channels * math.log(self.num_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))

        first, last = channel(self.beta_fast), channel(self.beta_slow)
        if self.is_rounded:
            first, last = math.floor(first), math.ceil(last)
        low, high = max(first, 0), min(last, channels - 1)
        width = high - low or 0.001
        return [min(max((number - low) / width, 0.0), 1.0) for number in range(channels // 2)]


def latent_of(record: Mapping[str, object], where: str) -> Latent:
    heads, of_keys = record.get("num_attention_heads"), record.get("num_key_value_heads")
    if heads != of_keys:
        raise ConfigError(
            f"{where}: config.json has num_key_value_heads={of_keys!r} and num_attention_heads={heads!r}; with latent "
            "attention both are the same number. Correct it, or use another model."
        )
    return Latent(
        query_rank=_whole(record, "q_lora_rank", where) if record.get("q_lora_rank") is not None else 0,
        key_value_rank=_whole(record, "kv_lora_rank", where),
        num_plain=_whole(record, "qk_nope_head_dim", where),
        num_rotated=_whole(record, "qk_rope_head_dim", where),
        num_values=_whole(record, "v_head_dim", where),
    )


def router_of(record: Mapping[str, object], where: str) -> GroupRouter:
    chosen, groups = _whole(record, "num_experts_per_tok", where), _whole(record, "n_group", where)
    groups_per_token, dense = _whole(record, "topk_group", where), record.get("first_k_dense_replace")
    scale, layers = record.get("routed_scaling_factor"), _whole(record, "num_hidden_layers", where)
    if groups > 1 and chosen != 2 * groups_per_token:
        raise ConfigError(
            f"{where}: config.json has num_experts_per_tok={chosen} and topk_group={groups_per_token}: a group counts "
            "by its two best experts, and megatron-core takes as many as a group gets on average. Expected twice as "
            "many experts as groups, or n_group 1. Use another model."
        )
    if type(dense) is not int or not 0 <= dense < layers:
        raise ConfigError(
            f"{where}: config.json has first_k_dense_replace={dense!r}, expected 0 to {layers - 1}. Use another model."
        )
    if not isinstance(scale, int | float) or scale <= 0:
        raise ConfigError(
            f"{where}: config.json has routed_scaling_factor={scale!r}, expected a number above 0. Add it."
        )
    return GroupRouter(
        num_groups=groups,
        groups_per_token=groups_per_token,
        scale=float(scale),
        shared_size=_whole(record, "moe_intermediate_size", where) * _whole(record, "n_shared_experts", where),
        num_dense_layers=dense,
    )


def yarn_of(parameters: Mapping[str, object], where: str) -> tuple[Yarn, float]:
    """Return it, and what the scale of attention is multiplied by."""
    factor, positions = parameters.get("factor"), parameters.get("original_max_position_embeddings")
    scale, scale_of_all = parameters.get("mscale"), parameters.get("mscale_all_dim")
    fast, slow = parameters.get("beta_fast") or 32, parameters.get("beta_slow") or 1
    if (
        not all(isinstance(value, int | float) for value in (factor, positions, fast, slow, scale))
        or scale != scale_of_all
        or parameters.get("attention_factor") is not None
    ):
        raise ConfigError(
            f"{where}: rotary scaling 'yarn' with {dict(parameters)} is not supported. Expected factor, "
            "original_max_position_embeddings, and mscale equal to mscale_all_dim, as DeepSeek-V3 has them. Use "
            "another model."
        )
    assert isinstance(factor, int | float)
    assert isinstance(positions, int | float)
    assert isinstance(scale, int | float)
    assert isinstance(fast, int | float)
    assert isinstance(slow, int | float)
    yarn = Yarn(factor=float(factor), num_positions=int(positions), beta_fast=float(fast), beta_slow=float(slow))
    return yarn, (0.1 * scale * math.log(factor) + 1.0) ** 2 if factor > 1 else 1.0


def stretched_yarn_of(parameters: Mapping[str, object], where: str) -> tuple[Yarn, float]:
    """Return GPT-OSS's, and what cos and sin are multiplied by: 0.1 ln(factor) + 1, as the paper has it."""
    names = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow")
    factor, positions, fast, slow = (parameters.get(name) for name in names)
    rounded, other = parameters.get("truncate", True), {"attention_factor", "mscale", "mscale_all_dim"}
    if (
        not (isinstance(factor, int | float) and isinstance(positions, int | float))
        or not (isinstance(fast, int | float) and isinstance(slow, int | float))
        or not isinstance(rounded, bool)
        or parameters.get("rope_type") != "yarn"
        or any(parameters.get(name) is not None for name in other)
    ):
        raise ConfigError(
            f"{where}: rotary scaling with {dict(parameters)} is not supported for gpt_oss. Expected rope_type yarn "
            f"with {', '.join(names)}, and none of {', '.join(sorted(other))}: vLLM computes no other. Use another "
            "model."
        )
    yarn = Yarn(
        factor=float(factor),
        num_positions=int(positions),
        beta_fast=float(fast),
        beta_slow=float(slow),
        is_rounded=rounded,
    )
    return yarn, 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0


def _whole(record: Mapping[str, object], name: str, where: str) -> int:
    value = record.get(name)
    if type(value) is not int or value <= 0:
        raise ConfigError(f"{where}: config.json has {name}={value!r}, expected a whole number above 0. Add it.")
    return value
