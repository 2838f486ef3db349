"""LangGraph's prebuilt agent over LangChain's model for OpenAI: chat completions with a tool."""

import contextlib
import os
import warnings

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from langgraph.prebuilt import create_react_agent

warnings.simplefilter("ignore")


@tool
def sort_letters(letters: str) -> str:
    """Sorts letters."""
    return "".join(sorted(letters))


agent = create_react_agent(ChatOpenAI(model="policy"), [sort_letters])
with contextlib.suppress(GraphRecursionError):
    agent.invoke({"messages": [("user", os.environ["VIME_PROMPT"])]}, {"recursion_limit": 6})
