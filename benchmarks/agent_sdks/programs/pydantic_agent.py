"""Pydantic AI: an agent with a tool, over the messages API of Anthropic."""

import contextlib
import os

from pydantic_ai import Agent, UsageLimitExceeded, UsageLimits

agent = Agent("anthropic:policy", instructions="Sort first.", retries=3)


@agent.tool_plain
def sort_letters(letters: str) -> str:
    """Sorts letters."""
    return "".join(sorted(letters))


with contextlib.suppress(UsageLimitExceeded):
    agent.run_sync(os.environ["VIME_PROMPT"], usage_limits=UsageLimits(request_limit=3))
