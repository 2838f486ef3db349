"""What scripts/run-images-cpu.sh begins with and how it ends: pictures, a model that guesses, the verdict."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.rollout_setup import EXAMPLES, example_module, make_args
from vime.rollout.data_source import RolloutDataSource

images = example_module("images/prepare.py")


def run_example(name: str, *arguments: object, expected_code: int = 0) -> str:
    """Output of an example script, run as a user runs it."""
    command = [sys.executable, str(EXAMPLES / "images" / name), *map(str, arguments)]
    ran = subprocess.run(command, capture_output=True, timeout=240, text=True, check=False)
    assert ran.returncode == expected_code, ran.stdout + ran.stderr
    return ran.stdout + ran.stderr


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("prepared")
    run_example("prepare.py", "--data-dir", home, "--num-train", 12, "--num-eval", 36)
    return home


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_second_preparation_does_nothing(prepared: Path) -> None:
    before = (prepared / "model" / "model.safetensors").stat().st_mtime_ns
    assert "is up to date" in run_example("prepare.py", "--data-dir", prepared, "--num-train", 12, "--num-eval", 36)
    assert (prepared / "model" / "model.safetensors").stat().st_mtime_ns == before


def test_whoever_answers_by_the_swapped_picture_is_right_once_in_six(prepared: Path) -> None:
    """36 pictures of 6 colours: with each label every colour stands once, so a model that sees has 6 of 36 right, and
    one that does not look cannot do better in either file: every label is as frequent."""
    held_out, swapped = records(prepared / "eval.jsonl"), records(prepared / "swapped.jsonl")
    colour_of = {record["images"][0]: record["label"] for record in held_out}
    assert len(colour_of) == 36
    assert sum(colour_of[record["images"][0]] == record["label"] for record in swapped) == 6
    pairs = Counter((record["label"], colour_of[record["images"][0]]) for record in swapped)
    assert set(pairs.values()) == {1}
    assert len(pairs) == 36
    for file in (held_out, swapped):
        assert set(Counter(record["label"] for record in file).values()) == {6}
        assert len({json.dumps(record["input"]) for record in file}) == 1  # the text tells nothing


def test_pictures_load_as_prompts_and_those_held_out_are_others(prepared: Path) -> None:
    args = make_args(
        "--hf-checkpoint", prepared / "model", "--prompt-data", prepared / "train.jsonl", "--label-key", "label",
        "--apply-chat-template", "--multimodal-keys", '{"image": "images"}',
    )  # fmt: skip
    source = RolloutDataSource(args)
    assert len(source) == 12
    sample = source.get_samples(1)[0][0]
    assert sample.tokens.count(images.IMAGE) == images.IMAGE_TOKENS
    contents = [file.read_bytes() for file in sorted((prepared / "pictures").iterdir())]
    assert len(set(contents)) == len(contents) == 12 + 36


def test_the_model_answers_in_form_and_guesses(prepared: Path) -> None:
    made = json.loads((prepared / "made.json").read_text())
    assert images.refusal(made) is None
    assert abs(made["right"] - 1 / 6) < 0.06
    assert images.refusal({"form": 0.9, "name": 0.2}) is not None
    assert images.refusal({"form": 1.0, "name": 0.9}) is not None


@pytest.mark.parametrize(
    ("after", "swapped", "expected_code", "said"),
    [
        (0.95, 0.17, 0, "It learned to look: 0.17 of the held-out pictures right before, 0.95 after; 0.17 with each"),
        (0.40, 0.17, 1, "did NOT learn"),
        (0.95, 0.60, 1, "did NOT learn"),  # whatever it has learned, it is not the picture
    ],
)
def test_the_run_says_whether_it_learned(
    tmp_path: Path, after: float, swapped: float, expected_code: int, said: str
) -> None:
    shares = [(0.17, 0.16), (after, swapped)]
    metrics = [{"eval/held_out/reward_mean": one, "eval/swapped/reward_mean": other} for one, other in shares]
    lines = [
        json.dumps({"step": 0, "metrics": each}) for each in [metrics[0], {"rollout/reward_mean": 1.0}, metrics[1]]
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    assert said in run_example("check.py", tmp_path, expected_code=expected_code)


def test_a_run_that_ended_early_has_no_verdict(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 0, "metrics": {"rollout/reward_mean": 0.9}}))
    assert "has 0 evaluations, expected one before" in run_example("check.py", tmp_path, expected_code=1)
