"""OpenAI's SDK for Python: a streamed chat completion with a tool, then a response that goes on with it by its id."""

import json
import os

import openai

PARAMETERS = {"type": "object", "properties": {"letters": {"type": "string"}}, "required": ["letters"]}
FUNCTION = {"name": "sort_letters", "description": "Sorts letters.", "parameters": PARAMETERS}
client = openai.OpenAI()
messages = [{"role": "user", "content": os.environ["VIME_PROMPT"]}]


def chat() -> None:
    tools = [{"type": "function", "function": FUNCTION}]
    for _ in range(3):
        with client.chat.completions.stream(model="policy", messages=messages, tools=tools) as stream:
            said = stream.get_final_completion().choices[0].message
        messages.append(said.model_dump(include={"role", "content", "tool_calls"}, exclude_none=True))
        for call in said.tool_calls or []:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": sorted_letters(call)})
        if not said.tool_calls:
            break


def respond() -> None:
    tools = [{"type": "function", **FUNCTION}]
    answer = client.responses.create(model="policy", input=f"again {os.environ['VIME_PROMPT']}", tools=tools)
    for _ in range(2):
        calls = [item for item in answer.output if item.type == "function_call"]
        if not calls:
            break
        results = [
            {"type": "function_call_output", "call_id": call.call_id, "output": sorted_letters(call)} for call in calls
        ]
        answer = client.responses.create(model="policy", input=results, tools=tools, previous_response_id=answer.id)


def sorted_letters(call: object) -> str:
    try:
        given = json.loads(getattr(call, "function", call).arguments)
        return "".join(sorted(given["letters"]))
    except (ValueError, KeyError, TypeError):
        return "expected letters"


chat()
respond()
