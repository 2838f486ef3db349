"""The cases that the megatron tests run, a list for each launch, as data: which layout, which flags, what to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.helpers import reference_policy as reference
from tests.helpers.megatron_worker import Case

KINDS = (
    "qwen2", "qwen2_tied", "qwen3", "qwen3_moe", "qwen3_moe_tied", "llama_tied", "llama3_scaled", "mistral",
    "mistral_full", "mistral_layers", "gemma3", "deepseek", "deepseek_yarn", "gpt_oss",
)  # fmt: skip
TP2, PP2 = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
CP2, CP4 = {"context_parallel_size": 2}, {"context_parallel_size": 4}
SP2 = {**TP2, "sequence_parallel": True}
VPP2 = {**PP2, "virtual_pipeline_model_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2}
OVERLAP = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
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
    "cp2": (2, CP2),
    "cp4": (4, CP4),
    "tp2-cp2-sequence": (4, {**SP2, **CP2}),
    "pp2-cp2": (4, {**PP2, **CP2}),
    "cp2-dp2-distributed": (4, {**CP2, **DISTRIBUTED}),
    "cp2-recompute": (2, {**CP2, **RECOMPUTE}),
    "vpp2": (2, VPP2),
    "tp2-vpp2-sequence": (4, {**SP2, **VPP2}),
    "dp2-overlap": (2, OVERLAP),
    "dp2-overlap-reduce": (2, {"overlap_grad_reduce": True}),
    "vpp2-dp2-overlap": (4, {**VPP2, **OVERLAP}),
}
ONEDNN_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {"single": (1, {}), "tp2": (2, TP2)}
CHUNK_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {}),
    "tp2-sequence": (2, {**TP2, "sequence_parallel": True}),
    "tp2-pp2": (4, {**TP2, **PP2}),
    "cp2-dp2-distributed": (4, {**CP2, **DISTRIBUTED}),
    "dp2-overlap": (2, OVERLAP),
    "recompute": (1, RECOMPUTE),
}
SHARED_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {"single": (1, {}), "tp2": (2, TP2), "dp2": (2, {})}
TIED_LAYOUTS = {"tied-pp2": (2, PP2), "tied-tp2-pp2": (4, {**TP2, **PP2}), "tied-vpp2-cp2": (4, {**VPP2, **CP2})}
MOE_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2": (2, {}),
    "ep2": (2, EP2),
    "tp2-sequence": (2, SP2),
    "ep2-tp2": (4, {**EP2, **SP2}),
    "ep2-tp2-whole-experts": (2, {**EP2, **SP2, "expert_tensor_parallel_size": 1}),
    "ep2-cp2": (2, {**EP2, **CP2}),
    "ep2-pp2": (4, {**EP2, **PP2}),
    "ep4-distributed": (4, {"expert_model_parallel_size": 4, **DISTRIBUTED}),
    "ep2-dp4-overlap": (4, {**EP2, **OVERLAP}),
}
GROUPED = {"moe_grouped_gemm": True}
GROUPED_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ep2-tp2-grouped": (4, {**EP2, **SP2, **GROUPED}),
    "dp2-grouped-overlap": (2, {**OVERLAP, **GROUPED}),
}
"""The experts of a rank in one product."""
REPLAY_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "recompute": (1, RECOMPUTE),
    "tp2-sequence": (2, SP2),
    "ep2-cp2": (2, {**EP2, **CP2}),
    "ep2-pp2-recompute": (4, {**EP2, **PP2, **RECOMPUTE}),
    "vpp2-cp2": (4, {**VPP2, **CP2}),
}
TIED_MOE_LAYOUTS = {"moe-tied-ep2-vpp2": (4, {**EP2, **VPP2})}
FOR_THE_NIGHT = {
    "grpo-tp2-pp2": "grpo-tp2-vpp2-sequence",
    "grpo-cp4": "grpo-cp2, grpo-tp2-cp2-sequence",
    "grpo-dp2-overlap-reduce": "grpo-dp2-overlap",
    "grpo-chunks-tp2-pp2": "grpo-chunks-tp2-sequence",
    "grpo-tied-tp2-pp2": "grpo-tied-pp2, grpo-tied-vpp2-cp2",
    "grpo-moe-ep4-distributed": "grpo-moe-ep2-dp4-overlap",
    "grpo-moe-ep2-pp2": "grpo-moe-tied-ep2-vpp2",
}
"""Cases of `layout_cases` that only scripts/nightly.sh tries, each with those of the usual session that cut weights and
tokens in the same ways."""


def cuts(layouts: dict[str, tuple[int, dict[str, Any]]]) -> dict[str, tuple[int, dict[str, Any]]]:
    """Those that differ in where weights and tokens lie, not only in when something is computed."""
    return {name: layout for name, layout in layouts.items() if "recompute" not in name and "overlap" not in name}


CaseMaker = Callable[..., Case]


def maker(models: Path) -> CaseMaker:
    """Cases of the dense model, where their flags do not name another."""

    def case(name: str, do: str, world: int = 1, flags: dict[str, Any] | None = None, **arguments: Any) -> Case:
        chosen = {"hf_checkpoint": str(models / "qwen2"), **(flags or {})}
        return Case(name=name, do=do, world=world, flags=chosen, arguments=arguments)

    return case


def pairs(models: Path) -> dict[str, dict[str, Any]]:
    """Policy and reference model of each kind that layouts are tried on."""
    named = {
        "tied": ("qwen2_tied", "qwen3"),
        "moe": ("qwen3_moe", "qwen3_moe_tied"),
        "moe-tied": ("qwen3_moe_tied", "qwen3_moe"),
    }
    return {
        name: {"hf_checkpoint": str(models / policy), "ref_load": str(models / anchor)}
        for name, (policy, anchor) in named.items()
    }


def import_cases(models: Path, work: Path) -> list[Case]:
    """HF weights in and out. The first case looks at a process that has no trainer yet."""
    case, moe = maker(models), pairs(models)["moe"]
    return [
        case("device", "device_layer"),
        *(case(f"import-{kind}", "imported", flags={"hf_checkpoint": str(models / kind)}) for kind in KINDS),
        *(case(f"import-{name}", "imported", world, flags) for name, (world, flags) in cuts(LAYOUTS).items()),
        *(
            case(f"import-moe-{name}", "imported", world, {**moe, **flags})
            for name, (world, flags) in cuts(MOE_LAYOUTS).items()
        ),
        case(
            "vocabulary", "vocabulary_cut", 4, TP2 | {"tensor_model_parallel_size": 4}, vocab_size=97, temperature=0.7
        ),
        case("saved-hf", "saved_hf", 4, {**TP2, **PP2}, directory=work / "hf"),
        case("saved-moe-hf", "saved_hf", 4, {**moe, **EP2, **PP2}, directory=work / "moe-hf"),
        case("experts-of-a-dense-model", "unbuildable", 2, EP2),
        case("tp3", "unbuildable", 3, {"tensor_model_parallel_size": 3}),
        case("wrong-weights", "unbuildable", flags={"hf_checkpoint": str(models / "mixed")}),
    ]


def layout_cases(models: Path, *, is_night: bool) -> list[Case]:
    """Rounds of training in every layout."""
    return [case for case in _every_layout_case(models) if is_night or case.name not in FOR_THE_NIGHT]


def _every_layout_case(models: Path) -> list[Case]:
    case, grpo, kinds = maker(models), grpo_flags(models / "reference"), pairs(models)
    moe = kinds["moe"]

    def rounds(prefix: str, layouts: dict[str, tuple[int, dict[str, Any]]], kind: dict[str, Any]) -> list[Case]:
        return [
            case(f"grpo-{prefix}{name}", "trained", world, {**grpo, **kind, **flags}, num_steps=2)
            for name, (world, flags) in layouts.items()
        ]

    alone: dict[str, tuple[int, dict[str, Any]]] = {"single": (1, {})}
    return [
        *rounds("", alone | LAYOUTS, {}),
        *(
            case(f"grpo-onednn-{name}", "trained_by_onednn", world, {**grpo, **flags}, num_steps=2)
            for name, (world, flags) in ONEDNN_LAYOUTS.items()
        ),
        *(
            case(f"grpo-chunks-{name}", "trained_in_chunks", world, {**grpo, **flags}, num_steps=2)
            for name, (world, flags) in CHUNK_LAYOUTS.items()
        ),
        case("grpo-chunks-tied", "trained_in_chunks", flags={**grpo, **kinds["tied"]}, num_steps=2),
        case("grpo-chunks-moe-ep2", "trained_in_chunks", 2, {**grpo, **moe, **EP2}, num_steps=2),
        *(
            case(f"groups-shared-{name}", "trained_in_groups", world, {**grpo, **flags}, is_shared=True, num_steps=2)
            for name, (world, flags) in SHARED_LAYOUTS.items()
        ),
        case("groups-copied", "trained_in_groups", flags=grpo, is_shared=False, num_steps=2),
        case("groups-shared-moe", "trained_in_groups", flags={**grpo, **moe}, is_shared=True, num_steps=2),
        case("groups-copied-moe", "trained_in_groups", flags={**grpo, **moe}, is_shared=False, num_steps=2),
        *rounds("tied-", alone, kinds["tied"]),
        *rounds("", TIED_LAYOUTS, kinds["tied"]),
        *rounds("moe-", alone | MOE_LAYOUTS | GROUPED_LAYOUTS, moe),
        *rounds("moe-tied-", alone, kinds["moe-tied"]),
        *rounds("", TIED_MOE_LAYOUTS, kinds["moe-tied"]),
        case("per-token-single", "trained", flags={**grpo, "calculate_per_token_loss": True}, num_steps=2),
        case("per-token-dp2", "trained", 2, {**grpo, "calculate_per_token_loss": True}, num_steps=2),
        case("plain-single", "trained"),
        case("empty-rank-dp2", "trained", 2, empty_rank=1),
        case("empty-batch-pp2", "trained", 2, PP2, num_micro_batches=9),
        case("empty-batch-vpp2-cp2", "trained", 4, {**VPP2, **CP2}, num_micro_batches=10),
        case("alone-cp2", "trained", 2, CP2, num_micro_batches=8),
        case("together-cp2", "trained", 2, CP2, num_micro_batches=1),
        case("empty-rank-cp2-dp2", "trained", 4, CP2, empty_rank=0),
        case("plain-moe-single", "trained", flags=moe),
        case("empty-rank-moe-ep2", "trained", 2, {**moe, **EP2}, empty_rank=1),
        case("alone-moe-ep2", "trained", 2, {**moe, **EP2}, num_micro_batches=4),
        case("bf16-single", "trained", flags={"bf16": True}, rounds=2),
        case("bf16-tp2-dp2", "trained", 4, {"bf16": True, **TP2, **DISTRIBUTED, "sequence_parallel": True}, rounds=2),
        case("asleep-single", "asleep"),
        case("asleep-bf16", "asleep", flags={"bf16": True}),
        case("asleep-bf16-distributed", "asleep", 2, {"bf16": True, **DISTRIBUTED}),
        case("schedule", "trained", flags={"lr_warmup_iters": 2, "lr_decay_style": "linear", "min_lr": 1e-4}, rounds=5),
        case("missing-rows", "failed_handoff", 2),
        case("nan-reward", "failed_round", 2, reward=float("nan")),
        case("huge-reward", "failed_round", 2, PP2, reward=1e35),
    ]


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


def checkpoint_cases(models: Path, work: Path) -> list[Case]:
    """Training that goes on in another trainer, and checkpoints that cannot be used."""
    case, moe = maker(models), pairs(models)["moe"]
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
        case(
            "resume-vpp2-as-cp2",
            "resumed",
            2,
            {**decay, **VPP2},
            directory=work / "vpp2-as-cp2",
            then={**CP2, "pipeline_model_parallel_size": 1, "virtual_pipeline_model_parallel_size": None},
        ),
        case(
            "resume-tp2-dp2-as-pp2-dp2",
            "resumed",
            4,
            {**decay, **TP2, **DISTRIBUTED},
            directory=work / "tp2-as-pp2-dp2",
            then={**PP2, "tensor_model_parallel_size": 1},
        ),
        *(
            case(f"background-{name}", "resumed", world, {**decay, **flags}, directory=work / name, in_background=True)
            for name, world, flags in (
                ("single", 1, {}),
                ("bf16-tp2", 2, {**TP2, "bf16": True}),
                ("dp2-overlap", 2, OVERLAP),
                ("pp2", 2, PP2),
            )
        ),
        case("background-failure", "failed_in_background", 2, directory=work / "failure"),
        case("resume-from-cuda", "loaded_from_cuda", directory=work / "from-cuda"),
        case("resume-cp2-overlap", "resumed", 2, {**decay, **CP2, **OVERLAP}, directory=work / "resume-cp2"),
        case(
            "resume-tied-pp2-distributed",  # the shared embedding has a bucket of its own
            "resumed",
            2,
            {**decay, "hf_checkpoint": str(models / "qwen2_tied"), **PP2, **DISTRIBUTED},
            directory=work / "resume-tied",
        ),
        case(
            "resume-many-buckets",
            "resumed_with_buckets",
            2,
            {**decay, **OVERLAP, "bf16": True},
            directory=work / "resume-buckets",
            bucket_size=20_000,
        ),
        case(
            "resume-grouped-many-buckets",
            "resumed_with_buckets",
            2,
            {**decay, **moe, **OVERLAP, "moe_grouped_gemm": True},
            directory=work / "resume-grouped",
            bucket_size=20_000,
        ),
        case(
            "resume-gemma-tp2",
            "resumed",
            2,
            {**decay, "hf_checkpoint": str(models / "gemma3"), **TP2},
            directory=work / "resume-gemma",
        ),
        case("missing-checkpoint", "failed", 2, method="load", argument=work / "nowhere"),
        case("save-below-a-file", "failed", 2, method="save", argument=models / "qwen2" / "config.json" / "below"),
        case("save-on-a-full-disk", "failed_on_a_full_disk", directory=work / "full-disk"),
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
        case("resume-moe-ep2", "resumed", 2, {**decay, **moe, **EP2}, directory=work / "resume-ep2"),
        case(
            "resume-moe-ep2-distributed",
            "resumed",
            4,
            {**decay, **moe, **EP2, **DISTRIBUTED},
            directory=work / "resume-ep2-distributed",
        ),
        case(
            "resume-sinks-ep2-tp2",
            "resumed",
            4,
            {**decay, "hf_checkpoint": str(models / "gpt_oss"), **EP2, **SP2, **DISTRIBUTED},
            directory=work / "resume-sinks",
        ),
        case("fewer-experts", "failed_load", 2, {**moe, **EP2}, directory=work / "ep2", expert_model_parallel_size=1),
    ]


def routing_cases(models: Path) -> list[Case]:
    """Foreign experts in layouts; own ones with and without replay; those of a model with other routers."""
    case, grpo = maker(models), grpo_flags(models / "reference")
    moe, moe_tied = {**grpo, **pairs(models)["moe"]}, {**grpo, **pairs(models)["moe-tied"]}
    replay = {"use_rollout_routing_replay": True}
    plain = {"hf_checkpoint": moe["hf_checkpoint"], **EP2}
    alone = {"hf_checkpoint": moe["hf_checkpoint"]}
    return [
        case("grpo-moe-single", "trained", flags=moe, num_steps=2),
        case("replay-moe-single", "trained", flags={**moe, **replay}, num_steps=2, experts="foreign"),
        case("replay-moe-tied-single", "trained", flags={**moe_tied, **replay}, num_steps=2, experts="foreign"),
        *(
            case(f"replay-moe-{name}", "trained", world, {**moe, **replay, **flags}, num_steps=2, experts="foreign")
            for name, (world, flags) in REPLAY_LAYOUTS.items()
        ),
        case("own-experts-ignored", "trained", 2, plain, experts="own"),
        case("own-experts-replayed", "trained", 2, {**plain, **replay}, experts="own"),
        case("other-routers-ignored", "trained", flags=alone, experts="of other routers"),
        case("other-routers-replayed", "trained", flags={**alone, **replay}, experts="of other routers"),
    ]
