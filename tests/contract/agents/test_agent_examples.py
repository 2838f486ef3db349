"""The examples of agents, on an engine whose answers are written down here. That they learn is shown by runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.helpers.agent_world import TOKENIZER, agent_world
from tests.helpers.scripted_engine import Reply, Request
from vime.types import Sample, SampleStatus

EXAMPLES = Path(__file__).parents[3] / "examples" / "agents"
PROBLEM = "2:qcb="  # in order bcq: the 2nd largest is c
CALL, END = "<think>", "<|im_end|>"


def problem() -> Sample:
    return Sample(group_index=7, index=0, prompt=PROBLEM, label="c", tokens=[1])


@pytest.mark.parametrize(
    ("said", "reward", "shown"),
    [
        (["c" + END], 1.0, [PROBLEM]),
        ([CALL, "c" + END], 1.0, [PROBLEM, "bcq</think>"]),
        (["q" + END, "c" + END], 0.5, [PROBLEM, PROBLEM]),
        (["q" + END, CALL, "c" + END], 0.5, [PROBLEM, PROBLEM, "bcq</think>"]),
        (["q" + END, "b" + END], 0.0, [PROBLEM, PROBLEM]),
    ],
    ids=["right", "calculated", "right at last", "calculated at last", "wrong"],
)
def test_a_second_chance_is_given_and_the_calculator_answers(
    tmp_path: Path, said: Sequence[str], reward: float, shown: Sequence[str]
) -> None:
    def answer(request: Request) -> Reply:
        return Reply(token_ids=TOKENIZER.encode(said[request.number]))

    with agent_world(tmp_path, answer) as world:
        [row] = world.generate(world.args("--environment", f"{EXAMPLES / 'second_chance.py'}:SecondChance"), problem())
        last = TOKENIZER.decode(world.engine.requests[-1]["token_ids"])
    assert (row.status, row.reward) == (SampleStatus.COMPLETED, reward)
    trained = [token for token, mask in zip(row.tokens[row.prompt_length :], row.loss_mask, strict=True) if mask]
    assert trained == [token for text in said for token in TOKENIZER.encode(text)]
    contents = [part.partition("\n")[2].partition("<|im_end|>")[0] for part in last.split("<|im_start|>")]
    assert [text for text in contents if text in (PROBLEM, "bcq</think>")] == list(shown)


@pytest.mark.parametrize(
    ("answers", "reward"),
    [
        ({"qcb": "q", "bcq": "c", "cqb": "c"}, 1.0),  # most say c
        ({"qcb": "c", "bcq": "q", "cqb": "q"}, 0.0),
        ({"qcb": "c", "bcq": "q", "cqb": "b"}, 1.0),  # all differ: the agent's own
    ],
)
def test_a_committee_of_three_conversations_is_one_sample_with_one_reward(
    tmp_path: Path, answers: dict[str, str], reward: float
) -> None:
    def answer(request: Request) -> Reply:
        letters = TOKENIZER.decode(request.token_ids).partition("2:")[2].partition("=")[0]
        return Reply(token_ids=TOKENIZER.encode(f"<think>{letters}</think>{answers[letters]}{END}"))

    with agent_world(tmp_path, answer) as world:
        rows = world.generate(world.args("--agent-function", f"{EXAMPLES / 'committee.py'}:committee"), problem())
    assert [(row.index, row.reward, row.metadata["session_rows"]) for row in rows] == [(0, reward, 3)] * 3
    assert {TOKENIZER.decode(row.tokens).partition("2:")[2][:3] for row in rows} == set(answers)
