"""An agent with a tool, over OpenAI's SDK: `--agent-function examples/agents/sorter.py:sort_with_tool`.

It knows an address and a key and nothing of Vime. The model of the quick start may begin with `<think>`: that is its
call of the tool, which sorts the letters of the problem. docs/agents.md walks through this file.
"""

from __future__ import annotations

from typing import Any

CALL, END = "<think>", "</think>"


def sort_with_tool(task: Any) -> None:
    """Ask once, and once more with what the tool says if the model called it. The run's reward function scores what
    was said, because this returns none."""
    import openai

    client = openai.OpenAI(base_url=task.base_url, api_key=task.api_key)
    messages: list[Any] = [{"role": "user", "content": task.prompt}]
    said = client.chat.completions.create(model="policy", messages=messages, stop=[CALL]).choices[0].message.content
    if said == CALL:
        letters = sorted(task.prompt.partition(":")[2].removesuffix("="))
        messages += [{"role": "assistant", "content": said}]
        messages += [{"role": "tool", "tool_call_id": "sort", "content": "".join(letters) + END}]
        client.chat.completions.create(model="policy", messages=messages)
