"""Runs on prompts with images: real vLLM and the FSDP trainer agree, every mode trains the same weights bit for bit,
and a kill, two workers, cut completions and a picture that vanishes cost what they must and no more."""

import base64
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from tests.e2e.run.test_lost_engines import TWO_ENGINES, VLLM, assert_the_run_went_on, kill_and_wait
from tests.e2e.run.test_mismatch_run import CAUSES
from tests.helpers import tiny_images
from tests.helpers.metrics_page import undocumented
from tests.helpers.mismatch_faults import FAULTS
from tests.helpers.training import ROOT, Finished, Training, train
from vime.cli.queue import newest_checkpoint
from vime.handoff.audit import audit_run
from vime.observability.claims import read_claims
from vime.observability.samples import read_fates

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
    dump, prompts = str(directory / "samples_{rollout_id}.jsonl"), flags[flags.index("--prompt-data") + 1]
    more = ["--transferqueue-mode", "streaming", "--save-debug-rollout-data", dump, "--check-weight-update-equal"]
    more += ["--eval-prompt-data", "same", prompts, "--eval-interval", str(ROUNDS)]
    finished = train([*flags, *more], directory / "run")
    assert finished.code == 0, finished.output
    return finished


def test_engine_and_trainer_agree_on_prompts_with_images(streamed: Finished) -> None:
    lines = streamed.metrics()
    assert sorted(lines)[:ROUNDS] == list(range(ROUNDS))
    assert max(lines[number]["train/train_rollout_logprob_abs_diff"] for number in range(ROUNDS)) < 1e-4
    assert len(set(streamed.confirmed_hashes())) == ROUNDS + 1
    assert undocumented(name for line in lines.values() for name in line) == []
    assert [number for number in range(ROUNDS) if "eval/same/reward_mean" in lines[number]] == [0, ROUNDS - 1]
    assert "engines agree with the trainer within" in (streamed.run_dir / "logs" / "driver.log").read_text()


def test_the_audit_and_the_dump_know_the_images(streamed: Finished) -> None:
    report = audit_run(streamed.run_dir, saved=None, claims=partial(read_claims, streamed.run_dir))
    assert report.findings == ()
    [first] = list(streamed.run_dir.parent.glob("samples_0.jsonl"))
    kept = [json.loads(line) for line in first.read_text().splitlines()]
    assert any("data:image/png;base64" in json.dumps(record) for record in kept)


@pytest.mark.nightly
@pytest.mark.parametrize("mode", ["off", "buffer"])
def test_in_another_mode_the_same_weights_are_trained(
    flags: list[str], streamed: Finished, tmp_path: Path, mode: str
) -> None:
    finished = train([*flags, "--transferqueue-mode", mode], tmp_path / mode)
    assert finished.code == 0, finished.output
    assert finished.confirmed_hashes() == streamed.confirmed_hashes()


def hashes(finished: Finished) -> dict[int, str]:
    """Version -> content hash of the weights, as the engines computed it."""
    return {event["version"]: event["content_hash"] for event in finished.events("weights_confirmed")}


def findings(finished: Finished) -> Sequence[object]:
    saved = newest_checkpoint(finished.run_dir)
    return audit_run(finished.run_dir, saved=saved, claims=partial(read_claims, finished.run_dir)).findings


@pytest.mark.nightly
def test_streaming_killed_in_the_middle_and_resumed_trains_the_same_weights(
    streamed: Finished, flags: list[str], tmp_path: Path
) -> None:
    streaming = [*flags, "--transferqueue-mode", "streaming", "--save-interval", "1", "--save", str(tmp_path / "saved")]
    training = Training("train.py", streaming, tmp_path / "killed")
    training.wait_for_event("weights_confirmed", count=2)
    os.kill(training.process.pid, signal.SIGKILL)
    killed = training.finish()
    assert killed.code == -signal.SIGKILL
    resumed = train([*streaming, "--load", str(tmp_path / "saved")], tmp_path / "resumed")
    assert resumed.code == 0, resumed.output
    wanted = hashes(streamed)
    for part in (killed, resumed):
        assert hashes(part) == {version: wanted[version] for version in hashes(part)}
    assert max(hashes(resumed)) == ROUNDS
    assert findings(resumed) == ()


@pytest.mark.nightly
def test_two_workers_train_the_same_weights(streamed: Finished, flags: list[str], tmp_path: Path) -> None:
    more = ["--transferqueue-mode", "streaming", "--num-rollout-workers", "2"]
    finished = train([*flags, *more], tmp_path / "run")
    assert finished.code == 0, finished.output
    assert hashes(finished) == hashes(streamed)
    assert findings(finished) == ()


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", ["0", "1", "2"])
def test_the_script_of_the_page_learns_to_look(seed: str) -> None:
    """Exit code 1 when held-out pictures are not answered rightly, or swapped ones are: examples/images/check.py."""
    environment = {**os.environ, "VIME_VENV": sys.prefix, "SEED": seed}
    ran = subprocess.run(
        [ROOT / "scripts" / "run-images-cpu.sh"],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1100, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "It learned to look: 0." in ran.stdout


@pytest.mark.nightly
def test_the_group_of_a_picture_that_vanishes_is_dropped_with_a_reason(flags: list[str], tmp_path: Path) -> None:
    """The reward removes the blue picture in the first round; of five prompts four are left to train."""
    data = tmp_path / "data"
    shutil.copytree(Path(flags[flags.index("--prompt-data") + 1]).parent, data)
    reward = (data / "reward.py").read_text()
    (data / "reward.py").write_text(
        reward.replace("    answer =", f"    Path({str(data / 'blue.png')!r}).unlink(missing_ok=True)\n    answer =")
        .replace("from vime", "from pathlib import Path\n\nfrom vime", 1)
    )  # fmt: skip
    fast = [flag for flag in flags if flag != "--reference-mode"]
    more = ["--prompt-data", str(data / "prompts.jsonl"), "--custom-rm-path", f"{data / 'reward.py'}:colour_reward"]
    finished = train([*fast, *more, "--transferqueue-mode", "streaming", "--num-rollout", "4"], tmp_path / "run")
    assert finished.code == 0, finished.output
    assert findings(finished) == ()
    dropped = [fate.dropped.get("image_changed", ()) for fate in read_fates(finished.run_dir).values()]
    assert any(dropped)
    log = (finished.run_dir / "logs" / "rollout-manager.log").read_text()
    assert "blue.png has changed since the run started: FileNotFoundError" in log
    assert "prompts.jsonl:4: image 1 of 1" in log


def trained_well(finished: Finished, num_rounds: int) -> None:
    assert finished.code == 0, finished.output
    lines = finished.metrics()
    assert sorted(lines) == list(range(num_rounds))
    found = [line["train/train_rollout_logprob_abs_diff"] for line in lines.values()]
    assert max(each for each in found if each == each) < 1e-4  # of a round of older tokens alone it is NaN


LONG = ["--rollout-max-response-len", "200", "--rollout-max-context-len", "256", "--num-rollout", "6"]


@pytest.mark.nightly
def test_train_async_trains_prompts_with_images(flags: list[str], tmp_path: Path) -> None:
    """Mode buffer, of which every token is a version old: engines score some rows again. Streaming: the next test."""
    fast = [flag for flag in flags if flag != "--reference-mode"]
    finished = train([*fast, "--max-staleness", "1", *LONG], tmp_path / "run", script="train_async.py")
    trained_well(finished, 6)


@pytest.mark.nightly
def test_completions_that_a_publish_cut_are_continued_with_their_images(flags: list[str], tmp_path: Path) -> None:
    dump = str(tmp_path / "samples_{rollout_id}.jsonl")
    more = ["--transferqueue-mode", "streaming", "--max-staleness", "1", "--partial-rollout", "--pause-mode", "abort"]
    fast = [flag for flag in flags if flag != "--reference-mode"]
    finished = train(
        [*fast, *LONG, *more, "--save-debug-rollout-data", dump], tmp_path / "run", script="train_async.py"
    )
    trained_well(finished, 6)
    assert findings(finished) == ()
    lines = [line for file in tmp_path.glob("samples_*.jsonl") for line in file.read_text().splitlines()]
    samples = [json.loads(line)["sample"] for line in lines]
    with_images = [sample for sample in samples if sample["multimodal_inputs"]]
    assert any(len({span[0] for span in sample["token_policy_versions"]}) > 1 for sample in with_images)


SLOW = """
import asyncio

async def slow(args, sample, **kwargs):
    await asyncio.sleep(2)
    return await colour_reward(args, sample)
"""


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_a_run_with_images_goes_on_while_one_of_two_vllm_engines_is_killed(flags: list[str], tmp_path: Path) -> None:
    """The engine that comes back has no picture in its caches. What was recorded of a prompt still fits: its text, its
    picture, and the places of that picture among its tokens."""
    directory, dump = Path(flags[flags.index("--prompt-data") + 1]).parent, tmp_path / "dump"
    reward = tmp_path / "slow.py"
    reward.write_text((directory / "reward.py").read_text() + SLOW)
    fast = [flag for flag in flags if flag != "--reference-mode"]
    more = [*TWO_ENGINES, "--num-rollout", "40", "--custom-rm-path", f"{reward}:slow", "--check-weight-update-equal"]
    more += ["--save-debug-rollout-data", str(dump / "{rollout_id}.jsonl")]
    training = Training("train.py", [*fast, *more], tmp_path / "run")
    training.wait_for_event("round_trained", count=2)
    kill_and_wait(training, VLLM, 1, times=1)
    finished = training.finish(900)
    assert_the_run_went_on(finished, 40, num_kills=1)
    trained_well(finished, 40)
    files = {base64.b64encode(tiny_images.png(colour)).decode(): colour for colour in tiny_images.COLOURS}
    shown = set()
    for record in (json.loads(line) for file in dump.iterdir() for line in file.read_text().splitlines()):
        sample = record["sample"]
        prompt = sample["tokens"][: len(sample["tokens"]) - sample["response_length"]]
        inputs = sample["multimodal_inputs"]
        if inputs is None:
            assert prompt == [8, 10, 11, 12, 9]
            continue
        [image] = inputs["images"]
        colour = files[image.removeprefix("data:image/png;base64,")]
        assert list(tiny_images.COLOURS).index(colour) == sample["label"]
        assert prompt == [8, *tiny_images.IMAGE_IDS, 10, 11, 12, 9]
        shown.add(colour)
    assert shown == set(tiny_images.COLOURS)


def drawn(mode: str, kind: str, *, width: int = 40, height: int = 24, **settings: object) -> bytes:
    """A picture of which no two parts are alike."""
    from PIL import Image

    chance, buffer = np.random.default_rng(width), io.BytesIO()
    picture = Image.fromarray(chance.integers(0, 256, (height, width, len(mode)), dtype=np.uint8), mode=mode)
    if settings.pop("palette", False):
        picture = picture.quantize(8)
    if settings.pop("moves", False):
        settings |= {"save_all": True, "append_images": [picture.rotate(180)]}
    picture.save(buffer, format=kind, **settings)
    return buffer.getvalue()


def lying() -> bytes:
    """A photograph that its EXIF turns by 90 degrees."""
    from PIL import Image

    exif = Image.Exif()
    exif[0x0112] = 6
    return drawn("RGB", "JPEG", exif=exif)


PICTURES = {
    "transparent.png": lambda: drawn("RGBA", "PNG"),
    "palette.png": lambda: drawn("RGB", "PNG", palette=True, transparency=3),
    "lying.jpg": lying,
    "png_by_another_name.jpg": lambda: drawn("RGB", "PNG", width=33),
    "moving.webp": lambda: drawn("RGBA", "WEBP", moves=True),
    "point.png": lambda: drawn("RGB", "PNG", width=1, height=1),
    "line.png": lambda: drawn("RGB", "PNG", width=3000, height=1),
    "large.png": lambda: drawn("RGB", "PNG", width=1400, height=1400),  # 6 MB, which the router passes on
}


@pytest.mark.nightly
@pytest.mark.parametrize("is_split", [False, True], ids=["whole", "in tiles"])
def test_engine_and_trainer_see_the_same_in_odd_pictures(flags: list[str], tmp_path: Path, is_split: bool) -> None:
    """Also two in a prompt, and one twice; in micro-batches of any number of rows; and the export has every tensor."""
    model = tmp_path / "model"
    shutil.copytree(Path(flags[flags.index("--hf-checkpoint") + 1]), model)
    settings = json.loads((model / "processor_config.json").read_text())
    if is_split:  # up to four tiles and the whole
        settings["image_processor"] |= {"do_image_splitting": True, "size": {"longest_edge": 2 * tiny_images.SIDE}}
    (model / "processor_config.json").write_text(json.dumps(settings))
    for name, make in PICTURES.items():
        (tmp_path / name).write_bytes(make())
    one, two = "USER <image> What colour ? ASSISTANT", "USER <image> and <image> What colour ? ASSISTANT"
    records = [{"input": one, "images": name, "label": 0} for name in PICTURES]
    records.append({"input": two, "images": ["lying.jpg", "transparent.png"], "label": 1})
    records.append({"input": two, "images": ["palette.png", "palette.png"], "label": 2})
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(record) + "\n" for record in records))
    fast = [flag for flag in flags if flag != "--reference-mode"]
    at = fast.index("--micro-batch-size")
    more = ["--hf-checkpoint", str(model), "--prompt-data", str(prompts), "--transferqueue-mode", "streaming"]
    more += ["--rollout-max-context-len", "256", "--rollout-batch-size", "5", "--num-rollout", "4"]
    more += ["--use-dynamic-batch-size", "--max-tokens-per-gpu", "256", "--check-weight-update-equal"]
    more += ["--eval-prompt-data", "same", str(prompts), "--eval-interval", "4"]
    more += ["--save-interval", "4", "--save-hf", str(tmp_path / "export_{rollout_id}"), "--save", str(tmp_path / "s")]
    finished = train([*fast[:at], *fast[at + 2 :], *more], tmp_path / "run")
    trained_well(finished, 4)
    assert findings(finished) == ()
    names = []
    for directory in (model, tmp_path / "export_3"):
        with safe_open(directory / "model.safetensors", "pt") as file:
            names.append(set(file.keys()))
    assert names[0] == names[1]
    assert (tmp_path / "export_3" / "processor_config.json").read_text() == json.dumps(settings)


@pytest.mark.nightly
def test_each_fault_of_a_generate_plug_in_is_named_on_prompts_with_images(flags: list[str], tmp_path: Path) -> None:
    """As in test_mismatch_run.py. The engine scores the recorded rows again: with their images it agrees."""
    fast = [flag for flag in flags if flag != "--reference-mode"]
    more = [
        "--custom-generate-function-path",
        "tests.helpers.mismatch_faults.faulty",
        "--num-rollout",
        str(len(FAULTS)),
    ]
    more += ["--rollout-max-response-len", "24"]
    finished = train([*fast, *more], tmp_path / "run")
    assert finished.code == 0, finished.output
    assert finished.metrics()[0]["train/train_rollout_logprob_abs_diff"] < 1e-5
    command = [sys.executable, "-m", "vime", "diagnose", str(tmp_path / "run"), "--json"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    told = {line["round"]: line["cause"] for line in map(json.loads, shown.splitlines())}
    assert told == {FAULTS.index(fault): cause for fault, cause in CAUSES.items()}  # what comes again is not recorded
    for file in sorted((tmp_path / "run" / "mismatch").glob("*.json")):
        record = json.loads(file.read_text())
        [engine] = record["engines"]
        own = next(one["log_probs"] for one in record["rescored"] if one["rule"]["temperature"] == 1.0)
        for ours, its in zip(own, engine["log_probs"], strict=True):
            assert max(abs(one - other) for one, other in zip(ours, its, strict=True)) < 1e-3
