"""A run that trains an adapter: real vLLM serves each version of it, and every mode, also killed and resumed, trains
the same one, bit for bit."""

import dataclasses
import json
import os
import signal
from functools import partial
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.e2e.run.test_external_jobs import job_flags
from tests.helpers import tiny_models
from tests.helpers.adapters import merged
from tests.helpers.jobs import gateway_address, produce
from tests.helpers.metrics_page import undocumented
from tests.helpers.outside_engine import OutsideEngine
from tests.helpers.training import Finished, TinyTask, Training, train
from vime.cli.queue import newest_checkpoint
from vime.config.lora import LINEAR_LAYERS, AdapterInfo
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


def assert_the_same(never_stopped: Finished, streamed: Finished) -> None:
    """Its rounds up to the last one made the same adapters, and the audit finds nothing."""
    assert streamed.code == 0, streamed.output
    wanted = hashes(never_stopped)
    assert hashes(streamed) == {version: wanted[version] for version in hashes(streamed)}
    assert max(hashes(streamed)) == ROUNDS
    saved = newest_checkpoint(streamed.run_dir)
    assert audit_run(streamed.run_dir, saved=saved, claims=partial(read_claims, streamed.run_dir)).findings == ()


@pytest.mark.nightly
def test_streaming_trains_the_same_adapter(never_stopped: Finished, flags: list[str], tmp_path: Path) -> None:
    """In the usual session: that streaming trains a model as mode off does, test_equivalence_ladder.py; that an adapter
    resumes with equal bits, test_fsdp_lora.py. Both together, and killed: the next."""
    streamed = train([*flags, "--transferqueue-mode", "streaming"], tmp_path / "run")
    assert_the_same(never_stopped, streamed)
    assert min(hashes(streamed)) == 0


@pytest.mark.nightly
def test_streaming_killed_in_the_middle_and_resumed_trains_the_same_adapter(
    never_stopped: Finished, flags: list[str], tmp_path: Path
) -> None:
    streaming = [*flags, "--transferqueue-mode", "streaming", "--save", str(tmp_path / "checkpoints")]
    training = Training("train.py", streaming, tmp_path / "killed")
    training.wait_for_event("weights_confirmed", count=2)
    os.kill(training.process.pid, signal.SIGKILL)
    killed = training.finish()
    assert killed.code == -signal.SIGKILL
    assert hashes(killed) == {version: hashes(never_stopped)[version] for version in hashes(killed)}
    resumed = train([*streaming, "--load", str(tmp_path / "checkpoints")], tmp_path / "resumed")
    assert_the_same(never_stopped, resumed)


@pytest.mark.nightly
def test_each_token_was_sampled_with_the_adapter_whose_version_it_carries(tiny_task: TinyTask, tmp_path: Path) -> None:
    """By transformers and the adapters that were saved, which know nothing of versions, engines and caches. Requests
    outlive several updates, prompts fill blocks of the prefix cache and come again in other rounds."""
    rounds, rank, alpha = 8, 4, 32.0
    records = [json.loads(line) for line in tiny_task.prompts.read_text().splitlines()[:6]]
    prompts = tmp_path / "prompts.jsonl"
    long = [{**record, "input": " ".join([record["input"]] * 8)} for record in records]
    prompts.write_text("".join(json.dumps(record) + "\n" for record in long))
    task = dataclasses.replace(tiny_task, prompts=prompts)
    more = ["--transferqueue-mode", "streaming", "--max-staleness", "2", "--train-backend", "fsdp", "--lr", "1e-2"]
    more += ["--lora-rank", str(rank), "--lora-alpha", str(alpha), "--num-rollout", str(rounds)]
    more += ["--rollout-max-context-len", "512", "--rollout-max-response-len", "300", "--save-interval", "1"]
    more += ["--save", str(tmp_path / "saved"), "--save-hf", str(tmp_path / "adapter_{rollout_id}")]
    more += ["--save-debug-rollout-data", str(tmp_path / "dump_{rollout_id}.jsonl")]
    finished = train([*task.flags(), *more], tmp_path / "run", script="train_async.py")
    assert finished.code == 0, finished.output
    base, info = (
        tiny_models.load(tiny_task.model),
        AdapterInfo(rank=rank, alpha=alpha, target_modules=list(LINEAR_LAYERS)),
    )
    whole = {0: base}
    older, prompt_lengths = 0, set()
    for number in range(rounds):
        for line in (tmp_path / f"dump_{number}.jsonl").read_text().splitlines():
            sample = json.loads(line)["sample"]
            [(version, _, _)] = sample["token_policy_versions"]  # no completion is a mixture
            if version not in whole:
                tensors = load_file(tmp_path / f"adapter_{version - 1}" / "adapter_model.safetensors")
                whole[version] = merged(base, tensors, info)
            logp = tiny_models.log_probs(whole[version], sample["tokens"])[-sample["response_length"] :]
            assert max(abs(a - b) for a, b in zip(logp, sample["rollout_log_probs"], strict=True)) < 1e-4
            older += version < number
            prompt_lengths.add(len(sample["tokens"]) - sample["response_length"])
    assert older > 0
    assert len(whole) > 3
    assert min(prompt_lengths) > 32  # tokens of a block
    assert max(line.get("rollout/prefix_cached_share", 0) for line in finished.metrics().values()) > 0


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_run_of_adapters_that_is_resumed_on_an_engine_of_others_goes_on(tiny_task: TinyTask, tmp_path: Path) -> None:
    """The engine still has the adapters of the run before: some by the numbers of versions that come again, one with a
    higher number than any that comes."""
    adapter = ["--train-backend", "fsdp", "--lora-rank", "4", "--lr", "1e-2", "--check-weight-update-equal"]
    with OutsideEngine(tmp_path, [*tiny_task.flags(), *adapter]) as engine:
        engine.wait_ready()
        task = [*tiny_task.flags(), *adapter, "--rollout-external-engine-addrs", engine.place]
        task += ["--rollout-external-engine-keys", str(engine.keys), "--save", str(tmp_path / "saved")]
        first = train([*task, "--save-interval", "2", "--num-rollout", "5"], tmp_path / "first")
        assert first.code == 0, first.output
        (tmp_path / "saved" / "latest_checkpointed_iteration.txt").write_text("3")  # of round 3: version 4 comes again
        again = ["--save-interval", "2", "--load", str(tmp_path / "saved"), "--num-rollout", "7"]
        second = train([*task, *again], tmp_path / "second")
        assert second.code == 0, second.output
    lines = second.metrics()
    assert len(lines) > 2
    assert max(line["train/train_rollout_logprob_abs_diff"] for line in lines.values()) < 1e-4


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_job_outside_samples_with_the_adapter_merged_into_its_model(tiny_task: TinyTask, tmp_path: Path) -> None:
    """Its engine knows of no adapter: it is started again with each version that the run writes."""
    address, run = gateway_address(), tmp_path / "run"
    flags = [*tiny_task.flags(), "--train-backend", "fsdp", "--lora-rank", "4", "--lr", "1e-2", "--num-rollout", "4"]
    flags += ["--transferqueue-mode", "external", "--transferqueue-address", address, "--rollout-num-engines", "0"]
    job = produce(tmp_path / "job", address, "job-a", job_flags(tiny_task), run=run)
    finished = train([*flags, "--reference-mode"], run)
    assert finished.code == 0, finished.output
    assert job.finish(deadline_s=60).code == 0
    assert len(set(hashes(finished).values())) == 5
    found = [line["train/train_rollout_logprob_abs_diff"] for line in finished.metrics().values()]
    assert (len(found), max(found) < 1e-4) == (4, True)


def flags_of(finished: Finished, name: str) -> str:
    words = (finished.run_dir / "command.sh").read_text().split()
    return words[words.index(name) + 1]
