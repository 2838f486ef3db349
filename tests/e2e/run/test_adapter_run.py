"""A run that trains an adapter: real vLLM serves each version of it, and every mode, also killed and resumed, trains
the same one, bit for bit."""

import json
import os
import signal
from functools import partial
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.helpers.metrics_page import undocumented
from tests.helpers.training import Finished, TinyTask, Training, train
from vime.cli.queue import newest_checkpoint
from vime.handoff.audit import audit_run
from vime.observability.claims import read_claims
from vime.weights.hashing import content_hash

ROUNDS = 4


TENSOR_PARALLEL = ["--train-backend", "megatron", "--tensor-model-parallel-size", "2"]


@pytest.fixture(
    scope="module",
    params=[["--train-backend", "fsdp"], pytest.param(TENSOR_PARALLEL, marks=pytest.mark.nightly)],
    ids=["fsdp", "megatron"],
)
def flags(tiny_task: TinyTask, request: pytest.FixtureRequest) -> list[str]:
    """Two ranks hold the shards; the reference is the policy without its adapter. That megatron's adapter is PEFT's in
    every layout: test_megatron_lora.py."""
    return [
        *tiny_task.flags(), "--num-rollout", str(ROUNDS), "--save-interval", "1", "--reference-mode", *request.param,
        "--actor-num-gpus-per-node", "2", "--lora-rank", "4", "--lr", "1e-2", "--use-kl-loss", "--kl-loss-coef", "0.01",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def never_stopped(flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> Finished:
    directory = tmp_path_factory.mktemp("off")
    finished = train([*flags, "--save-hf", str(directory / "adapter_{rollout_id}")], directory / "run")
    assert finished.code == 0, finished.output
    return finished


def hashes(finished: Finished) -> dict[int, str]:
    """Version -> content hash of the adapter, as each engine computed it."""
    return {event["version"]: event["content_hash"] for event in finished.events("weights_confirmed")}


def test_the_adapter_alone_travels_and_engine_and_trainer_agree(never_stopped: Finished) -> None:
    assert sorted(hashes(never_stopped)) == list(range(ROUNDS + 1))
    assert len(set(hashes(never_stopped).values())) == ROUNDS + 1
    lines = never_stopped.metrics()
    num_bytes = {lines[number]["weights/publish_bytes"] for number in range(ROUNDS)}
    whole = sum(file.stat().st_size for file in Path(flags_of(never_stopped, "--hf-checkpoint")).glob("*.safetensors"))
    assert max(num_bytes) < whole / 2
    assert len(num_bytes) == 1
    assert max(line["train/train_rollout_logprob_abs_diff"] for line in lines.values()) < 1e-4
    assert lines[0]["train/kl_loss"] == 0  # B is 0: the policy is its base
    assert lines[ROUNDS - 1]["train/kl_loss"] > 0
    assert undocumented(name for line in lines.values() for name in line) == []


def test_the_directory_that_is_saved_holds_what_the_engines_confirmed(never_stopped: Finished) -> None:
    """That PEFT and vLLM load such a directory: test_adapter_files.py, and test_engine_adapters.py, whose engines load
    every adapter from one."""
    for version, confirmed in hashes(never_stopped).items():
        directory = never_stopped.run_dir.parent / f"adapter_{version - 1}"  # saved after the round that made it
        if version > 0:
            assert content_hash(load_file(directory / "adapter_model.safetensors")) == confirmed
    assert json.loads((directory / "adapter_config.json").read_text())["r"] == 4


def test_streaming_killed_in_the_middle_and_resumed_trains_the_same_adapter(
    never_stopped: Finished, flags: list[str], tmp_path: Path
) -> None:
    streaming = [*flags, "--transferqueue-mode", "streaming", "--save", str(tmp_path / "checkpoints")]
    training = Training("train.py", streaming, tmp_path / "killed")
    training.wait_for_event("weights_confirmed", count=2)
    os.kill(training.process.pid, signal.SIGKILL)
    killed = training.finish()
    assert killed.code == -signal.SIGKILL
    resumed = train([*streaming, "--load", str(tmp_path / "checkpoints")], tmp_path / "resumed")
    assert resumed.code == 0, resumed.output
    wanted = hashes(never_stopped)
    for part in (killed, resumed):
        assert hashes(part) == {version: wanted[version] for version in hashes(part)}
    assert max(hashes(resumed)) == ROUNDS
    saved = newest_checkpoint(resumed.run_dir)
    assert audit_run(resumed.run_dir, saved=saved, claims=partial(read_claims, resumed.run_dir)).findings == ()


def flags_of(finished: Finished, name: str) -> str:
    words = (finished.run_dir / "command.sh").read_text().split()
    return words[words.index(name) + 1]
