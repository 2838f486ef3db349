"""What the tests of the FSDP2 engine run, as cases for `megatron_worker.run`, and tiny models of many families."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.helpers.engine_contract import build, take_step
from tests.helpers.megatron_cases import grpo_flags
from tests.helpers.megatron_models import EXPERTS, SHAPE, make_plan, make_rows
from tests.helpers.megatron_worker import Bench, Case
from vime.types import Role, VimeError

WINDOW = 6  # most rows are longer
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt_neox": {"bos_token_id": 1, "eos_token_id": 2},  # fused qkv, biases, partial rotary, two norms side by side
    "gemma": {"head_dim": 16, "pad_token_id": 0},  # tied, scaled embeddings
    "gemma2": {"head_dim": 16, "sliding_window": WINDOW, "attn_logit_softcapping": 2.0, "pad_token_id": 0},
    "mistral": {"sliding_window": WINDOW},
    "qwen3_moe": EXPERTS,  # files and memory differ: one tensor for all experts of a layer
}
WORLDS = (1, 2)
"""Ranks that each family is trained on."""
FSDP = {"train_backend": "fsdp"}
RECOMPUTE = {"recompute_granularity": "full"}


def make_family(kind: str, directory: Path) -> Path:
    """A random fp32 model of two layers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SHAPE, "num_hidden_layers": 2, **FAMILIES.get(kind, {})})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # norms of 1 and biases of 0 would hide what is left out
            if "norm" in name or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(directory)
    return directory


def with_padding_token(directory: Path, token: int) -> None:
    """Say in config.json that `token` is what rows are padded with."""
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "pad_token_id": token}))


def saved(bench: Bench, directory: Path) -> list[dict[str, Any]]:
    """Three optimizer steps, with a checkpoint after the first: (loss, norm, rate) of the last two."""
    _, backend = bench.backend()
    engine, rows = build(bench, backend), make_rows()
    steps = make_plan(rows, dp_size=backend.place.dp_size, num_steps=4).steps
    take_step(engine, backend, steps[0], rows)
    engine.save(directory)
    answer = [take_step(engine, backend, step, rows) for step in steps[1:3]]
    backend.close()
    return answer


def continued(bench: Bench, directory: Path) -> list[dict[str, Any]]:
    """The last two of those steps, from the checkpoint."""
    _, backend = bench.backend()
    engine, rows = build(bench, backend), make_rows()
    engine.load(directory)
    steps = make_plan(rows, dp_size=backend.place.dp_size, num_steps=4).steps
    answer = [take_step(engine, backend, step, rows) for step in steps[1:3]]
    backend.close()
    return answer


def unreadable(bench: Bench, directory: Path) -> str:
    """Why a checkpoint cannot be loaded."""
    _, backend = bench.backend()
    error = _error_of(lambda: build(bench, backend).load(directory))
    backend.close()
    return error


def refused(bench: Bench, role: Role = Role.ACTOR) -> str:
    """Why an engine cannot be built."""
    _, backend = bench.backend()
    error = _error_of(lambda: build(bench, backend, role))
    backend.close()
    return error


def _error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except VimeError as caught:
        return f"{type(caught).__name__}: {caught}"
    return ""


def fsdp_cases(models: Path, work: Path) -> list[Case]:
    def case(name: str, do: str, world: int = 1, flags: dict[str, Any] | None = None, **arguments: Any) -> Case:
        chosen = {**FSDP, "hf_checkpoint": str(models / "qwen3_moe"), **(flags or {})}
        return Case(name=name, do=do, world=world, flags=chosen, arguments=arguments)

    here = "tests.helpers.fsdp_cases"
    contract = "tests.helpers.engine_contract"
    grpo = grpo_flags(models / "reference")
    steady = {name: grpo[name] for name in ("rollout_temperature", "lr_decay_style", "min_lr", "weight_decay")}
    dense = {"hf_checkpoint": str(models / "qwen2")}
    cases = []
    for kind in FAMILIES:
        flags = {"hf_checkpoint": str(models / kind)}
        cases += [case(f"{kind}-imported", "imported", 2, flags)]
        for world in WORLDS:
            cases.append(case(f"{kind}-learned-{world}", f"{contract}:learned", world, {**steady, **flags}))
    for name, (world, flags) in {
        "megatron": (1, {"train_backend": "megatron"}),
        "fsdp": (1, {}),
        "fsdp-dp2": (2, {}),
    }.items():
        cases += [case(f"grpo-{name}", "trained", world, {**grpo, **dense, **flags}, num_steps=2)]
    passes = {**grpo, **dense, "num_ppo_epochs": 2, "eps_clip": 0.002}
    padded = {**grpo, "hf_checkpoint": str(models / "padded")}
    cases += [
        case("passes-megatron", "trained", 1, {**passes, "train_backend": "megatron"}, num_steps=2),
        case("passes-fsdp", "trained", 2, passes, num_steps=2),
        case("padded-megatron", "trained", 1, {**padded, "train_backend": "megatron"}, num_steps=2),
        case("padded-fsdp", "trained", 2, padded, num_steps=2),
        case("recomputed", f"{contract}:learned", 2, {**steady, **RECOMPUTE}),
        case("bf16", "trained", 2, {**dense, "bf16": True}, rounds=2),
        case("fp32", "trained", 2, dense, rounds=2),
        case("two-ranks-save", f"{here}:saved", 2, directory=work / "two"),
        case("one-rank-continues", f"{here}:continued", 1, directory=work / "two"),
        case("one-rank-saves", f"{here}:saved", 1, directory=work / "one"),
        case("two-ranks-continue", f"{here}:continued", 2, directory=work / "one"),
        case("weights-only", f"{here}:saved", 2, {"no_save_optim": True}, directory=work / "weights-only"),
        case("weights-only-continues", f"{here}:continued", 2, directory=work / "weights-only"),
        case("megatron-saves", f"{here}:saved", 1, {**dense, "train_backend": "megatron"}, directory=work / "megatron"),
        case("megatron-checkpoint", f"{here}:unreadable", 2, dense, directory=work / "megatron"),
        case(
            "fsdp-checkpoint", f"{here}:unreadable", 1, {**dense, "train_backend": "megatron"}, directory=work / "one"
        ),
        case("no-checkpoint", f"{here}:unreadable", 2, directory=work / "nowhere"),
        case("recurrent", f"{here}:refused", 2, {"hf_checkpoint": str(models / "mamba")}),
        case("mixed", f"{here}:refused", 2, {"hf_checkpoint": str(models / "mixed")}),
        case("encoder", f"{here}:refused", 2, {"hf_checkpoint": str(models / "t5")}),
        *(
            case(name, f"{here}:refused", 2, {"hf_checkpoint": str(models / name)}, role=Role.CRITIC)
            for name in ("two-labels", "broken-file")
        ),
    ]
    return cases
