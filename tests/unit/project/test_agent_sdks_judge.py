"""The judge of runs with the SDKs of others names each way in which a run could depart from what its engines said."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from benchmarks.agent_sdks.judge import judge, read_journal
from benchmarks.agent_sdks.launch import PROGRAMS, command_of, is_lost
from vime.sessions.recording import Turn, row_samples
from vime.types import Sample, VersionSpan

# Session a: two turns of one conversation and a subagent; session b: one turn.
# They are those of the first two programs.
Said = tuple[tuple[list[int], list[int]], ...]  # prompt and completion of each request
SAID: dict[str, Said] = {"a": (([1, 2], [3, 4]), ([1, 2, 3, 4, 5], [6]), ([9], [8])), "b": (([1, 2], [3, 4]),)}


def rows_and_lines(sessions: Mapping[str, Said] = SAID) -> tuple[list[Sample], list[dict[str, object]]]:
    """The rows of a round of one group of two, and the journal's lines."""
    rows, lines = [], []
    for index, (session, said) in enumerate(sessions.items()):
        turns = []
        for number, (prompt, tokens) in enumerate(said):
            log_probs = [-0.1 * (number + place + 1) for place in range(len(tokens))]
            turns.append(
                Turn(
                    number=number, prompt_ids=tuple(prompt), token_ids=tuple(tokens), log_probs=tuple(log_probs),
                    versions=(VersionSpan(number, 0, len(tokens)),), finish_reason="stop",
                )
            )  # fmt: skip
            choice = {"tokens": tokens, "log_probs": log_probs, "versions": [number] * len(tokens), "reason": "stop"}
            lines.append({"request": f"{session}{number}", "session": session, "prompt": prompt, "choices": [choice]})
        rows += row_samples(turns, Sample(group_index=0, index=index, session_id=session))
    return rows, lines


def faults(directory: Path, rows: list[Sample], lines: list[dict[str, object]], *, rounds: int = 1) -> dict[str, int]:
    """Number of faults of each kind that the judge found."""
    for row in rows:  # as the queue keeps them
        row.rollout_log_probs = [json.loads(json.dumps(float32(value))) for value in row.rollout_log_probs]
    (directory / "1.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"request": "cut')
    verdict = judge([rows] * rounds, read_journal(directory), groups=1, samples=2)
    kinds = ("lost", "twice", "differ", "other_rows", "untrained")
    return {kind: len(getattr(verdict, kind)) for kind in kinds if getattr(verdict, kind)}


def float32(value: float) -> float:
    import numpy as np

    return float(np.float32(value))


def test_a_run_that_trained_what_was_said_has_no_fault(tmp_path: Path) -> None:
    rows, lines = rows_and_lines()
    assert [row.session_id for row in rows] == ["a", "a", "b"]
    assert faults(tmp_path, rows, lines) == {}


def test_an_answer_that_an_engine_gave_twice_to_one_request_is_one_generation(tmp_path: Path) -> None:
    rows, lines = rows_and_lines()
    assert faults(tmp_path, rows, [*lines, lines[0]]) == {}


def test_a_completion_that_was_aborted_and_continued_is_two_generations_of_one_turn(tmp_path: Path) -> None:
    rows, lines = rows_and_lines()
    (whole,) = lines[3]["choices"]
    parts = [{name: value[place : place + 1] for name, value in whole.items()} for place in range(2)]
    first = lines[3] | {"choices": [parts[0]]}
    second = {"request": "b1", "session": "b", "prompt": [1, 2, 3], "choices": [parts[1]]}
    assert faults(tmp_path, rows, [*lines[:3], first, second]) == {}


def another_token(rows: list[Sample], lines: list[dict[str, object]]) -> None:
    rows[2].tokens[-1] = 7


def another_log_prob(rows: list[Sample], lines: list[dict[str, object]]) -> None:
    rows[2].rollout_log_probs[-1] += 1e-6


def another_version(rows: list[Sample], lines: list[dict[str, object]]) -> None:
    rows[2].token_policy_versions = [VersionSpan(3, 0, 2)]


def a_token_that_is_not_trained(rows: list[Sample], lines: list[dict[str, object]]) -> None:
    rows[2].loss_mask[-1] = 0


def a_row_is_missing(rows: list[Sample], lines: list[dict[str, object]]) -> None:
    del rows[1]


def a_session_is_missing(rows: list[Sample], lines: list[dict[str, object]]) -> None:
    del rows[2]


def a_row_came_twice(rows: list[Sample], lines: list[dict[str, object]]) -> None:
    rows.append(rows[1])


def sampled_anew(rows: list[Sample], lines: list[dict[str, object]]) -> None:
    lines.append(lines[3] | {"request": "again"})


@pytest.mark.parametrize(
    ("breaks", "found"),
    [
        (another_token, {"differ": 1, "untrained": 1}),
        (another_log_prob, {"differ": 1, "untrained": 1}),
        (another_version, {"differ": 1, "untrained": 1}),
        (a_token_that_is_not_trained, {"differ": 1, "untrained": 1}),
        (a_row_is_missing, {"other_rows": 1, "untrained": 1}),
        (a_session_is_missing, {"lost": 1}),
        (a_row_came_twice, {"twice": 1, "other_rows": 1}),
        (sampled_anew, {"other_rows": 1, "untrained": 1}),
    ],
)
def test_each_departure_is_named(
    tmp_path: Path, breaks: Callable[[list[Sample], list[dict[str, object]]], None], found: dict[str, int]
) -> None:
    rows, lines = rows_and_lines()
    breaks(rows, lines)
    assert faults(tmp_path, rows, lines) == found


def test_a_conversation_that_broke_at_the_engine_and_in_the_rows_is_named_with_its_program(tmp_path: Path) -> None:
    """The second turn of session a is rendered anew, so that it begins a row of its own: rows and branches agree."""
    again = ([7, 2, 3, 4, 5], [6])
    rows, lines = rows_and_lines({**SAID, "a": (SAID["a"][0], again, SAID["a"][2])})
    assert [row.session_id for row in rows] == ["a", "a", "a", "b"]
    assert faults(tmp_path, rows, lines) == {"other_rows": 1}
    verdict = judge([rows], read_journal(tmp_path), groups=1, samples=2)
    assert verdict.other_rows == ["session a of openai_chat.py: 3 rows of 3 branches, wanted 2"]


def test_a_turn_sampled_anew_is_a_fault_unless_sessions_outlive_their_server(tmp_path: Path) -> None:
    """The engine had answered, and the server was killed before it recorded the turn; one of another prompt is lost."""
    rows, lines = rows_and_lines()
    sampled_anew(rows, lines)
    assert faults(tmp_path, rows, lines) == {"other_rows": 1, "untrained": 1}
    kept = judge([rows], read_journal(tmp_path), groups=1, samples=2, sessions_outlive=True)
    assert (kept.faults, kept.sampled_anew) == ([], 1)
    lines[-1]["prompt"] = [9, 9]
    faults(tmp_path, rows, lines)
    other = judge([rows], read_journal(tmp_path), groups=1, samples=2, sessions_outlive=True)
    assert (len(other.untrained), other.sampled_anew) == (1, 0)


def test_the_beginning_of_a_turn_that_was_aborted_and_sampled_anew_is_no_departure(tmp_path: Path) -> None:
    """The engine says the same again, and the journal has the beginning first."""
    rows, lines = rows_and_lines()
    (whole,) = lines[3]["choices"]
    beginning = {name: value[:1] for name, value in whole.items()} | {"reason": "abort"}
    lines.insert(3, lines[3] | {"request": "aborted", "choices": [beginning]})
    faults(tmp_path, rows, lines)
    verdict = judge([rows], read_journal(tmp_path), groups=1, samples=2, sessions_outlive=True)
    assert (verdict.faults, verdict.sampled_anew) == ([], 1)
    rest = {name: value[1:] for name, value in whole.items()} | {"reason": "stop"}
    goes_on = [*lines[3]["prompt"], *beginning["tokens"]]
    lines.append(lines[3] | {"request": "continued", "prompt": goes_on, "choices": [rest]})  # and lost with its server
    faults(tmp_path, rows, lines)
    verdict = judge([rows], read_journal(tmp_path), groups=1, samples=2, sessions_outlive=True)
    assert (verdict.faults, verdict.sampled_anew) == ([], 2)


def test_a_group_that_two_rounds_trained_is_named_sample_by_sample(tmp_path: Path) -> None:
    assert faults(tmp_path, *rows_and_lines(), rounds=2)["twice"] >= 2


def test_one_answer_in_ten_is_lost_and_each_program_is_there(tmp_path: Path) -> None:
    lost = sum(is_lost(f"prompt #{sample}", number) for sample in range(500) for number in range(4))
    assert 140 < lost < 260  # of 2,000; standard deviation 13
    for program in PROGRAMS:
        assert Path(command_of(program, tmp_path)[-1]).exists()
