"""The quick-start's preparation script, run as a user runs it (with a two-step warm start)."""

import json
import subprocess
import sys

import pytest

from tests.helpers.rollout_setup import EXAMPLES, make_args
from vime.rollout.data_source import RolloutDataSource


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """The script run twice with a two-step warm start: directory, output of the second run."""
    home = tmp_path_factory.mktemp("prepared")
    command = [
        sys.executable, str(EXAMPLES / "quickstart/prepare.py"), "--model-dir", str(home / "model"),
        "--data-dir", str(home / "data"), "--steps", "2", "--num-train", "40", "--num-eval", "8",
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    stamp = (home / "model/model.safetensors").stat().st_mtime_ns
    second = subprocess.run(command, check=True, capture_output=True, timeout=120, text=True)
    return home, stamp, second.stdout


def test_a_second_preparation_does_nothing(prepared):
    home, stamp, output = prepared
    assert output.count("is up to date") == 2
    assert (home / "model/model.safetensors").stat().st_mtime_ns == stamp


def test_prepared_data_load_as_prompts_and_evaluation_prompts_are_held_out(prepared):
    home, _, _ = prepared
    args = make_args(
        "--hf-checkpoint", home / "model", "--prompt-data", home / "data/train.jsonl", "--label-key", "label"
    )
    source = RolloutDataSource(args)
    assert len(source) == 40
    sample = source.get_samples(1)[0][0]
    assert sample.tokens[0] == 1
    assert len(sample.tokens) == len(sample.prompt) + 1
    train, held_out = (
        {json.loads(line)["input"] for line in (home / f"data/{name}.jsonl").open()} for name in ("train", "eval")
    )
    assert (len(train), len(held_out), train & held_out) == (40, 8, set())
