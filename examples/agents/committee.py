"""An agent with two subagents: `--agent-function examples/agents/committee.py:committee`.

The agent answers the problem, and two subagents answer it in conversations of their own, with the letters in other
orders, which do not change the answer. What most of the three say is the answer of all. A sample is therefore three
rows with one reward. docs/agents.md walks through this file.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any


async def committee(task: Any) -> float:
    import openai

    client = openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key)

    async def ask(problem: str) -> str:
        messages: list[Any] = [{"role": "user", "content": problem}]
        said = (await client.chat.completions.create(model="policy", messages=messages)).choices[0].message.content
        return (said or "").rpartition("</think>")[2]

    place, _, letters = task.prompt.removesuffix("=").partition(":")
    orders = (letters, letters[::-1], letters[1::2] + letters[::2])
    async with client:
        answers = await asyncio.gather(*(ask(f"{place}:{order}=") for order in orders))
    [(answer, _)] = Counter(answers).most_common(1)  # of three different ones, the agent's own
    return float(answer == task.label)
