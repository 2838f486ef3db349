"""An adapter on the FSDP2 engine equals PEFT's, leaves the base as it is, and is all that a checkpoint holds."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from tests.helpers.lora_cases import RANK, TARGETS, lora_cases, peft_steps
from tests.helpers.megatron_models import make_plan, make_rows
from tests.helpers.megatron_worker import Answers, answers_of
from vime.backends.adapters import PREFIX
from vime.weights.plan import TensorMeta

LAYOUTS = ("one", "two", "recomputed")
RELATIVE, ABSOLUTE = 1e-5, 1e-5


@pytest.fixture(scope="session")
def step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lora-work")


@pytest.fixture(scope="session")
def adapters(families: Path, step: Path) -> Answers:
    shutil.copytree(families / "qwen2", families / "copy")
    return answers_of(lora_cases(families, step), directory=step / "launch")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_steps_of_an_adapter_equal_those_of_peft(adapters: Answers, families: Path, layout: str) -> None:
    rows = make_rows()
    for rank in adapters(layout):
        expected, adapter = peft_steps(families / "qwen2", rows, make_plan(rows, dp_size=1, num_steps=2), rank["begun"])
        for taken, by_peft in zip(rank["steps"], expected, strict=True):
            assert taken["loss"] == pytest.approx(by_peft["loss"], rel=RELATIVE)
            assert taken["grad_norm"] == pytest.approx(by_peft["grad_norm"], rel=RELATIVE)
        assert set(rank["adapter"]) == set(adapter)
        for name, tensor in rank["adapter"].items():
            torch.testing.assert_close(tensor, adapter[name], rtol=0, atol=ABSOLUTE)
        assert any(bool(tensor.abs().max() > 1e-4) for name, tensor in adapter.items() if "lora_B" in name)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_only_the_adapter_learns_and_the_base_stays_bit_for_bit(adapters: Answers, layout: str) -> None:
    ranks = adapters(layout)
    for rank in ranks:
        assert rank["base_moved"] == []
        assert rank["off_is_base"]
        assert not rank["on_is_base"]
        assert len(rank["learning"]) == len(rank["adapter"])
        assert all(".lora_" in name for name in rank["learning"])
        assert [TensorMeta.of(name, tensor) for name, tensor in rank["adapter"].items()] == rank["metadata"]
    # two moments for every number of the adapter, over all ranks, and none for the base
    numel = sum(tensor.numel() for tensor in ranks[0]["adapter"].values())
    assert sum(rank["num_moments"] for rank in ranks) == 2 * numel


def test_an_adapter_begins_equal_in_every_layout_with_b_zero_and_a_within_its_bound(adapters: Answers) -> None:
    begun = adapters("one")[0]["begun"]
    for layout in LAYOUTS:
        for rank in adapters(layout):
            assert all(torch.equal(tensor, begun[name]) for name, tensor in rank["begun"].items())
    for name, tensor in begun.items():
        if "lora_B" in name:
            assert not tensor.any()
        else:
            assert tensor.size(0) == RANK
            bound = tensor.size(1) ** -0.5
            assert 0.5 * bound < tensor.abs().max() <= bound
    firsts = [tensor for name, tensor in begun.items() if "q_proj.lora_A" in name]
    assert not torch.equal(firsts[0], firsts[1])


def test_the_base_without_its_adapter_is_the_reference(adapters: Answers) -> None:
    for own, second in zip(adapters("own-base"), adapters("second-model"), strict=True):
        assert (own["roles"], second["roles"]) == (["actor"], ["actor", "reference"])
        assert all(torch.equal(tensor, second["adapter"][name]) for name, tensor in own["adapter"].items())
        assert own["metrics"] == second["metrics"]


def test_a_step_from_the_checkpoint_is_that_of_the_run_that_wrote_it(adapters: Answers) -> None:
    for rank, written in zip(adapters("continued"), adapters("saved"), strict=True):
        assert all(torch.equal(tensor, written["adapter"][name]) for name, tensor in rank["adapter"].items())
    for name, tensor in adapters("by-one-rank")[0]["adapter"].items():
        torch.testing.assert_close(tensor, adapters("saved")[0]["adapter"][name], rtol=0, atol=ABSOLUTE)


def test_a_checkpoint_holds_the_adapter_alone(adapters: Answers, step: Path) -> None:
    held = FileSystemReader(step / "step").read_metadata().state_dict_metadata
    adapter = {name.removeprefix(PREFIX) for name in adapters("saved")[0]["adapter"]}
    moments = {f"optimizer.{moment}.{name}" for moment in ("exp_avg", "exp_avg_sq") for name in adapter}
    others = {name for name in held if not name.startswith(("common.", "random."))}
    assert others == {f"model.{name}" for name in adapter} | moments | {"optimizer.num_steps"}


@pytest.mark.parametrize("flag", ["--lora-rank", "--lora-alpha", "--lora-target-modules", "--hf-checkpoint"])
def test_the_checkpoint_of_another_adapter_is_refused_by_its_flag(adapters: Answers, flag: str) -> None:
    for rank in adapters(f"other {flag}"):
        assert f"its adapter was trained {flag} " in rank["refused"]


def test_an_adapter_is_not_loaded_into_a_whole_model(adapters: Answers) -> None:
    for rank in adapters("other whole"):
        assert "holds an adapter, this run trains the whole model" in rank["refused"]


def test_experts_have_no_adapter_and_the_refusal_says_which_layers_have_one(adapters: Answers) -> None:
    for rank in adapters("experts"):
        assert "--lora-target-modules gate_proj up_proj down_proj" in rank["refused"]
        assert all(name in rank["refused"] for name in TARGETS[:4])
