"""An optimizer in host memory makes the steps of one that is not, and either reads the other's checkpoints."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.megatron_worker import Answers, answers_of
from tests.helpers.offload_cases import LAYOUTS, PARTIAL, USUAL, cases


def marked(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=() if name in USUAL else pytest.mark.nightly) for name in names]


EVERY = marked([*LAYOUTS, *(f"share-{name}" for name in PARTIAL), "with-te"])


@pytest.fixture(scope="module")
def usual(models: Path, work: Path) -> Answers:
    chosen = [case for case in cases(models, work) if case.name in USUAL]
    return answers_of(chosen, directory=work / "launch-host-optimizer")


@pytest.fixture(scope="module")
def nightly(models: Path, work: Path) -> Answers:
    chosen = [case for case in cases(models, work) if case.name not in USUAL]
    return answers_of(chosen, directory=work / "launch-host-optimizer-nightly")


@pytest.fixture
def answers(request: pytest.FixtureRequest) -> Answers:
    """Those of the launch that a test needs."""
    return lambda name: request.getfixturevalue("usual" if name in USUAL else "nightly")(name)


def assert_equal_rounds(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["metrics"] == other["metrics"]
    assert one["hash"] == other["hash"]
    assert_equal_states(one, other)


def assert_equal_states(one: dict[str, Any], other: dict[str, Any]) -> None:
    for name, tensors in one["state"].items():
        for mine, theirs in zip(tensors, other["state"][name], strict=True):
            assert mine.dtype == theirs.dtype
            assert torch.equal(mine, theirs), name


@pytest.mark.parametrize("case", EVERY)
def test_rounds_are_bit_equal_clipping_included(answers: Answers, case: str) -> None:
    for rank in answers(case):
        plain, host = rank["plain"], rank["host"]
        assert plain["first"]["metrics"]["train/grad_norm"] > 0.05  # --clip-grad
        assert_equal_rounds(plain["first"], host["first"])
        assert_equal_rounds(plain["second"], host["second"])
        assert plain["first"]["hash"] != plain["second"]["hash"]
        assert {float(step) for step in host["second"]["state"]["step"]} == {4.0}


@pytest.mark.parametrize("case", EVERY)
def test_a_step_that_is_left_out_changes_nothing(answers: Answers, case: str) -> None:
    for rank in answers(case):
        for name in ("plain", "host"):
            assert rank[name]["dropped"] == {"norm": float("inf"), "is_unchanged": True}


@pytest.mark.parametrize("case", EVERY)
def test_either_reads_the_checkpoint_of_the_other(answers: Answers, case: str) -> None:
    for rank in answers(case):
        for name in ("plain-in-host", "host-in-host", *([] if case == "with-te" else ["host-in-plain"])):
            assert_equal_states(rank[name]["loaded"], rank["plain"]["first"])
            assert_equal_rounds(rank[name]["second"], rank["plain"]["second"])


@pytest.mark.parametrize("case", marked(LAYOUTS))
def test_sleep_moves_nothing_that_lies_in_host_memory(answers: Answers, case: str) -> None:
    _, _, flags = LAYOUTS[case]
    for rank in answers(case):
        plain, host = rank["plain"]["slept"], rank["host"]["slept"]
        assert (plain["on_host"], plain["is_unchanged"], host["is_unchanged"], host["stayed"]) == (0, True, True, True)
        # fp32: the parameters themselves are stepped on; bf16: main weights too lie on the host
        assert plain["moved"] - host["moved"] == host["on_host"]
        if not flags.get("use_distributed_optimizer"):
            steps = 4 * len(rank["host"]["first"]["state"]["step"])
            assert host["on_host"] == (12 if flags.get("bf16") else 8) * host["parameters"] + steps


@pytest.mark.parametrize("case", marked(LAYOUTS))
def test_while_main_weights_are_made_on_the_device_gradients_are_not_there(answers: Answers, case: str) -> None:
    for rank in answers(case):
        [plain], [host] = rank["plain"]["gradients_while_built"], rank["host"]["gradients_while_built"]
        assert (plain > 0, host) == (True, 0)


@pytest.mark.nightly
def test_weights_alone_begin_anew_alike(answers: Answers) -> None:
    """Of a checkpoint without an optimizer main weights are those of the model."""
    for rank in answers("weights-only"):
        for name in ("plain-in-host", "host-in-host"):
            assert_equal_states(rank[name]["loaded"], rank["host-in-plain"]["loaded"])
            assert_equal_rounds(rank[name]["second"], rank["host-in-plain"]["second"])
        assert {float(step) for step in rank["host-in-host"]["loaded"]["state"]["step"]} == {0.0}


@pytest.mark.nightly
def test_a_checkpoint_is_that_of_its_call_though_the_host_state_moves_on(answers: Answers) -> None:
    for rank in answers("background"):
        assert rank["loaded"] == rank["saved"]
        assert rank["resumed"]["metrics"] == rank["never_stopped"]["metrics"]
        assert rank["resumed"]["hash"] == rank["never_stopped"]["hash"] != rank["saved"]


@pytest.mark.nightly
@pytest.mark.parametrize("share", PARTIAL)
def test_a_share_stays_on_the_device(answers: Answers, share: str) -> None:
    """Whole parameters, the first ones: of 0.01 one of them."""
    for rank, whole in zip(answers(f"share-{share}"), answers("dp2-distributed-bf16"), strict=True):
        sizes = [tensor.numel() for tensor in whole["host"]["first"]["state"]["main"]]
        chosen = [size for number, size in enumerate(sizes) if sum(sizes[:number]) < PARTIAL[share] * sum(sizes)]
        assert len(chosen) < len(sizes)
        assert rank["host"]["slept"]["on_host"] == 12 * sum(chosen) + 4 * len(chosen)


@pytest.mark.parametrize("case", marked(["narrow", "narrow-fp32"]))
def test_moments_in_bf16_are_those_of_fp32_rounded_after_each_step(answers: Answers, case: str) -> None:
    for rank in answers(case):
        device, exact = rank["device"]["first"]["state"], rank["fp32"]["first"]["state"]
        assert_equal_rounds(rank["device"]["first"], rank["host"]["first"])
        assert_equal_rounds(rank["device"]["second"], rank["host"]["second"])
        for name in ("exp_avg", "exp_avg_sq"):
            for mine, theirs in zip(device[name], exact[name], strict=True):
                assert mine.dtype == torch.bfloat16
                # two steps, each rounded to 8 bits: below 2 x 2^-9, and gradients of the second step differ a little
                largest = float(theirs.abs().max())
                torch.testing.assert_close(mine.float(), theirs, rtol=2**-7, atol=2**-7 * largest)
        assert any(not torch.equal(mine, theirs) for mine, theirs in zip(device["main"], exact["main"], strict=True))


@pytest.mark.parametrize("case", marked(["narrow", "narrow-fp32"]))
def test_checkpoints_of_moments_in_bf16_go_everywhere(answers: Answers, case: str) -> None:
    for rank in answers(case):
        for name in ("device-in-host", "host-in-device"):
            assert_equal_states(rank[name]["loaded"], rank["device"]["first"])
            assert_equal_rounds(rank[name]["second"], rank["device"]["second"])
        for name, written in (("host-in-fp32", "host"), ("fp32-in-device", "fp32")):
            narrow = name.endswith("device")
            for key in ("exp_avg", "exp_avg_sq"):
                pairs = zip(rank[name]["loaded"]["state"][key], rank[written]["first"]["state"][key], strict=True)
                for mine, theirs in pairs:
                    assert mine.dtype == (torch.bfloat16 if narrow else torch.float32)
                    assert torch.equal(mine, theirs.to(mine.dtype))
