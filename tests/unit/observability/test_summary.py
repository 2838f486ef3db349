"""What a run directory tells: totals, outcome, answers before and after."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from vime.config.parse import Config
from vime.config.run import TrackingConfig
from vime.observability.events import EventKind, EventLog
from vime.observability.metrics import Tracker
from vime.observability.summary import read_completions, summarise
from vime.types import DataError, Sample


def write_eval(run_dir: Path, name: str, rollout_id: int, samples: Sequence[Sample]) -> None:
    path = run_dir / "eval" / f"{name}_{rollout_id}.jsonl"
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(sample.to_dict()) + "\n" for sample in samples))


def answer(prompt: str, response: str, reward: float) -> Sample:
    return Sample(prompt=prompt, label="w", response=response, reward=reward)


def test_totals_are_sums_over_the_rounds(tmp_path: Path) -> None:
    EventLog(tmp_path, "driver").emit(EventKind.RUN_STARTED)
    tracker = Tracker(TrackingConfig(), tmp_path, {})
    for step, reward in enumerate((0.25, 0.5, 0.75)):
        tracker.log(
            step,
            {
                "rollout/reward_mean": reward,
                "rollout/num_samples": 8,
                "rollout/num_tokens": 100 + step,
                "perf/train_time": 2.0,
                "perf/wait_time": 1.0,
                "perf/step_time": 3.5,  # the whole round: not a phase
                "weights/version": step + 1.0,
                "perf/pause_time": 0.5,  # inside another phase
            },
        )
    tracker.log(3, {"eval/reward_mean": 1.0})  # the evaluation after the last round: not a round
    summary = summarise(tmp_path)
    assert summary.rewards == {0: 0.25, 1: 0.5, 2: 0.75}
    assert (summary.num_rounds, summary.num_samples, summary.num_tokens) == (3, 24, 303)  # 3 x 8; 100 + 101 + 102
    assert summary.phase_s == {"train": 6.0, "wait": 3.0}
    assert summary.outcome == "not finished"


def test_the_time_between_a_crash_and_the_resumption_is_not_wall_time(tmp_path: Path) -> None:
    records = [(100, "run_started"), (130, "round_trained"), (1000, "run_started"), (1015, "run_finished")]
    (tmp_path / "events").mkdir()
    (tmp_path / "events" / "driver.jsonl").write_text(
        "".join(
            json.dumps({"t": t, "mono": t, "process": "driver", "kind": kind, "rollout_id": 0, "version": 1}) + "\n"
            for t, kind in records
        )
    )
    summary = summarise(tmp_path)
    assert summary.wall_s == 45  # 30 + 15
    assert summary.outcome == "finished"


def test_a_failed_run_says_why(tmp_path: Path) -> None:
    log = EventLog(tmp_path, "driver")
    log.emit(EventKind.RUN_STARTED)
    log.emit(EventKind.RUN_FAILED, error="engine-0 died")
    assert summarise(tmp_path).outcome == "failed: engine-0 died"


def test_the_first_and_the_last_evaluation_are_compared_by_prompt(tmp_path: Path) -> None:
    # Ids order as numbers: 30 comes after 5, though "30" sorts before "5".
    write_eval(tmp_path, "held_out", 0, [answer("2:xw=", "x", 0.0), answer("1:ab=", "a", 1.0)])
    write_eval(tmp_path, "held_out", 5, [answer("2:xw=", "middle", 0.0), answer("1:ab=", "middle", 0.0)])
    write_eval(tmp_path, "held_out", 30, [answer("1:ab=", "b", 0.0), answer("2:xw=", "<think>wx</think>w", 1.0)])
    title, pairs = read_completions(tmp_path)
    assert title == "held_out: completions before round 0 and after round 29"
    assert [(pair.prompt, pair.before, pair.after) for pair in pairs] == [
        ("2:xw=", "x", "<think>wx</think>w"),
        ("1:ab=", "a", "b"),
    ]
    assert [(pair.is_before_right, pair.is_after_right) for pair in pairs] == [(False, True), (True, False)]


def test_ten_answers_are_spread_over_the_whole_set(tmp_path: Path) -> None:
    for rollout_id in (0, 4):
        write_eval(tmp_path, "held_out", rollout_id, [answer(f"p{index}", "w", 1.0) for index in range(40)])
    _, pairs = read_completions(tmp_path)
    assert [pair.prompt for pair in pairs] == [f"p{index}" for index in range(0, 40, 4)]


def test_with_several_answers_per_prompt_the_first_is_shown(tmp_path: Path) -> None:
    write_eval(tmp_path, "held_out", 0, [answer("p", "one", 0.0), answer("p", "two", 1.0)])
    write_eval(tmp_path, "held_out", 3, [answer("p", "three", 1.0)])
    _, pairs = read_completions(tmp_path)
    assert [(pair.before, pair.after) for pair in pairs] == [("one", "three")]


def test_one_evaluation_alone_is_nothing_to_compare(tmp_path: Path) -> None:
    write_eval(tmp_path, "held_out", 0, [answer("p", "one", 0.0)])
    assert read_completions(tmp_path) == ("", ())


def test_of_a_conversation_the_last_message_is_the_prompt(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
    for rollout_id in (0, 1):
        write_eval(tmp_path, "held_out", rollout_id, [Sample(prompt=chat, response="4", reward=1.0)])
    _, (pair,) = read_completions(tmp_path)
    assert (pair.prompt, pair.is_after_right) == ("2+2?", True)


def write_config(run_dir: Path, **changes: object) -> None:
    config = {"reward": {"reward_key": "acc"}, "eval": {"pass_reward": 0.5}}
    (run_dir / "config.json").write_text(json.dumps(config if not changes else Config().replace(**changes).to_dict()))


@pytest.mark.parametrize(
    ("reward", "expected"),
    [
        (0.5, True),
        (0.4, False),  # it was right: more than nothing
        (None, False),
        ({"score": 1.0, "acc": 0.0}, False),  # it was right: the first entry counted
        ({"score": -1.0, "acc": 1.0}, True),
        ({}, False),
    ],
)
def test_an_answer_is_right_as_pass_at_k_counts_it(
    tmp_path: Path, reward: float | dict[str, float] | None, expected: bool
) -> None:
    """By --reward-key acc and --pass-reward 0.5."""
    write_config(tmp_path)
    for rollout_id in (0, 3):
        write_eval(tmp_path, "held_out", rollout_id, [Sample(prompt="p", reward=reward)])
    _, (pair,) = read_completions(tmp_path)
    assert (pair.is_before_right, pair.is_after_right) == (expected, expected)


def test_a_set_with_a_reward_key_of_its_own_is_judged_by_it(tmp_path: Path) -> None:
    sets = tmp_path / "sets.toml"
    sets.write_text('[[datasets]]\nname = "own"\npath = "own.jsonl"\nreward_key = "exact"\n')
    write_config(tmp_path, reward_key="score", eval_config=str(sets))
    for rollout_id in (0, 3):
        write_eval(tmp_path, "own", rollout_id, [Sample(prompt="p", reward={"score": 0.0, "exact": 1.0})])
    assert read_completions(tmp_path)[1][0].is_after_right
    sets.unlink()  # the run's own key is known still
    assert not read_completions(tmp_path)[1][0].is_after_right


def test_damaged_numbers_and_a_damaged_configuration_are_no_traceback(tmp_path: Path) -> None:
    EventLog(tmp_path, "driver").close()
    tracker = Tracker(TrackingConfig(), tmp_path, {})
    tracker.log(0, {"rollout/num_samples": 8, "rollout/num_tokens": math.inf})
    tracker.log(1, {"rollout/num_samples": math.nan, "rollout/num_tokens": 100})
    tracker.close()
    for rollout_id in (0, 3):
        write_eval(tmp_path, "held_out", rollout_id, [answer("p", "one", 1.0)])
    (tmp_path / "config.json").write_text(json.dumps(Config().to_dict() | {"derived": [[]]}))
    summary = summarise(tmp_path)
    assert (summary.num_samples, summary.num_tokens) == (8, 100)
    assert summary.answers[0].is_after_right


def test_a_directory_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError):
        summarise(tmp_path)


def test_a_damaged_answer_is_left_out_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """At the end of a run nothing may hang on it: a flipped bit in the name of a field was a traceback there."""
    write_eval(tmp_path, "held_out", 0, [answer(f"p{index}", "one", 0.0) for index in range(5)])
    write_eval(tmp_path, "held_out", 3, [answer(f"p{index}", "two", 1.0) for index in range(5)])
    path = tmp_path / "eval" / "held_out_3.jsonl"
    lines = path.read_bytes().splitlines()
    lines[0] = lines[0].replace(b"response_length", b"response_lengtI")
    lines[1] = lines[1].replace(b'"prompt": "p1"', b'"prompt": 7')
    lines[2] = lines[2][:-1]
    lines[3] = lines[3].replace(b"p3", b"\xff3")
    path.write_bytes(b"\n".join(lines))
    EventLog(tmp_path, "driver").close()
    assert [pair.prompt for pair in summarise(tmp_path).answers] == ["p4"]
    assert caplog.text.count("left out a line that is not a sample") == 4
