"""Weights that change under an open session: what becomes of its row by --mixed-version-policy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.helpers.agent_world import TOKENIZER, AgentWorld, agent_world
from tests.helpers.converted import trained_rows
from tests.helpers.rollout_setup import write_jsonl
from tests.helpers.scripted_engine import Reply, Request
from vime.agents.task import AgentTask
from vime.rollout.data_source import RolloutDataSourceWithBuffer
from vime.rollout.vllm_rollout import generate_rollout
from vime.types import SampleStatus

HERE = Path(__file__)
FIRST, SECOND = TOKENIZER.encode("one<|im_end|>"), TOKENIZER.encode("second<|im_end|>")


def two_turns(task: AgentTask) -> float:
    client = openai.OpenAI(base_url=task.base_url, api_key=task.api_key)
    asked = [{"role": "user", "content": task.prompt}]
    said = client.chat.completions.create(model="m", messages=asked).choices[0].message.content
    asked += [{"role": "assistant", "content": said}, {"role": "user", "content": "and?"}]
    client.chat.completions.create(model="m", messages=asked)
    return 0.5


def updated_under_the_first_prompt(request: Request) -> Reply:
    """Weights of version 1 answer everything but the first turn of the sessions of prompt `old`."""
    is_second, is_old = "and?" in (text := TOKENIZER.decode(request.token_ids)), "old" in text
    return Reply(token_ids=SECOND if is_second else FIRST, version="0" if is_old and not is_second else "1")


@pytest.fixture
def world(tmp_path: Path) -> Iterator[AgentWorld]:
    with agent_world(tmp_path, updated_under_the_first_prompt) as made:
        yield made


@pytest.mark.parametrize(
    ("policy", "prompt", "is_first_trained"),
    [("correct", "old", True), ("mask", "old", False), ("reject", "new", True)],
)
def test_a_session_whose_turns_have_two_versions_is_trained_masked_or_rejected_whole(
    world: AgentWorld, policy: str, prompt: str, is_first_trained: bool
) -> None:
    data = write_jsonl(world.directory / "prompts.jsonl", [{"input": text} for text in ("old", "new")])
    args = world.args(
        *("--agent-function", f"{HERE}:two_turns", "--mixed-version-policy", policy, "--max-staleness", 1),
        *("--prompt-data", data, "--rollout-batch-size", 1, "--n-samples-per-prompt", 2, "--rollout-timeout-secs", 60),
    )
    output = generate_rollout(args, 1, RolloutDataSourceWithBuffer(args))
    [group] = output.samples
    assert [(row.index % 2, row.prompt, row.reward, row.status) for row in group] == [
        (0, prompt, 0.5, SampleStatus.COMPLETED), (1, prompt, 0.5, SampleStatus.COMPLETED)
    ]  # fmt: skip
    assert output.metrics.get("rollout/dropped_mixed_versions", 0) == (policy == "reject")
    for row in group:
        versions = [
            version for span in row.token_policy_versions for version in [span.version] * (span.end - span.start)
        ]
        trained = [version for version, mask in zip(versions, row.loss_mask, strict=True) if mask]
        first = [1 if prompt == "new" else 0] * len(FIRST) if is_first_trained else []
        assert trained == [*first, *[1] * len(SECOND)]
        assert (
            row.tokens[row.prompt_length :][: len(FIRST)] == FIRST
        )  # masked or not: the second turn has it as context
    [rows] = trained_rows(args, output.samples, 1)
    assert {row.oldest_version for row in rows} == {0 if policy == "correct" else 1}
