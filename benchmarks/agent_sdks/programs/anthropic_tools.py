"""Anthropic's SDK for Python: its runner of tools, which asks until no tool is called any more."""

import os

import anthropic


@anthropic.beta_tool
def sort_letters(letters: str) -> str:
    """Sorts letters."""
    return "".join(sorted(letters))


client = anthropic.Anthropic()
runner = client.beta.messages.tool_runner(
    model="policy",
    max_tokens=200,
    max_iterations=3,
    tools=[sort_letters],
    messages=[{"role": "user", "content": os.environ["VIME_PROMPT"]}],
)
runner.until_done()
