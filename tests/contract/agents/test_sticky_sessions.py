"""Which engine the turns of a session reach: the real router in front of two scripted engines."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import openai
import pytest

from tests.helpers.agent_world import TOKENIZER, AgentWorld, agent_world
from tests.helpers.scripted_engine import Reply, Request, ScriptedEngine
from vime.agents.task import AgentTask
from vime.backends.vllm_utils.router import RouterProcess
from vime.config.agent_checks import resolve_agents
from vime.rollout.generation import take_prompt_tokens
from vime.types import EngineAddress, Sample
from vime.utils.network import free_port

NUM_SESSIONS, NUM_TURNS = 4, 3


class CachingScript:
    """Says which of its prompt's tokens it has computed before, as an engine with a prefix cache does."""

    def __init__(self) -> None:
        self.turns: list[tuple[str, int, int, int]] = []  # session, tokens of the prompt, of the reply, cached ones
        self._seen: list[list[int]] = []

    def __call__(self, request: Request) -> Reply:
        prompt, ids = list(request.token_ids), TOKENIZER.encode(f"n{request.number}<|im_end|>")
        cached = max((_common(prompt, seen) for seen in self._seen), default=0)
        self.turns.append((request.session_id, len(prompt), len(ids), cached))
        self._seen.append([*prompt, *ids])
        return Reply(token_ids=ids, version="0", cached_tokens=cached)


def _common(one: list[int], other: list[int]) -> int:
    """How many tokens both begin with."""
    length = min(len(one), len(other))
    return next((place for place in range(length) if one[place] != other[place]), length)


def turns(task: AgentTask) -> float:
    client, messages = openai.OpenAI(base_url=task.base_url, api_key=task.api_key), []
    for turn in range(NUM_TURNS):
        messages.append({"role": "user", "content": f"{task.prompt} {turn}"})
        said = client.chat.completions.create(model="m", messages=messages).choices[0].message.content
        messages.append({"role": "assistant", "content": said})
    return 1.0


HERE = Path(__file__)


@contextlib.contextmanager
def routed(directory: Path, *flags: str) -> Iterator[tuple[AgentWorld, object, list[CachingScript]]]:
    """Two engines, the router that a run with two engines and these flags starts, and the flags of its agents."""
    scripts = [CachingScript(), CachingScript()]
    with agent_world(directory, scripts[0]) as world, ScriptedEngine(scripts[1]) as other:
        port = free_port()
        args = world.args("--agent-function", f"{HERE}:turns", "--vllm-router-port", port, *flags)
        config = args.config.replace(**resolve_agents(args.config, num_engines=2))
        engines = [
            EngineAddress(name=f"engine-{number}", url=f"http://127.0.0.1:{engine.port}")
            for number, engine in enumerate((world.engine, other))
        ]
        router = RouterProcess(config, engines, run_dir=directory)
        router.start()
        try:
            router.wait_ready(60)
            yield world, config.flat, scripts
        finally:
            router.stop()


def play(world: AgentWorld, args: object) -> float:
    """Every session, one after another. Returns the share of prompt tokens that an engine had already."""
    take_prompt_tokens()
    for index in range(NUM_SESSIONS):
        sample = Sample(group_index=index, index=index, prompt=f"p{index}", tokens=[1])
        [row] = world.generate(args, sample)
        assert row.reward == 1.0, row.metadata
    return take_prompt_tokens().metrics()["rollout/prefix_cached_share"]


@pytest.mark.parametrize(("flags", "is_sticky"), [((), True), (("--vllm-router-policy", "round_robin"), False)])
def test_all_turns_of_a_session_reach_the_engine_that_has_their_beginning_unless_the_user_chose_another_policy(
    tmp_path: Path, flags: tuple[str, ...], is_sticky: bool
) -> None:
    with routed(tmp_path, *flags) as (world, args, scripts):
        share = play(world, args)
    homes = [{session for session, *_ in script.turns} for script in scripts]
    turns_of_all = [turn for script in scripts for turn in script.turns]
    assert (len(turns_of_all), len(homes[0] | homes[1])) == (NUM_SESSIONS * NUM_TURNS, NUM_SESSIONS)
    asked, cached = (sum(turn[place] for turn in turns_of_all) for place in (1, 3))
    assert share == cached / asked
    if is_sticky:
        assert not homes[0] & homes[1]
        for script in scripts:  # the sessions come one after another: a turn follows that before it
            for before, after in pairwise(script.turns):
                assert before[0] != after[0] or after[3] >= before[1] + before[2]
    else:  # 12 turns go to the two in turn, and each session has three
        assert homes[0] == homes[1]  # so that sessions which stay do so by the policy
