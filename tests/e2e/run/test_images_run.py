"""Runs on prompts with images: real vLLM and the FSDP trainer agree, and modes off and streaming do bit for bit."""

import json
from functools import partial
from pathlib import Path

import pytest

from tests.helpers import tiny_images
from tests.helpers.metrics_page import undocumented
from tests.helpers.training import Finished, train
from vime.handoff.audit import audit_run
from vime.observability.claims import read_claims

ROUNDS = 2
REWARD = '''
from vime.types import Sample

async def colour_reward(args, sample: Sample, **kwargs) -> float:
    """The share of tokens whose id is the colour's number modulo 4: a model that does not see the image gets 1/4."""
    answer = sample.tokens[sample.prompt_length:]
    return sum(token % 4 == sample.label for token in answer) / len(answer)
'''


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """One record of five is text alone, so that a rank may have a micro-batch without images."""
    directory = tmp_path_factory.mktemp("images")
    model = tiny_images.make_idefics3(directory / "model")
    (directory / "reward.py").write_text(REWARD)
    text = "USER <image> What colour ? ASSISTANT"
    records: list[dict[str, object]] = []
    for number, colour in enumerate(tiny_images.COLOURS):
        (directory / f"{colour}.png").write_bytes(tiny_images.png(colour))
        records.append({"input": text, "images": [f"{colour}.png"], "label": number})
    records.insert(1, {"input": "USER What colour ? ASSISTANT", "label": 0})
    prompts = directory / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(record) + "\n" for record in records))
    return [
        "--hf-checkpoint", str(model), "--prompt-data", str(prompts), "--label-key", "label",
        "--multimodal-keys", '{"image": "images"}', "--custom-rm-path", f"{directory / 'reward.py'}:colour_reward",
        "--device", "cpu", "--train-backend", "fsdp", "--actor-num-gpus-per-node", "2", "--reference-mode",
        "--rollout-batch-size", "4", "--n-samples-per-prompt", "4", "--rollout-max-response-len", "4",
        "--rollout-max-context-len", "64", "--micro-batch-size", "2", "--lr", "1e-3", "--num-rollout", str(ROUNDS),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def streamed(flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> Finished:
    directory = tmp_path_factory.mktemp("streaming")
    dump = str(directory / "samples_{rollout_id}.jsonl")
    finished = train(
        [*flags, "--transferqueue-mode", "streaming", "--save-debug-rollout-data", dump], directory / "run"
    )
    assert finished.code == 0, finished.output
    return finished


def test_engine_and_trainer_agree_on_prompts_with_images(streamed: Finished) -> None:
    lines = streamed.metrics()
    assert sorted(lines)[:ROUNDS] == list(range(ROUNDS))
    assert max(lines[number]["train/train_rollout_logprob_abs_diff"] for number in range(ROUNDS)) < 1e-4
    assert len(set(streamed.confirmed_hashes())) == ROUNDS + 1
    assert undocumented(name for line in lines.values() for name in line) == []


def test_the_audit_and_the_dump_know_the_images(streamed: Finished) -> None:
    report = audit_run(streamed.run_dir, saved=None, claims=partial(read_claims, streamed.run_dir))
    assert report.findings == ()
    [first] = list(streamed.run_dir.parent.glob("samples_0.jsonl"))
    kept = [json.loads(line) for line in first.read_text().splitlines()]
    assert any("data:image/png;base64" in json.dumps(record) for record in kept)


@pytest.mark.parametrize("mode", ["off", pytest.param("buffer", marks=pytest.mark.nightly)])
def test_in_another_mode_the_same_weights_are_trained(
    flags: list[str], streamed: Finished, tmp_path: Path, mode: str
) -> None:
    finished = train([*flags, "--transferqueue-mode", mode], tmp_path / mode)
    assert finished.code == 0, finished.output
    assert finished.confirmed_hashes() == streamed.confirmed_hashes()
