"""Trainers of two ranks, cut in every way that two can be, beside one process on the CPU.

The ranks are two GPUs with NCCL (`tests/gpu/test_layouts_gpu.py`), or, to try the same code without them, two processes
with gloo.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.dist_launch import launch
from tests.helpers.gpu_rank import ON_GPU
from tests.helpers.megatron_cases import CP2, EP2, GROUPED, OVERLAP, PP2, SP2, grpo_flags, pairs
from tests.helpers.megatron_models import make_models
from tests.helpers.megatron_worker import Answers, Case, answers_of

DENSE, EXPERTS = "qwen2", "qwen3_moe"
Layouts = dict[str, tuple[str, dict[str, Any]]]
"""Which model is trained, and by which flags."""
LAUNCHES: dict[str, Layouts] = {
    "dense": {
        "tp2-sequence": (DENSE, SP2),
        "dp2": (DENSE, {}),
        "dp2-overlap": (DENSE, OVERLAP),
        "pp2": (DENSE, PP2),
        "cp2": (DENSE, CP2),
        "fsdp2": (DENSE, {"train_backend": "fsdp"}),
    },
    "experts": {
        "ep2": (EXPERTS, EP2),
        "ep2-tp2-whole-experts": (EXPERTS, {**EP2, **SP2, "expert_tensor_parallel_size": 1}),
    },
    "grouped": {"ep2-grouped": (EXPERTS, {**EP2, **GROUPED})},
}
"""A case that raises ends its launch: what has not run on a GPU in any form stands by itself."""
LAYOUTS = {name: layout for layouts in LAUNCHES.values() for name, layout in layouts.items()}
BY_LAUNCH = [(launched, name) for launched, layouts in LAUNCHES.items() for name in layouts]
GLOO = {"device": "cpu", "distributed_backend": "gloo"}
NCCL = ON_GPU


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """How far apart two sound trainers are after two steps of Adam."""

    relative: float  # of whatever is counted
    absolute: float  # of the same: losses are sums of terms near 1 that cancel
    weight: float  # absolute; a step moves a weight by up to 1e-3


SAME_DEVICE = Bounds(relative=1e-5, absolute=1e-6, weight=2e-6)
OTHER_DEVICE = Bounds(relative=2e-3, absolute=2e-4, weight=2e-4)
"""The products of a GPU sum in another order."""


def trained_by_two_and_by_one(on: Mapping[str, str], launched: str, directory: Path) -> tuple[Answers, Answers]:
    """Answers of every layout of a launch on two devices `on`, and of its model's one process on the CPU."""
    models = make_models((DENSE, EXPERTS, "qwen3_moe_tied"), directory / "models")
    flags = {
        DENSE: {**grpo_flags(models / "reference"), "hf_checkpoint": str(models / DENSE)},
        EXPERTS: {**grpo_flags(models / "reference"), **pairs(models)["moe"]},
    }
    steps = {"num_steps": 2}
    cut = [
        Case(name=name, do="trained", world=2, flags={**flags[model], **layout, **on}, arguments=steps)
        for name, (model, layout) in LAUNCHES[launched].items()
    ]
    trained = {model for model, _ in LAUNCHES[launched].values()}
    whole = [Case(name=model, do="trained", flags=flags[model], arguments=steps) for model in trained]
    by_rank = launch(
        "tests.helpers.megatron_worker:run",
        world_size=2,
        directory=directory / "two",
        arguments={"cases": cut},
        deadline_s=240,
        preload="tests.helpers.megatron_worker:import_backends" if on["device"] == "cpu" else None,
    )
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("CUDA_VISIBLE_DEVICES", "")  # megatron's device layer for the CPU asks whether there is CUDA
        one = answers_of(whole, directory=directory / "one", deadline_s=120)
    return (lambda name: [answers[name] for answers in by_rank]), one


def assert_two_train_like_one(two: Answers, one: Answers, layout: str, bounds: Bounds) -> None:
    """Loss, gradient norm and whatever else is counted, and every exported weight; the two ranks agree to the bit."""
    first, second = two(layout)
    assert (first["metrics"], first["hash"]) == (second["metrics"], second["hash"])
    [alone] = one(LAYOUTS[layout][0])
    [mine], [theirs] = first["metrics"], alone["metrics"]
    for key in ("train/loss", "train/grad_norm"):
        print(f"{layout} {key}: {mine[key]:.7f}, one process on the CPU {theirs[key]:.7f}")  # noqa: T201  for the log
    assert mine == pytest.approx(theirs, rel=bounds.relative, abs=bounds.absolute)
    assert set(first["weights"]) == set(alone["weights"])
    for name, tensor in alone["weights"].items():
        torch.testing.assert_close(first["weights"][name], tensor, rtol=0, atol=bounds.weight, msg=name)
