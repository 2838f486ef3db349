"""OpenAI's Agents SDK: an agent with a function as its tool, over the responses API."""

import contextlib
import os

from agents import Agent, MaxTurnsExceeded, Runner, function_tool, set_tracing_disabled


@function_tool
def sort_letters(letters: str) -> str:
    """Sorts letters."""
    return "".join(sorted(letters))


set_tracing_disabled(True)
agent = Agent(name="sorter", instructions="Sort first.", model="policy", tools=[sort_letters])
with contextlib.suppress(MaxTurnsExceeded):
    Runner.run_sync(agent, os.environ["VIME_PROMPT"], max_turns=3)
