"""Environments: `reset -> completion -> step -> ... -> reward`, played as an agent around one session.

`--environment FILE:NAME` names a class (or any callable without parameters) that makes one environment for each sample.
An environment is an agent function of ours, so that budgets, time limits, failures and rows are those of agents.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol, cast

from vime.agents.task import AgentFailed, AgentTask, agent_threads
from vime.utils.http import HttpSession
from vime.utils.waits import AGENT, waiting

Message = Mapping[str, object]
"""As in OpenAI's chat completions: role, content, and tool_calls or tool_call_id."""
ENDS = ("budget_turns", "budget_tokens", "budget_seconds", "context_length_exceeded")
"""Refusals after which nothing more can be said: the environment still gives its reward for what was."""
NO_ENGINE, REPEAT_S, MOST_REPEATS = 503, 1.0, 20


class Environment(Protocol):
    """What Vime calls of an environment; a class need not inherit it. Every method may be `async def`, or a plain
    `def`, which runs in a thread.

    Optional: `request`, a mapping of further fields of each chat request (tools, stop, max_tokens), and `close()`,
    which is called at the end of every episode, also of one that failed.
    """

    def reset(self, task: AgentTask) -> Sequence[Message]:
        """Begin the episode of `task.prompt` and return the first messages."""
        ...

    def step(self, message: Message) -> Sequence[Message] | None:
        """Take what the model said and return what it sees next; None ends the episode."""
        ...

    def reward(self) -> float | None:
        """Return the reward of the episode; None: the run's reward function gives it."""
        ...


async def play(make: Callable[[], object], task: AgentTask) -> object:
    """Play one episode and return its reward.

    Waits for: the methods of the environment, and the session's server; the caller's --agent-timeout-secs bounds both.
    """
    environment = cast("Environment", await _call(make))
    http = HttpSession(headers={"Authorization": f"Bearer {task.api_key}"})
    try:
        messages = list(cast("Sequence[Message]", await _call(environment.reset, task)))
        while True:
            said = await _completion(http, task, messages, getattr(environment, "request", {}))
            if said is None:
                break
            seen = cast("Sequence[Message] | None", await _call(environment.step, said))
            if seen is None:
                break
            messages += [said, *seen]
        return await _call(environment.reward)
    finally:
        await http.close()
        if hasattr(environment, "close"):
            await _call(environment.close)


async def _completion(
    http: HttpSession, task: AgentTask, messages: Sequence[Message], more: Mapping[str, object]
) -> Message | None:
    """Return the model's message; None when the session has no room for another one. While no engine answers it is
    asked for again, as SDKs do, MOST_REPEATS times: one that was lost is being started again."""
    body = json.dumps({"model": "policy", **more, "messages": messages}).encode()
    for repeat in itertools.count():
        headers = {"x-stainless-retry-count": str(repeat)}
        response = await http.call("POST", f"{task.base_url}/chat/completions", body, headers=headers)
        if response.status != NO_ENGINE or repeat == MOST_REPEATS:
            break
        with waiting("an engine that answers a turn", "engine", deadline_s=None):
            await asyncio.sleep(REPEAT_S)
    answer = json.loads(response.content)
    if response.status == 200:
        said = answer["choices"][0]["message"]
        return {**said, "content": said["content"] or ""}
    if answer["error"]["code"] in ENDS:
        return None
    raise AgentFailed(f"its completion was refused: {response.described()}")


async def _call(method: Callable[..., object], *arguments: object) -> object:
    """Call a method of the environment. A thread cannot be ended: one that is not wanted any more is waited for, so
    that `close` never runs beside it."""
    if inspect.iscoroutinefunction(method):
        return await cast("Awaitable[object]", method(*arguments))
    work = asyncio.get_running_loop().run_in_executor(agent_threads(), method, *arguments)
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        with waiting("an environment that is late to return", AGENT, deadline_s=None):
            await asyncio.wait([work])
        raise
