"""Every model family, adapters, a critic and images on one GPU: the numbers are those of the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers import reference_policy as reference
from tests.helpers import tiny_images
from tests.helpers.families import MEGATRON
from tests.helpers.fsdp_cases import FSDP
from tests.helpers.gpu_rank import run_all_on_gpu
from tests.helpers.image_cases import image_cases
from tests.helpers.lora_cases import ADAPTER
from tests.helpers.megatron_cases import GROUPED, grpo_flags
from tests.helpers.megatron_models import make_models, make_rows
from tests.helpers.megatron_worker import Case, answers_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MODELS = tuple(model for family in MEGATRON for model in family.models)
LOGP = 1e-3  # absolute, fp32; a wrong mask, window or sink is off by tenths


def families(models: Path) -> list[Case]:
    anchors = {model: family.anchor for family in MEGATRON for model in family.models}
    return [
        Case(name=name, do="shown", flags={**grpo_flags(models / anchors[name]), "hf_checkpoint": str(models / name)})
        for name in MODELS
    ]


def others(models: Path) -> list[Case]:
    """What is compared with itself on the CPU."""
    policy = {"hf_checkpoint": str(models / "qwen2")}
    critic = {
        "critic_load": str(models / "critic"), "advantage_estimator": "ppo", "normalize_advantages": True,
        "critic_lr": 2e-3,
    }  # fmt: skip
    steps = {"num_steps": 2}
    [images, *_] = image_cases(models / "images")
    return [
        Case(name="adapter", do="trained", flags={**policy, **ADAPTER}, arguments=steps),
        Case(name="adapter-fsdp", do="trained", flags={**policy, **ADAPTER, **FSDP}, arguments=steps),
        Case(name="critic", do="tests.helpers.ppo_cases:rounds", flags={**policy, **critic}, arguments={"count": 2}),
        Case(name="replay", do="trained", flags={"hf_checkpoint": str(models / "qwen3_moe"),
             "use_rollout_routing_replay": True}, arguments={"experts": "own", **steps}),
        Case(name="recompute", do="trained", flags={**policy, "recompute_granularity": "full",
             "recompute_method": "uniform", "recompute_num_layers": 1}, arguments=steps),
        Case(name="grouped", do="trained", flags={"hf_checkpoint": str(models / "qwen3_moe"), **GROUPED},
             arguments=steps),
        images,
    ]  # fmt: skip


OTHERS = ("adapter", "adapter-fsdp", "critic", "replay", "recompute", "grouped", "one")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = make_models(MODELS, tmp_path_factory.mktemp("models"))
    tiny_images.make_idefics3(directory / "images")
    return directory


@pytest.fixture(scope="module")
def shown(models: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Any]]:
    return _on_both(families(models), tmp_path_factory.mktemp("families"))


@pytest.mark.parametrize("name", MODELS)
def test_a_family_on_the_gpu_says_exports_and_learns_what_the_cpu_does(
    shown: dict[str, tuple[Any, Any]], models: Path, name: str
) -> None:
    gpu, cpu = shown[name]
    expected = reference.log_probs(reference.load(models / name), make_rows(), reference.TEMPERATURE)
    difference = max(float((a.cpu() - b).abs().max()) for a, b in zip(gpu["log_probs"], expected, strict=True))
    print(f"{name}: log-probabilities differ from transformers' by {difference:.2e}")  # noqa: T201  for the log
    assert difference < LOGP
    for key, tensor in cpu["before"].items():
        assert torch.equal(gpu["before"][key].cpu(), tensor), key
    _compare(gpu, cpu, name)


@pytest.fixture(scope="module")
def trained(models: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Any]]:
    return _on_both(others(models), tmp_path_factory.mktemp("others"))


@pytest.mark.parametrize("name", OTHERS)
def test_adapters_a_critic_replay_and_images_train_on_the_gpu_as_on_the_cpu(
    trained: dict[str, tuple[Any, Any]], name: str
) -> None:
    gpu, cpu = trained[name]
    _compare(gpu, cpu, name)


def _on_both(cases: list[Case], directory: Path) -> dict[str, tuple[Any, Any]]:
    """Name -> (the GPU's answer, the CPU's)."""
    gpu = run_all_on_gpu(cases, directory / "gpu")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("CUDA_VISIBLE_DEVICES", "")  # megatron's device layer for the CPU asks whether there is CUDA
        cpu = answers_of(cases, directory=directory / "cpu")
    return {case.name: (gpu[case.name], cpu(case.name)[0]) for case in cases}


def _compare(gpu: Any, cpu: Any, where: str) -> None:
    """Numbers and tensors of the two, by what they are: fp32 sums in another order, two steps of Adam apart."""
    if isinstance(cpu, dict):
        for key, value in cpu.items():
            if key not in ("hash", "hashes", "place") and not str(key).startswith("perf/"):
                _compare(gpu[key], value, f"{where}/{key}")
    elif isinstance(cpu, list | tuple):
        assert len(gpu) == len(cpu), where
        for number, (one, other) in enumerate(zip(gpu, cpu, strict=True)):
            _compare(one, other, f"{where}/{number}")
    elif isinstance(cpu, Tensor):
        torch.testing.assert_close(gpu.cpu(), cpu.cpu(), rtol=1e-3, atol=2e-4, msg=lambda said: f"{where}: {said}")
    elif isinstance(cpu, float):
        assert gpu == pytest.approx(cpu, rel=2e-3, abs=2e-4), where
