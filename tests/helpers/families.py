"""The model families that tests show, as data: what the tests run over, and what the table in README.md says.

A row claims a layout only if `test_megatron_families` or `test_fsdp_engine` compares it with transformers, and an
engine only if `test_trained_export` asks it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.helpers import tiny_models
from tests.helpers.fsdp_cases import FAMILIES as FSDP_FAMILIES
from tests.helpers.fsdp_cases import WORLDS as FSDP_WORLDS
from tests.helpers.megatron_cases import GROUPED_LAYOUTS, LAYOUTS, MOE_LAYOUTS, grpo_flags
from tests.helpers.megatron_worker import Case

FAMILY_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {}), **MOE_LAYOUTS, **GROUPED_LAYOUTS, **LAYOUTS
}  # fmt: skip
DAY, NIGHT = ("tp2-sequence", "pp2"), ("single", "tp2", "cp2", "tp2-pp2", "vpp2", "dp2-distributed", "recompute")
MOE_DAY, MOE_NIGHT = ("ep2-tp2", "pp2"), ("single", "tp2-sequence", "ep2", "ep2-cp2", "ep2-pp2", "ep4-distributed")
EXPORTS: dict[str, Callable[[Path], Path]] = {
    "tied": tiny_models.make_qwen3,
    "untied": lambda directory: tiny_models.make_qwen3(directory, tied=False),
    "experts": tiny_models.make_qwen3_moe,
    "mistral": tiny_models.make_mistral,
    "gemma3": tiny_models.make_gemma3,
    "llama": tiny_models.make_llama,
    "qwen2": tiny_models.make_qwen2,
    "deepseek": tiny_models.make_deepseek,
    "gpt_oss": tiny_models.make_gpt_oss,
}
"""Models that are trained, exported and loaded by vLLM."""
EXPORTS_BY_NIGHT = ("llama", "qwen2", "deepseek", "gpt_oss")
TP2, EP2 = ("--tensor-model-parallel-size", "2"), ("--expert-model-parallel-size", "2")
PP2 = ("--pipeline-model-parallel-size", "2")
RUNS: dict[str, tuple[str, ...]] = {
    "experts": EP2, "mistral": TP2, "gemma3": TP2, "llama": TP2, "qwen2": PP2,
    "gpt_oss": EP2, "deepseek": EP2,
}  # fmt: skip
"""Exports that `test_family_run` trains for three rounds on real vLLM, and the flags of the layout."""
RUNS_BY_DAY = ("tied",)
"""The quick start's kind of model, which `test_training` and others of tests/e2e/run train."""


TITLES = {
    "gpt_neox": "GPT-NeoX",
    "gemma": "Gemma",
    "gemma2": "Gemma 2",
    "mistral": "Mistral",
    "qwen3_moe": "Qwen3-MoE",
}


@dataclass(frozen=True, kw_only=True)
class Family:
    """One row under --train-backend megatron."""

    title: str
    model_types: tuple[str, ...]
    models: tuple[str, ...]  # of `megatron_models.make_model`; the first is tried by day
    day: tuple[str, ...] = DAY
    night: tuple[str, ...] = NIGHT
    exports: tuple[str, ...]
    anchor: str = "reference"  # the model of the loss's KL term; one with experts where experts are spread


MEGATRON = (
    Family(title="Qwen2, Qwen2.5", model_types=("qwen2",), models=("qwen2", "qwen2_tied"), exports=("qwen2",)),
    Family(title="Qwen3", model_types=("qwen3",), models=("qwen3",), exports=("tied", "untied")),
    Family(
        title="Qwen3-MoE",
        model_types=("qwen3_moe",),
        models=("qwen3_moe", "qwen3_moe_tied"),
        day=MOE_DAY,
        night=MOE_NIGHT,
        exports=("experts",),
        anchor="qwen3_moe_tied",
    ),
    Family(title="Llama, SmolLM2", model_types=("llama",), models=("llama_tied", "llama3_scaled"), exports=("llama",)),
    Family(
        title="Mistral",
        model_types=("mistral",),
        models=("mistral", "mistral_full", "mistral_layers"),
        exports=("mistral",),
    ),
    Family(
        title="DeepSeek-V3 (latent attention)",
        model_types=("deepseek_v3",),
        models=("deepseek", "deepseek_yarn"),
        day=MOE_DAY,
        night=(*MOE_NIGHT, "ep2-tp2-grouped"),
        exports=("deepseek",),
        anchor="qwen3_moe_tied",
    ),
    Family(
        title="GPT-OSS (attention sinks)",
        model_types=("gpt_oss",),
        models=("gpt_oss",),
        day=(*MOE_DAY, "tp2-sequence"),
        night=("single", "ep2-cp2"),
        exports=("gpt_oss",),
        anchor="qwen3_moe_tied",
    ),
    Family(title="Gemma 3 (text)", model_types=("gemma3_text",), models=("gemma3",), exports=("gemma3",)),
)


FSDP = {TITLES[kind]: FSDP_WORLDS for kind in FSDP_FAMILIES}
"""Rows under --train-backend fsdp: title -> numbers of ranks."""


def shown_cases() -> dict[str, tuple[Family, str, str, bool]]:
    """Name -> (family, model, layout, whether it is tried by night only)."""
    return {
        f"{model}-{layout}": (family, model, layout, layout in family.night or model != family.models[0])
        for family in MEGATRON
        for model in family.models
        for layout in (*family.day, *family.night)
    }


def family_cases(models: Path, *, is_night: bool) -> list[Case]:
    """A round of two steps of each model in its layouts."""
    cases = []
    for name, (family, model, layout, is_for_the_night) in shown_cases().items():
        if is_for_the_night and not is_night:
            continue
        world, flags = FAMILY_LAYOUTS[layout]
        chosen = {**grpo_flags(models / family.anchor), "hf_checkpoint": str(models / model), **flags}
        cases.append(Case(name=name, do="shown", world=world, flags=chosen))
    return cases
