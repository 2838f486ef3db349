"""The FSDP2 engine beyond the contract: families, precision, checkpoints over rank counts, refusals, and that both
backends learn the same."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers import reference_policy
from tests.helpers.engine_contract import plain_steps
from tests.helpers.fsdp_cases import FAMILIES, WORLDS
from tests.helpers.megatron_models import make_plan, make_rows
from vime.weights.hashing import content_hash
from vime.weights.plan import TensorMeta

Answers = Callable[[str], list[Any]]
LOGP = 1e-5  # absolute, packed over two ranks against one sequence at a time in transformers' own attention
RELATIVE = 1e-5  # losses and gradient norms, fp32
ABSOLUTE = 1e-6  # losses are sums of terms near 1 that cancel
WEIGHT = 2e-6  # absolute; a step moves a weight by up to 1e-3, and adam_eps keeps rounding noise out of it


@pytest.mark.parametrize("kind", FAMILIES)
def test_packed_log_probabilities_of_a_family_are_those_of_each_sequence_alone(
    fsdp: Answers, families: Path, kind: str
) -> None:
    expected = reference_policy.log_probs(reference_policy.load(families / kind), make_rows(), 1.0)
    for rank in fsdp(f"{kind}-imported"):
        for found_R, expected_R in zip(rank["log_probs"], expected, strict=True):
            torch.testing.assert_close(found_R, expected_R, rtol=0, atol=LOGP)


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_rank_exports_the_tensors_of_the_file(fsdp: Answers, families: Path, kind: str) -> None:
    file = load_file(families / kind / "model.safetensors")
    for rank in fsdp(f"{kind}-imported"):
        assert [TensorMeta.of(name, tensor) for name, tensor in rank["weights"].items()] == rank["metadata"]
        assert set(rank["weights"]) == set(file)
        assert rank["hash"] == content_hash({meta.name: file[meta.name] for meta in rank["metadata"]})


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("kind", FAMILIES)
def test_two_steps_of_a_family_equal_plain_torch(
    fsdp: Answers, families: Path, kind: str, world: int, tmp_path: Path
) -> None:
    rows = make_rows()
    expected, model = plain_steps(families / kind, rows, make_plan(rows, dp_size=1, num_steps=2))
    model.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    for rank in fsdp(f"{kind}-learned-{world}"):
        for taken, step in zip(rank["steps"], expected, strict=True):
            assert taken["loss"] == pytest.approx(step["loss"], rel=RELATIVE)
            assert taken["grad_norm"] == pytest.approx(step["grad_norm"], rel=RELATIVE)
        for name, tensor in rank["weights"].items():
            torch.testing.assert_close(tensor, state[name], rtol=0, atol=WEIGHT, msg=name)


def test_recomputed_activations_change_nothing(fsdp: Answers) -> None:
    for recomputed, plain in zip(fsdp("recomputed"), fsdp("qwen3_moe-learned-2"), strict=True):
        assert recomputed["steps"] == plain["steps"]
        assert all(torch.equal(tensor, plain["weights"][name]) for name, tensor in recomputed["weights"].items())


@pytest.mark.parametrize("case", ["fsdp", "fsdp-dp2"])
def test_two_grpo_steps_of_both_backends_are_the_same(fsdp: Answers, case: str) -> None:
    [megatron] = fsdp("grpo-megatron")
    for rank in fsdp(f"grpo-{case}"):
        [expected], [metrics] = megatron["metrics"], rank["metrics"]
        assert metrics.keys() == expected.keys()
        for name, value in metrics.items():
            assert value == pytest.approx(expected[name], rel=RELATIVE, abs=ABSOLUTE), name
        assert metrics["train/lr"] == expected["train/lr"]
        assert rank["weights"].keys() == megatron["weights"].keys()
        for name, tensor in rank["weights"].items():
            torch.testing.assert_close(tensor, megatron["weights"][name], rtol=0, atol=WEIGHT, msg=name)


def test_several_passes_over_a_round_are_the_same_in_both_backends(fsdp: Answers) -> None:
    [megatron] = fsdp("passes-megatron")
    [expected] = megatron["metrics"]
    for rank in fsdp("passes-fsdp"):
        assert rank["metrics"][0]["train/loss"] == pytest.approx(expected["train/loss"], rel=RELATIVE, abs=ABSOLUTE)
        assert rank["metrics"][0]["train/lr"] == expected["train/lr"]
        assert rank["metrics"][0]["train/pg_clipfrac"] > 0
        for name, tensor in rank["weights"].items():
            torch.testing.assert_close(tensor, megatron["weights"][name], rtol=0, atol=WEIGHT, msg=name)


def test_a_padding_token_that_occurs_in_rows_is_learned_like_any_other(fsdp: Answers, families: Path) -> None:
    """transformers' embedding drops the gradient of the padding token's row; in a row of ours it is a token."""
    [megatron] = fsdp("padded-megatron")
    [metrics] = megatron["metrics"]
    embedding, token = "model.embed_tokens.weight", int(make_rows()[0].tokens[1])
    before = load_file(families / "padded" / "model.safetensors")[embedding][token]
    for rank in fsdp("padded-fsdp"):
        assert rank["metrics"][0]["train/grad_norm"] == pytest.approx(metrics["train/grad_norm"], rel=RELATIVE)
        for name, tensor in rank["weights"].items():
            torch.testing.assert_close(tensor, megatron["weights"][name], rtol=0, atol=WEIGHT, msg=name)
        assert not torch.equal(rank["weights"][embedding][token], before)


def test_bfloat16_follows_fp32_and_is_exported_as_it_computes(fsdp: Answers) -> None:
    for half, single in zip(fsdp("bf16"), fsdp("fp32"), strict=True):
        assert {tensor.dtype for tensor in half["weights"].values()} == {torch.bfloat16}
        for found, expected in zip(half["metrics"], single["metrics"], strict=True):
            assert found["train/loss"] == pytest.approx(expected["train/loss"], abs=3e-2)
            assert found["train/grad_norm"] == pytest.approx(expected["train/grad_norm"], rel=3e-2)
        for name, tensor in half["weights"].items():
            # main weights are fp32: what is exported is their rounding, 2**-8 of the value
            torch.testing.assert_close(tensor.float(), single["weights"][name], rtol=2**-7, atol=1e-3, msg=name)


@pytest.mark.parametrize(
    ("first", "second"), [("two-ranks-save", "one-rank-continues"), ("one-rank-saves", "two-ranks-continue")]
)
def test_a_checkpoint_continues_on_another_number_of_ranks(fsdp: Answers, first: str, second: str) -> None:
    for continued in fsdp(second):
        for found, expected in zip(continued, fsdp(first)[0], strict=True):
            for name in ("loss", "grad_norm", "lr"):
                assert found[name] == pytest.approx(expected[name], rel=RELATIVE)


def test_weights_alone_start_the_schedule_and_moments_anew(fsdp: Answers) -> None:
    for continued, straight in zip(fsdp("weights-only-continues"), fsdp("weights-only"), strict=True):
        assert continued[0]["loss"] == straight[0]["loss"]
        assert continued[1]["loss"] != straight[1]["loss"]


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("megatron-checkpoint", "CheckpointError: --load .*--train-backend fsdp"),
        ("fsdp-checkpoint", "CheckpointError: --load .*cannot be read"),
        ("no-checkpoint", "CheckpointError: --load .*nowhere"),
        ("recurrent", "ConfigError: .*mamba.*does not keep packed sequences apart"),
        ("mixed", "ConfigError: .*the weights do not belong to this config.json"),
        ("encoder", "ConfigError: .*t5.*no causal language model"),
        ("two-labels", r"ConfigError: .*score.weight is \(2, 64\), expected \(1, 64\)"),
        ("broken-file", "ConfigError: .*is not a complete safetensors file"),
    ],
)
def test_what_cannot_work_is_refused_on_every_rank(fsdp: Answers, case: str, says: str) -> None:
    for error in fsdp(case):
        assert re.search(says, error), error
