"""The trainer on a GPU with NCCL, against transformers and plain torch on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.helpers import reference_policy as reference
from tests.helpers.gpu_rank import NEEDS_TE, run_all_on_gpu, run_on_gpu
from tests.helpers.megatron_cases import grpo_flags
from tests.helpers.megatron_models import make_model, make_plan, make_rows
from tests.helpers.megatron_worker import Case
from tests.helpers.offload_cases import HOST

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ENGINES = [
    pytest.param({"transformer_impl": "local"}, id="megatron-local"),
    pytest.param({"train_backend": "fsdp"}, id="fsdp"),
    pytest.param({"transformer_impl": "transformer_engine"}, id="megatron-transformer_engine", marks=NEEDS_TE),
]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama_tied"])
def test_log_probs_on_the_gpu_equal_transformers(tmp_path: Path, kind: str, engine: dict[str, str]) -> None:
    model = make_model(kind, tmp_path / kind)
    flags = {"hf_checkpoint": str(model), **engine}
    answer = run_on_gpu(tmp_path / "launch", "imported", flags=flags)
    expected = reference.log_probs(reference.load(model), make_rows(), temperature=1.0)
    difference = max(float((a - b).abs().max()) for a, b in zip(answer["log_probs"], expected, strict=True))
    print(f"{kind} {engine}: max abs difference {difference:.2e}")  # noqa: T201  the figure belongs in the log
    assert difference < 1e-3


@pytest.mark.parametrize("engine", ENGINES)
def test_a_grpo_round_on_the_gpu_equals_plain_torch(tmp_path: Path, engine: dict[str, str]) -> None:
    model, anchor = make_model("qwen2", tmp_path / "model"), make_model("qwen2", tmp_path / "anchor", seed=1)
    flags = {**grpo_flags(anchor), "hf_checkpoint": str(model), **engine}
    answer = run_on_gpu(tmp_path / "launch", "trained", flags=flags, num_steps=2)
    policy, rows = reference.load(model), make_rows()
    plan = make_plan(rows, dp_size=1, num_steps=2)
    steps = reference.train_round(policy, reference.load(anchor), rows, plan, per_token=False)
    [metrics] = answer["metrics"]
    assert metrics["train/loss"] == pytest.approx(sum(step["loss"] for step in steps) / 2, abs=1e-4)
    assert metrics["train/grad_norm"] == pytest.approx(sum(step["grad_norm"] for step in steps) / 2, rel=1e-3)
    state = policy.state_dict()
    for name, tensor in answer["weights"].items():
        torch.testing.assert_close(tensor.cpu(), state[name], rtol=0, atol=5e-5, msg=name)


@pytest.mark.parametrize("engine", [{"use_distributed_optimizer": True}, {"train_backend": "fsdp"}])
def test_bf16_with_cut_optimizer_state_resumes_bit_equal(tmp_path: Path, engine: dict[str, str]) -> None:
    model = make_model("qwen3", tmp_path / "model")
    flags = {"hf_checkpoint": str(model), "bf16": True, **engine}
    answer = run_on_gpu(tmp_path / "launch", "resumed", flags=flags, directory=tmp_path / "checkpoint")
    assert answer["loaded"] == answer["saved"]
    assert answer["resumed"]["draws"] == answer["never_stopped"]["draws"]
    assert answer["resumed"]["hash"] == answer["never_stopped"]["hash"]


def test_sleep_gives_device_memory_back(tmp_path: Path) -> None:
    model = make_model("qwen3", tmp_path / "model")
    answer = run_on_gpu(tmp_path / "launch", "asleep", flags={"hf_checkpoint": str(model), "bf16": True})
    # bf16 weight, fp32 gradient, main weight and moments; small tensors take blocks of 512 bytes
    assert answer["freed"] == pytest.approx(18, rel=0.2)
    assert answer["taken"] == pytest.approx(answer["freed"], rel=0.05)


@pytest.mark.parametrize("sharded", [False, True])
def test_an_optimizer_in_host_memory_makes_the_same_steps_with_less_device_memory(
    tmp_path: Path, sharded: bool
) -> None:
    flags = {"hf_checkpoint": str(make_model("qwen3", tmp_path / "model")), "bf16": True}
    flags |= {"use_distributed_optimizer": sharded}
    cases = [
        Case(name=name, do="tests.helpers.offload_cases:measured", flags={**flags, **more})
        for name, more in (("plain", {}), ("host", HOST))
    ]
    answers = run_all_on_gpu(cases, tmp_path / "launch")
    plain, host = answers["plain"], answers["host"]
    assert host["metrics"] == plain["metrics"]
    assert host["hash"] == plain["hash"]
    # main weights and moments in fp32; small tensors take blocks of 512 bytes
    for measured in ("held", "peak"):
        print(f"{measured}: {plain[measured]:.2f} and {host[measured]:.2f} bytes a parameter")  # noqa: T201
        assert plain[measured] - host[measured] == pytest.approx(12, rel=0.2)
    assert host["locked"] == pytest.approx(12, rel=0.01)
