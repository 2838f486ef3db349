"""`vime diagnose` on records that no run made: two rounds, of which the numbers say the cause."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from vime.cli.main import main
from vime.observability.mismatch_record import (
    MismatchRecord,
    RecordedRow,
    RescoredLogprobs,
    Stage,
    record_path,
    write_record,
)
from vime.observability.run_dir import RunDir
from vime.training.evidence import DIFFERENCE
from vime.types import SamplingRule

TRAINER = [-1.0, -3.0, -0.5, -2.0, -4.0, -1.5]
SHIFTED = [*TRAINER[1:], -1.0]  # the log-probability of the next token: 5 of 6 are explained, the last cannot be
# mean of |recorded - trainer|: (2 + 2.5 + 1.5 + 2 + 2.5 + 0.5) / 6 = 11 / 6


def record(rollout_id: int, recorded: list[float], *rescored: RescoredLogprobs) -> MismatchRecord:
    row = RecordedRow(
        sample_index=8, group_index=2, attempt=0, producer_id="", status="completed", versions=[(3, 0, 6)],
        prompt_tokens=[1], first_token=0, response_tokens=[5, 6, 7, 8, 9, 4], recorded=recorded, trainer=TRAINER,
        is_compared=[True] * 6, text=None,
    )  # fmt: skip
    return MismatchRecord(
        rollout_id=rollout_id, stage=Stage.BEFORE_TRAINING, version=3, rule=SamplingRule(), threshold=1e-4,
        mean=11 / 6, largest=2.5, num_tokens=6, rows=[row], rescored=list(rescored),
    )  # fmt: skip


HALF = [1.25 * value for value in TRAINER]
BY_TEMPERATURE = RescoredLogprobs(rule=SamplingRule(temperature=0.8), log_probs=[HALF])


@pytest.fixture
def run(tmp_path: Path) -> Path:
    config = {"agreement": {"train_rollout_diff_threshold": 1e-4, "on_train_rollout_diff": "warn"}}
    with RunDir.create(str(tmp_path / "run"), json.dumps(config)) as claimed:
        pass
    return claimed.path


@pytest.fixture
def recorded(run: Path) -> Path:
    write_record(run, record(12, SHIFTED))
    write_record(run, record(4, HALF, BY_TEMPERATURE))
    return run


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(list(words)) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(list(words)) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    return printed.err


def test_each_recorded_round_is_said_with_cause_evidence_and_what_to_do(
    recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = said(capsys, "diagnose", str(recorded))
    assert text.splitlines() == [
        "round 4, before it was trained: 1.83 nats a token apart (largest 2.5, 6 tokens), expected at most 0.0001",
        "  cause     temperature",
        "  evidence  at temperature 0.8 instead of 1 the difference goes from 0.5 to 0",
        "  next      Sample at --rollout-temperature: look for another one in the generate plug-in.",
        "round 12, before it was trained: 1.83 nats a token apart (largest 2.5, 6 tokens), expected at most 0.0001",
        "  cause     off-by-one",
        "  evidence  taken as those of the next token, the difference goes from 2.1 to 0",
        "  next      Align log-probabilities with their tokens: use Sample.append_response_tokens only.",
    ]


def test_one_round_is_said_with_every_test(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "diagnose", str(recorded), "--round", "12")
    assert "round 4" not in text
    assert "  shown     off-by-one: taken as those of the next token" in text
    assert "  not shown temperature: the trainer was not asked at another temperature" in text
    assert "sample 8 of group 2" in text


def test_other_programs_get_one_object_a_line(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [json.loads(line) for line in said(capsys, "diagnose", str(recorded), "--json").splitlines()]
    assert [(line["round"], line["cause"]) for line in lines] == [(4, "temperature"), (12, "off-by-one")]
    assert lines[1]["record"] == str(record_path(recorded, 12, Stage.BEFORE_TRAINING))
    assert lines[1]["difference"]["mean"] == pytest.approx(11 / 6)


def test_another_record_gives_another_answer_and_none_gives_none(
    recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_record(recorded, replace(record(4, HALF), rescored=[]))
    assert json.loads(said(capsys, "diagnose", str(recorded), "--round", "4", "--json"))["cause"] == "unknown"
    record_path(recorded, 4, Stage.BEFORE_TRAINING).unlink()
    text = refused(capsys, "diagnose", str(recorded), "--round", "4")
    assert "no logprob mismatch of round 4 is recorded. Recorded rounds: 12." in text


def test_neither_torch_nor_ray_is_loaded(recorded: Path) -> None:
    code = (
        "import sys; from vime.cli.main import main; code = main(); print(sorted({'torch', 'ray'} & set(sys.modules)))"
    )
    words = [sys.executable, "-c", code, "diagnose", str(recorded), "--json"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_run_without_a_record_says_what_it_measured_and_how_to_record(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "no round of it was compared" in said(capsys, "diagnose", str(run))
    (run / "metrics.jsonl").write_text(json.dumps({"step": 0, "metrics": {DIFFERENCE: 3e-5}}) + "\n")
    (run / "agreement").mkdir()
    text = said(capsys, "diagnose", str(run))
    assert "the largest mean of 1 comparisons is 3e-05 nats a token" in text
    assert "above --train-rollout-diff-threshold (here 0.0001), with --on-train-rollout-diff warn or stop" in text
    assert "An older version of Vime has written its causes into" in text
    assert said(capsys, "diagnose", str(run), "--json") == ""


def test_what_is_no_run_or_no_record_is_refused(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "expected the run directory of a Vime run" in refused(capsys, "diagnose", str(recorded / "events"))
    path = record_path(recorded, 4, Stage.BEFORE_TRAINING)
    whole = path.read_text()
    path.write_text(whole.replace('"schema": 1', '"schema": 9'))
    assert f"{path}: has schema 9, this version of Vime reads up to 1" in refused(capsys, "diagnose", str(recorded))
    for damage in (whole[:-40], "[]", "", '{"schema": "new"}', '{"schema": 1}', "\x00\xff"):
        path.write_text(damage, encoding="latin-1")
        text = refused(capsys, "diagnose", str(recorded))
        assert f"{path}: is damaged: " in text
        assert "Traceback" not in text
    assert "off-by-one" in said(capsys, "diagnose", str(recorded), "--round", "12")  # the others can be looked at
