"""An adapter on the megatron engine equals PEFT's in every layout, leaves the base as it is, and is all that a
checkpoint holds."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from megatron.core import dist_checkpointing

from tests.helpers.lora_cases import MEGATRON_LAYOUTS, RANK, TARGETS, megatron_lora_cases, peft_steps
from tests.helpers.megatron_models import make_plan, make_rows
from tests.helpers.megatron_worker import Answers, answers_of
from vime.backends.adapters import PREFIX, initial_factor
from vime.weights.plan import TensorMeta

PARTIAL = {
    "some-tp2": ("qwen2", ("k_proj", "up_proj")),
    "gemma3-tp2-sequence": ("gemma3", TARGETS),  # layers that normalise what they give, too
    **dict.fromkeys(("moe-ep2", "moe-tp2-sequence"), ("qwen3_moe", TARGETS[:4])),
}
LAYOUTS = (*MEGATRON_LAYOUTS, *PARTIAL)
RELATIVE, ABSOLUTE = 1e-5, 1e-5


@pytest.fixture(scope="session")
def adapters(models: Path, work: Path) -> Answers:
    shutil.copytree(models / "qwen2", models / "copy")
    return answers_of(megatron_lora_cases(models, work / "lora"), directory=work / "lora-launch")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_steps_of_an_adapter_on_megatron_equal_those_of_peft(adapters: Answers, models: Path, layout: str) -> None:
    rows, (kind, targets) = make_rows(), PARTIAL.get(layout, ("qwen2", TARGETS))
    plan, begun = make_plan(rows, dp_size=1, num_steps=2), adapters(layout)[0]["begun"]
    expected, adapter = peft_steps(models / kind, rows, plan, begun, targets)
    for rank in adapters(layout):
        for taken, by_peft in zip(rank["steps"], expected, strict=True):
            assert taken["loss"] == pytest.approx(by_peft["loss"], rel=RELATIVE)
            assert taken["grad_norm"] == pytest.approx(by_peft["grad_norm"], rel=RELATIVE)
        assert set(rank["adapter"]) == set(adapter)
        for name, tensor in rank["adapter"].items():
            torch.testing.assert_close(tensor, adapter[name], rtol=0, atol=ABSOLUTE)
    assert any(bool(tensor.abs().max() > 1e-4) for name, tensor in adapter.items() if "lora_B" in name)


@pytest.mark.parametrize("layout", [*LAYOUTS, "bf16-tp2"])
def test_only_the_adapter_learns_on_megatron_and_the_base_stays_bit_for_bit(adapters: Answers, layout: str) -> None:
    ranks = adapters(layout)
    for rank in ranks:
        assert rank["base_moved"] == []
        assert rank["off_is_base"]
        assert not rank["on_is_base"]
        assert all(name.rpartition(".")[2] in ("lora_A", "lora_B") for name in rank["learning"])
        assert [TensorMeta.of(name, tensor) for name, tensor in rank["adapter"].items()] == rank["metadata"]
        # each name begins as in any other backend, and moves: B, and A once B is not 0, which bf16 still rounds away
        is_bf16 = layout == "bf16-tp2"
        for name, tensor in rank["begun"].items():
            expected = initial_factor(name.removeprefix(PREFIX), tensor.shape, seed=1234)
            assert torch.equal(tensor, expected.bfloat16().float() if is_bf16 else expected)
            assert not torch.equal(tensor, rank["adapter"][name]) or (is_bf16 and "lora_A" in name)
    assert any(rank["has_values"] for rank in ranks)


@pytest.mark.parametrize("layout", [*LAYOUTS, "bf16-tp2"])
def test_the_optimizer_holds_two_moments_for_each_number_that_learns(adapters: Answers, layout: str) -> None:
    ranks = adapters(layout)
    shared = len(ranks) if layout == "dp2-overlap" else 1  # the distributed optimizer cuts moments over replicas
    assert sum(rank["num_moments"] for rank in ranks) * shared == 2 * sum(rank["num_learning"] for rank in ranks)


def test_the_base_without_its_adapter_is_the_reference_on_megatron(adapters: Answers) -> None:
    for own, second in zip(adapters("own-base"), adapters("second-model"), strict=True):
        assert (own["roles"], second["roles"]) == (["actor"], ["actor", "reference"])
        assert all(torch.equal(tensor, second["adapter"][name]) for name, tensor in own["adapter"].items())
        assert own["metrics"] == second["metrics"]


@pytest.mark.parametrize("layout", ["tp2", "distributed", "pp2"])
def test_a_step_from_the_checkpoint_of_an_adapter_is_that_of_the_run_that_wrote_it(
    adapters: Answers, layout: str
) -> None:
    for rank, written in zip(adapters(f"continued {layout}"), adapters(f"saved {layout}"), strict=True):
        assert all(torch.equal(tensor, written["adapter"][name]) for name, tensor in rank["adapter"].items())


@pytest.mark.parametrize(("case", "written"), [("tp2 as pp2", "saved tp2"), ("pp2 as one", "saved pp2")])
def test_another_layout_continues_from_the_checkpoint_of_an_adapter(adapters: Answers, case: str, written: str) -> None:
    for rank in adapters(case):
        for name, tensor in rank["adapter"].items():
            torch.testing.assert_close(tensor, adapters(written)[0]["adapter"][name], rtol=0, atol=ABSOLUTE)


def test_a_checkpoint_of_an_adapter_on_megatron_holds_the_adapter_alone(adapters: Answers, work: Path) -> None:
    adapter = {name.removeprefix(PREFIX) for name in adapters("saved tp2")[0]["adapter"]}
    held = set(dist_checkpointing.load_tensors_metadata(str(work / "lora" / "tp2")))
    assert held == adapter | {
        f"optimizer.state.{moment}.{name}" for moment in ("exp_avg", "exp_avg_sq") for name in adapter
    }


@pytest.mark.parametrize("flag", ["--lora-rank", "--lora-alpha", "--lora-target-modules", "--hf-checkpoint"])
def test_the_checkpoint_of_another_adapter_on_megatron_is_refused_by_its_flag(adapters: Answers, flag: str) -> None:
    for rank in adapters(f"other {flag}"):
        assert f"its adapter was trained {flag} " in rank["refused"]


def test_an_adapter_is_not_loaded_into_a_whole_model_on_megatron(adapters: Answers) -> None:
    for rank in adapters("other whole"):
        assert "holds an adapter, this run trains the whole model" in rank["refused"]


def test_experts_have_no_adapter_on_megatron_and_the_refusal_says_which_layers_have_one(adapters: Answers) -> None:
    for rank in adapters("experts"):
        assert "--lora-target-modules gate_proj up_proj down_proj" in rank["refused"]
        assert all(name in rank["refused"] for name in TARGETS[:4])


def test_the_rank_of_the_adapter_is_that_of_its_flag(adapters: Answers) -> None:
    for name, tensor in adapters("one")[0]["begun"].items():
        assert tensor.size(1 if "lora_B" in name else 0) == RANK
