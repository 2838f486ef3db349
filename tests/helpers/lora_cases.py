"""What the tests of adapters run, as cases for `megatron_worker.run`, and the same by PEFT."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.helpers import megatron_cases as layouts
from tests.helpers import reference_policy as reference
from tests.helpers.engine_contract import ENTROPY, build, take_step, weights_of
from tests.helpers.fsdp_cases import FSDP, RECOMPUTE
from tests.helpers.megatron_cases import grpo_flags
from tests.helpers.megatron_models import make_plan, make_rows
from tests.helpers.megatron_worker import Bench, Case
from vime.data.rows import TrainRow
from vime.types import CheckpointError, ConfigError, RoundPlan

RANK, ALPHA = 4, 12.0  # scale 3
ADAPTER = {"lora_rank": RANK, "lora_alpha": ALPHA}
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def adapter_of(engine: Any) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().clone() for name, tensor in engine.export_adapter()}


def base_of(engine: Any) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().clone() for name, tensor in engine.export_base()}


def values_of(engine: Any, rows: list[TrainRow]) -> list[Tensor]:
    """Log-probabilities of every row; [] on ranks without tokens."""
    return [value_R for batch in engine.forward([rows]) for value_R in batch]


def same(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def learning_of(engine: Any) -> dict[str, Tensor]:
    """What of the model gets gradients on this rank."""
    chunks = engine._core if hasattr(engine, "_core") else [engine._model]
    return {
        f"{number}.{name}": parameter
        for number, chunk in enumerate(chunks)
        for name, parameter in chunk.named_parameters()
        if parameter.requires_grad
    }


def num_moments(engine: Any) -> int:
    """Numbers in the optimizer's state on this rank, steps left out."""
    if not hasattr(engine, "_core"):
        return sum(tensor.numel() for tensor in engine._optimizer.tensors())
    states = [state for part in engine._optimizer.parts for state in part.optimizer.state.values()]
    return sum(value.numel() for state in states for name, value in state.items() if name != "step")


def learned(bench: Bench) -> dict[str, Any]:
    """Two optimizer steps, and what there is before and after them."""
    config, backend = bench.backend()
    engine, rows = build(bench, backend), make_rows()
    steps = make_plan(rows, dp_size=backend.place.dp_size, num_steps=2).steps
    before, begun = base_of(engine), adapter_of(engine)
    plain = values_of(engine, rows)
    taken = [take_step(engine, backend, step, rows) for step in steps]
    with engine.base_only():
        without = values_of(engine, rows)
    moved = values_of(engine, rows)
    learning = learning_of(engine)
    answer = {
        "steps": taken,
        "metadata": engine.adapter_metadata(),
        "begun": begun,
        "adapter": adapter_of(engine),
        "base_moved": [name for name, tensor in base_of(engine).items() if not torch.equal(tensor, before[name])],
        "off_is_base": same(plain, without),
        "on_is_base": same(plain, moved) and bool(plain),  # stages but the last have no values
        "has_values": bool(plain),
        "learning": list(learning),
        "num_learning": sum(parameter.numel() for parameter in learning.values()),
        "num_moments": num_moments(engine),
        "scale": config.lora.lora_scale,
    }
    backend.close()
    return answer


def round_of_base(bench: Bench) -> dict[str, Any]:
    """A round with the KL term against the base, and the roles that hold a model."""
    trainer, rows = bench.trainer(), make_rows()
    plan = make_plan(rows, dp_size=trainer.place.dp_size, num_steps=2)
    answer = {
        "roles": [str(role) for role in trainer.engines],
        "metrics": trainer.train_round(plan, dict(enumerate(rows))),
        "adapter": adapter_of(trainer.actor),
    }
    trainer.backend.close()
    return answer


def saved(bench: Bench, directory: Path) -> dict[str, Any]:
    """A checkpoint between two steps, and the adapter after the second."""
    _, backend = bench.backend()
    engine, rows = build(bench, backend), make_rows()
    steps = make_plan(rows, dp_size=backend.place.dp_size, num_steps=2).steps
    take_step(engine, backend, steps[0], rows)
    engine.save(directory)
    take_step(engine, backend, steps[1], rows)
    answer = {"adapter": adapter_of(engine)}
    backend.close()
    return answer


def continued(bench: Bench, directory: Path) -> dict[str, Any]:
    """The second of those steps from the checkpoint, or why it cannot be loaded."""
    try:
        _, backend = bench.backend()
        engine, rows = build(bench, backend), make_rows()
        engine.load(directory)
    except (CheckpointError, ConfigError) as error:
        backend.close()
        return {"refused": str(error)}
    step = make_plan(rows, dp_size=backend.place.dp_size, num_steps=2).steps[1]
    take_step(engine, backend, step, rows)
    answer = {"adapter": adapter_of(engine)}
    backend.close()
    return answer


def peft_steps(
    directory: Path,
    rows: Sequence[TrainRow],
    plan: RoundPlan,
    begun: dict[str, Tensor],
    targets: Sequence[str] = TARGETS,
) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """(loss, norm and rate of each step; the adapter after them) by PEFT on transformers, one sequence at a time."""
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict

    settings = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(targets), task_type="CAUSAL_LM")
    model, weights = get_peft_model(reference.load(directory), settings), weights_of(rows)
    set_peft_model_state_dict(model, begun)

    def step_loss(numbers: list[int]) -> Tensor:
        total = torch.zeros(())
        for row in numbers:
            logp_R, entropy_R = reference.response_values(model, rows[row], reference.TEMPERATURE)
            gain_R = weights[row] * rows[row].reward * logp_R + ENTROPY * entropy_R
            total = total - (gain_R * torch.tensor(rows[row].loss_mask)).sum()
        return total / sum(rows[row].num_trainable for row in numbers)

    return reference.run_steps(model, plan, step_loss), get_peft_model_state_dict(model)


CaseMaker = Callable[..., Case]


def maker(models: Path, common: dict[str, Any]) -> CaseMaker:
    grpo = grpo_flags(models / "qwen2")
    steady = {name: grpo[name] for name in ("rollout_temperature", "lr_decay_style", "min_lr", "weight_decay")}

    def case(name: str, do: str, world: int = 1, flags: dict[str, Any] | None = None, **arguments: Any) -> Case:
        chosen = {**common, **ADAPTER, **steady, "hf_checkpoint": str(models / "qwen2"), **(flags or {})}
        return Case(name=name, do=f"tests.helpers.lora_cases:{do}", world=world, flags=chosen, arguments=arguments)

    return case


def lora_cases(models: Path, work: Path) -> list[Case]:
    grpo, case = grpo_flags(models / "qwen2"), maker(models, FSDP)
    step = work / "step"
    others = {
        "--lora-rank": {"lora_rank": 2},
        "--lora-alpha": {"lora_alpha": 4.0},
        "--lora-target-modules": {"lora_target_modules": TARGETS[:4]},
        "--hf-checkpoint": {"hf_checkpoint": str(models / "reference")},
        "whole": {"lora_rank": 0},
    }
    return [
        case("one", "learned"),
        case("two", "learned", 2),
        case("recomputed", "learned", 2, RECOMPUTE),
        case("own-base", "round_of_base", 2, {**grpo, "ref_load": None}),
        case("second-model", "round_of_base", 2, {**grpo, "ref_load": str(models / "copy")}),
        case("saved", "saved", 2, directory=step),
        case("continued", "continued", 2, directory=step),
        case("by-one-rank", "continued", 1, directory=step),
        *(case(f"other {name}", "continued", 2, flags, directory=step) for name, flags in others.items()),
        case("experts", "continued", 2, {"hf_checkpoint": str(models / "qwen3_moe")}, directory=step),
    ]


MEGATRON_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "recomputed": (1, layouts.RECOMPUTE),
    **{
        name: layouts.LAYOUTS[name]
        for name in ("tp2", "tp2-sequence", "tp2-sequence-recompute", "pp2", "vpp2", "cp2", "dp2", "dp2-overlap")
    },
}
"""As many as there are ways to cut weights and tokens, and to sum gradients."""


def megatron_lora_cases(models: Path, work: Path) -> list[Case]:
    grpo, case = grpo_flags(models / "qwen2"), maker(models, {})
    kv = {"lora_target_modules": ("k_proj", "up_proj")}
    moe = {"hf_checkpoint": str(models / "qwen3_moe"), "lora_target_modules": TARGETS[:4]}
    others = {
        "--lora-rank": {"lora_rank": 2},
        "--lora-alpha": {"lora_alpha": 4.0},
        "--lora-target-modules": {"lora_target_modules": TARGETS[:4]},
        "--hf-checkpoint": {"hf_checkpoint": str(models / "reference")},
        "whole": {"lora_rank": 0},
    }
    tp2 = layouts.TP2
    return [
        *(case(name, "learned", world, flags) for name, (world, flags) in MEGATRON_LAYOUTS.items()),
        case("some-tp2", "learned", 2, {**kv, **tp2}),
        case("moe-ep2", "learned", 2, {**moe, **layouts.EP2}),
        case("moe-tp2-sequence", "learned", 2, {**moe, **layouts.SP2}),
        case("gemma3-tp2-sequence", "learned", 2, {"hf_checkpoint": str(models / "gemma3"), **layouts.SP2}),
        case("bf16-tp2", "learned", 2, {**tp2, "bf16": True}),
        case("own-base", "round_of_base", 2, {**grpo, **tp2, "ref_load": None}),
        case("second-model", "round_of_base", 2, {**grpo, **tp2, "ref_load": str(models / "copy")}),
        *(
            case(f"saved {name}", "saved", 2, flags, directory=work / name)
            for name, flags in (("tp2", tp2), ("distributed", layouts.DISTRIBUTED), ("pp2", layouts.PP2))
        ),
        case("continued tp2", "continued", 2, tp2, directory=work / "tp2"),
        case("continued distributed", "continued", 2, layouts.DISTRIBUTED, directory=work / "distributed"),
        case("continued pp2", "continued", 2, layouts.PP2, directory=work / "pp2"),
        case("tp2 as pp2", "continued", 2, layouts.PP2, directory=work / "tp2"),
        case("pp2 as one", "continued", 1, directory=work / "pp2"),
        *(
            case(f"other {name}", "continued", 2, {**tp2, **flags}, directory=work / "tp2")
            for name, flags in others.items()
        ),
        case("experts", "continued", 2, {"hf_checkpoint": str(models / "qwen3_moe")}, directory=work / "tp2"),
    ]
