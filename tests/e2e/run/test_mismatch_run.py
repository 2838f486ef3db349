"""Faults between engine and trainer, each seeded into a live run: recorded in its round, named when the run is over."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.mismatch_faults import FAULTS
from tests.helpers.training import TinyTask, train

CAUSES = {
    "temperature": "temperature",
    "top_p": "top-p/top-k truncation",
    "top_k": "top-p/top-k truncation",
    "tokens": "tokenisation",
    "shift": "off-by-one",
}

MADE = '''"""Answers that no engine sampled, with log-probabilities that nobody computed."""

from vime.types import RolloutFnTrainOutput, SampleStatus, VersionSpan


def generate_rollout(args, rollout_id, data_source, evaluation=False):
    groups = data_source.get_samples(args.rollout_batch_size)
    for group in groups:
        for number, sample in enumerate(group):
            sample.append_response_tokens([5 + number, 9, 7, 2], [-1.0] * 4, versions=[VersionSpan(rollout_id, 0, 4)])
            sample.reward, sample.status = float(number), SampleStatus.COMPLETED
    return RolloutFnTrainOutput(samples=groups)
'''


def vime(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "vime", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


@pytest.mark.nightly
def test_each_fault_of_a_generate_plug_in_is_named_when_the_run_is_over(tiny_task: TinyTask, tmp_path: Path) -> None:
    flags = [*tiny_task.flags(), "--num-rollout", str(len(FAULTS)), "--rollout-max-response-len", "24"]
    flags += ["--custom-generate-function-path", "tests.helpers.mismatch_faults.faulty"]
    finished = train(flags, tmp_path / "run")
    assert finished.code == 0, finished.output
    metrics = finished.metrics()
    assert "vime diagnose" in finished.output
    diagnosed = vime("diagnose", str(tmp_path / "run"), "--json")  # the run is over: nothing but its directory is left
    told = {line["round"]: line for line in map(json.loads, diagnosed.stdout.splitlines())}
    named = {rollout_id: line["cause"] for rollout_id, line in told.items()}
    assert metrics[0]["train/train_rollout_logprob_abs_diff"] < 1e-5
    assert named == {FAULTS.index(fault): cause for fault, cause in CAUSES.items()}
    again = len(FAULTS) - 1  # the temperature: asked for by its own test alone, and not recorded again
    assert [line["also_in"] for line in told.values()] == [[again], [], [], [], []]
    assert (
        f"  also in   round {again}: the same cause, not recorded again"
        in vime("diagnose", str(tmp_path / "run")).stdout
    )
    text = vime("diagnose", str(tmp_path / "run")).stdout
    assert re.findall("  cause     (.*)", text) == list(named.values())
    assert vime("diagnose", str(tmp_path / "run"), "--round", str(again)).stdout.startswith("round 1, before")
    assert "  shown     top-p/top-k truncation" in vime("diagnose", str(tmp_path / "run"), "--round", "3").stdout
    assert [event["rollout_id"] for event in finished.events("disagreement")] == [*named, again]
    assert "The cause is that of round 1: temperature" in finished.output
    for rollout_id in named:
        assert told[rollout_id]["mean"] == metrics[rollout_id]["train/train_rollout_logprob_abs_diff"] > 1e-4
        assert f"warning: round {rollout_id}, before it was trained: trainer and engine differ" in finished.output


@pytest.mark.nightly
def test_stop_ends_a_run_before_a_weight_moves(tiny_task: TinyTask, tmp_path: Path) -> None:
    """Rounds made by hand, so that no engine is needed: version 0, and a log-probability of -1 for each token. In the
    usual session, with actors alone: test_mismatch_guard.py."""
    (tmp_path / "made.py").write_text(MADE)
    flags = [*tiny_task.flags(), "--num-rollout", "1", "--debug-train-only", "--on-train-rollout-diff", "stop"]
    flags += ["--rollout-function-path", f"{tmp_path / 'made.py'}:generate_rollout", "--save-interval", "1"]
    finished = train(flags, tmp_path / "run")
    assert finished.code == 3, finished.output
    [event] = finished.events("disagreement")
    assert event["difference"] > 1e-4
    assert "cause     unknown" in vime("diagnose", str(tmp_path / "run"), "--round", "0").stdout
    assert "failed: round 0, before it was trained: trainer and engine differ by" in finished.output
    assert "(--on-train-rollout-diff stop)" in finished.output
    assert finished.events("round_trained") == []
    assert finished.events("checkpoint_saved") == []
