"""The list of cases that the megatron tests run, as data: which layout, which flags, what to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.helpers import reference_policy as reference
from tests.helpers.megatron_worker import Case

KINDS = ("qwen2", "qwen2_tied", "qwen3", "llama_tied", "llama3_scaled")
TP2, PP2 = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
DISTRIBUTED = {"use_distributed_optimizer": True}
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, TP2),
    "pp2": (2, PP2),
    "dp2": (2, {}),
    "dp2-distributed": (2, DISTRIBUTED),
    "tp2-sequence": (2, {**TP2, "sequence_parallel": True}),
    "tp2-dp2": (4, TP2),
    "tp2-pp2": (4, {**TP2, **PP2}),
    "pp2-dp2-distributed": (4, {**PP2, **DISTRIBUTED}),
    "recompute": (1, RECOMPUTE),
    "recompute-attention": (1, {"recompute_granularity": "selective"}),
    "tp2-sequence-recompute": (2, {**TP2, "sequence_parallel": True, **RECOMPUTE}),
}
TIED_LAYOUTS = {"tied-pp2": (2, PP2), "tied-tp2-pp2": (4, {**TP2, **PP2})}


def all_cases(models: Path, work: Path) -> list[Case]:
    """Every case, in the order it runs. `models` holds the tiny models, `work` is for what cases write."""

    def case(name: str, do: str, world: int = 1, flags: dict[str, Any] | None = None, **arguments: Any) -> Case:
        chosen = {"hf_checkpoint": str(models / "qwen2"), **(flags or {})}
        return Case(name=name, do=do, world=world, flags=chosen, arguments=arguments)

    grpo = grpo_flags(models / "reference")
    tied = {"hf_checkpoint": str(models / "qwen2_tied"), "ref_load": str(models / "qwen3")}
    cases = [case("device", "device_layer")]
    cases += [case(f"import-{kind}", "imported", flags={"hf_checkpoint": str(models / kind)}) for kind in KINDS]
    cases += [case(f"import-{name}", "imported", world, flags) for name, (world, flags) in LAYOUTS.items()]
    cases += [case("grpo-single", "trained", flags=grpo, num_steps=2)]
    cases += [
        case(f"grpo-{name}", "trained", world, {**grpo, **flags}, num_steps=2)
        for name, (world, flags) in LAYOUTS.items()
    ]
    cases += [case("grpo-tied-single", "trained", flags={**grpo, **tied}, num_steps=2)]
    cases += [
        case(f"grpo-{name}", "trained", world, {**grpo, **tied, **flags}, num_steps=2)
        for name, (world, flags) in TIED_LAYOUTS.items()
    ]
    cases += [
        case("per-token-single", "trained", flags={**grpo, "calculate_per_token_loss": True}, num_steps=2),
        case("per-token-dp2", "trained", 2, {**grpo, "calculate_per_token_loss": True}, num_steps=2),
        case("plain-single", "trained"),
        case("empty-rank-dp2", "trained", 2, empty_rank=1),
        case("empty-batch-pp2", "trained", 2, PP2, num_micro_batches=9),
        case("bf16-single", "trained", flags={"bf16": True}, rounds=2),
        case("bf16-tp2-dp2", "trained", 4, {"bf16": True, **TP2, **DISTRIBUTED, "sequence_parallel": True}, rounds=2),
        case("schedule", "trained", flags={"lr_warmup_iters": 2, "lr_decay_style": "linear", "min_lr": 1e-4}, rounds=5),
        case(
            "vocabulary", "vocabulary_cut", 4, TP2 | {"tensor_model_parallel_size": 4}, vocab_size=97, temperature=0.7
        ),
        case("missing-rows", "failed_handoff", 2),
        case("nan-reward", "failed_round", 2, reward=float("nan")),
        case("huge-reward", "failed_round", 2, PP2, reward=1e35),
        case("saved-hf", "saved_hf", 4, {**TP2, **PP2}, directory=work / "hf"),
        case("tp3", "unbuildable", 3, {"tensor_model_parallel_size": 3}),
        case("wrong-weights", "unbuildable", flags={"hf_checkpoint": str(models / "mixed")}),
        *_checkpoint_cases(case, models, work),
    ]
    return cases


def grpo_flags(anchor: Path) -> dict[str, Any]:
    """The settings that `reference_policy` computes with; `anchor` is the reference model."""
    return {
        "use_kl_loss": True,
        "kl_loss_coef": reference.KL_COEF,
        "kl_loss_type": "k3",
        "ref_load": str(anchor),
        "entropy_coef": reference.ENTROPY_COEF,
        "rollout_temperature": reference.TEMPERATURE,
        "lr_decay_style": "cosine",
        "min_lr": reference.FINAL_LR,
        "weight_decay": reference.WEIGHT_DECAY,
    }


def _checkpoint_cases(case: Callable[..., Case], models: Path, work: Path) -> list[Case]:
    decay = {"lr_decay_style": "linear", "lr_warmup_iters": 1}
    return [
        case("resume-single", "resumed", flags=decay, directory=work / "resume-single"),
        case("resume-tp2", "resumed", 2, {**decay, **TP2}, directory=work / "resume-tp2"),
        case("resume-dp2-distributed", "resumed", 2, {**decay, **DISTRIBUTED}, directory=work / "resume-dp2"),
        case("resume-bf16", "resumed", flags={**decay, "bf16": True}, directory=work / "resume-bf16"),
        case(
            "resume-tp2-as-pp2",
            "resumed",
            2,
            {**decay, **TP2},
            directory=work / "tp2-as-pp2",
            then={**PP2, "tensor_model_parallel_size": 1},
        ),
        case(
            "resume-dp2-distributed-as-tp2",
            "resumed",
            2,
            {**decay, **DISTRIBUTED},
            directory=work / "dp2-as-tp2",
            then=TP2,
        ),
        case("missing-checkpoint", "failed", 2, method="load", argument=work / "nowhere"),
        case("save-below-a-file", "failed", 2, method="save", argument=models / "qwen2" / "config.json" / "below"),
        case("truncated-tensors", "failed_load", 2, directory=work / "cut-tensors", truncate="*.distcp"),
        case("truncated-common", "failed_load", 2, directory=work / "cut-common", truncate="common.pt"),
        case(
            "checkpoint-of-another-model",
            "failed_load",
            2,
            directory=work / "another-model",
            hf_checkpoint=str(models / "qwen3"),
        ),
        case("resume-without-optimizer", "resumed", flags={"no_save_optim": True}, directory=work / "weights-only"),
    ]
