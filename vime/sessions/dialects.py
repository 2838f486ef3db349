"""The dialects of agents: a request to what is asked, a recorded turn to a response or its stream of events.

A response is a function of the recorded turn alone (its ids and times too), so a retry gets the same bytes again. A
stream is sent after the turn is recorded: nothing is answered that a SIGKILL could lose.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import cast

import msgspec

from vime.sessions.service import Ask, Refused, parsed_arguments, unknown_response
from vime.sessions.store import Entry

Json = Mapping[str, object]
PIECE = 64
"""Characters of a text in one event of a stream."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """`read` takes the body; `write` and `stream` take the turn, the body and the model's name. A stream yields
    (event name or empty, data)."""

    read: Callable[[Json], Ask]
    write: Callable[[Entry, Json, str], dict[str, object]]
    stream: Callable[[Entry, Json, str], Iterator[tuple[str, object]]] | None


def read_ask(dialect: Dialect, body: Json) -> Ask:
    """Return what is asked. Refused, status 400, for a body that the dialect cannot read."""
    try:
        return dialect.read(body)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Refused(400, "body", f"the body cannot be read: {type(error).__name__} {error}") from error


def text_of(content: object) -> str:
    """Return the text of a content: a string, or parts of text. Refused for images and other parts."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in _list(content):
        if part.get("type") not in ("text", "input_text", "output_text"):
            raise Refused(400, "content", f"content of type {part.get('type')!r} is not supported; expected text")
        texts.append(str(part["text"]))
    return "".join(texts)


def _list(value: object) -> list[dict[str, object]]:
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise Refused(400, "body", f"expected a list of objects, got {type(value).__name__}")
    return value


def _limit(body: Json, *names: str) -> int | None:
    value = next((body[name] for name in names if body.get(name) is not None), None)
    if value is not None and (not isinstance(value, int) or value < 1):
        raise Refused(400, "max_tokens", f"{names[0]} is {value!r}; expected a whole number of at least 1")
    return value


def _stops(value: object) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(cast("list[str]", value or ()))


def _call(call_id: object, name: object, arguments: object) -> dict[str, object]:
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": parsed_arguments(arguments)},
    }


def _may_call(body: Json) -> bool:
    """Return whether the model may call tools. Refused when it has to: nothing here could make it, and an agent that
    counts on the call would be trained on something else."""
    choice = body.get("tool_choice")
    if choice is None:
        return True
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if kind not in ("auto", "none"):
        raise Refused(
            400,
            "tool_choice",
            f"tool_choice is {json.dumps(choice)[:200]}; served are auto and none. Leave it out, and tell the model in "
            "the messages to call the tool.",
        )
    return kind == "auto"


def _pieces(text: str) -> list[str]:
    return [text[start : start + PIECE] for start in range(0, len(text), PIECE)]


def _usage(entry: Entry) -> tuple[int, int]:
    return len(entry.turn.prompt_ids), len(entry.turn.token_ids)


def _log_probs(entry: Entry) -> list[dict[str, object]]:
    """Both shapes in use: vLLM 0.32 reads `token_id`, renderers 0.1 reads `token`."""
    return [
        {"token": f"token_id:{token}", "token_id": token, "logprob": log_prob, "bytes": None, "top_logprobs": []}
        for token, log_prob in zip(entry.turn.token_ids, entry.turn.log_probs, strict=True)
    ]


def _spans(entry: Entry) -> list[dict[str, object]]:
    return [{"version": str(span.version), "start": span.start, "end": span.end} for span in entry.turn.versions]


# --- OpenAI chat completions


def read_chat(body: Json) -> Ask:
    if body.get("n") not in (None, 1):
        raise Refused(400, "n", "n must be 1: a session is one sample")
    messages = []
    for given in _list(body.get("messages")):
        message: dict[str, object] = {"role": given.get("role"), "content": text_of(given.get("content"))}
        for name in ("tool_call_id", "name", "reasoning_content"):
            if given.get(name):
                message[name] = given[name]
        calls = [(call["id"], cast("Json", call["function"])) for call in _list(given.get("tool_calls"))]
        if calls:
            message["tool_calls"] = [_call(name, call["name"], call["arguments"]) for name, call in calls]
        messages.append(message)
    if not messages:
        raise Refused(400, "messages", "messages is empty")
    return Ask(
        messages=messages,
        tools=_list(body.get("tools")) if _may_call(body) else [],
        max_tokens=_limit(body, "max_completion_tokens", "max_tokens"),
        stop=_stops(body.get("stop")),
    )


def _chat_calls(entry: Entry) -> list[dict[str, object]]:
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in entry.reply.calls
    ]


def _chat_reason(entry: Entry) -> str:
    return "tool_calls" if entry.reply.calls and entry.turn.finish_reason == "stop" else entry.turn.finish_reason


def _chat_head(entry: Entry, model: str, kind: str) -> dict[str, object]:
    return {
        "id": f"chatcmpl-{entry.turn.number}",
        "object": kind,
        "created": int(entry.created),
        "model": model,
    }


def _chat_usage(entry: Entry) -> dict[str, object]:
    prompt, said = _usage(entry)
    cached = {"cached_tokens": entry.turn.cached_tokens}
    return {
        "prompt_tokens": prompt,
        "completion_tokens": said,
        "total_tokens": prompt + said,
        "prompt_tokens_details": cached,
    }


def write_chat(entry: Entry, body: Json, model: str) -> dict[str, object]:
    reply = entry.reply
    message: dict[str, object] = {"role": "assistant", "content": reply.content or None}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.calls:
        message["tool_calls"] = _chat_calls(entry)
    choice: dict[str, object] = {"index": 0, "message": message, "finish_reason": _chat_reason(entry)}
    choice["logprobs"] = {"content": _log_probs(entry)} if body.get("logprobs") else None
    answer = {**_chat_head(entry, model, "chat.completion"), "choices": [choice], "usage": _chat_usage(entry)}
    if body.get("return_token_ids"):
        choice["token_ids"] = list(entry.turn.token_ids)
        answer["prompt_token_ids"] = list(entry.turn.prompt_ids)
        choice["weight_versions"] = _spans(entry)
    return answer


def stream_chat(entry: Entry, body: Json, model: str) -> Iterator[tuple[str, object]]:
    head = _chat_head(entry, model, "chat.completion.chunk")

    def chunk(delta: Json, reason: str | None = None) -> tuple[str, object]:
        return "", {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": reason, "logprobs": None}]}

    yield chunk({"role": "assistant", "content": ""})
    for piece in _pieces(entry.reply.reasoning):
        yield chunk({"reasoning_content": piece})
    for piece in _pieces(entry.reply.content):
        yield chunk({"content": piece})
    for index, call in enumerate(_chat_calls(entry)):
        yield chunk({"tool_calls": [{"index": index, **call}]})
    yield chunk({}, _chat_reason(entry))
    if cast("Json", body.get("stream_options") or {}).get("include_usage"):
        yield "", {**head, "choices": [], "usage": _chat_usage(entry)}
    yield "", "[DONE]"


# --- OpenAI responses


def read_responses(body: Json) -> Ask:
    for name in ("conversation", "prompt"):
        if body.get(name):
            raise Refused(400, name, f"{name} is kept by a server of OpenAI; send input, or previous_response_id")
    messages: list[dict[str, object]] = []
    if body.get("instructions"):
        messages.append({"role": "system", "content": body["instructions"]})
    given = body.get("input")
    for item in [{"role": "user", "content": given}] if isinstance(given, str) else _list(given):
        kind = item.get("type", "message")
        if kind == "message":
            messages.append({"role": item["role"], "content": text_of(item["content"])})
        elif kind == "function_call":
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            calls = cast("list[object]", messages[-1].setdefault("tool_calls", []))
            calls.append(_call(item["call_id"], item["name"], item["arguments"]))
        elif kind == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": text_of(item["output"])})
        elif kind != "reasoning":
            raise Refused(400, "input", f"an item of type {kind!r} is not supported")
    tools: list[dict[str, object]] = []
    for tool in _list(body.get("tools")):
        if tool.get("type") != "function":
            raise Refused(400, "tools", f"a tool of type {tool.get('type')!r} is not supported; expected function")
        tools.append({"type": "function", "function": _function(tool, "parameters")})
    previous = body.get("previous_response_id")
    return Ask(
        messages=messages,
        tools=tools if _may_call(body) else [],
        max_tokens=_limit(body, "max_output_tokens"),
        follows=_number(previous, "resp_") if previous else None,
    )


def _number(name: object, prefix: str) -> int:
    """Return the number of the turn that a response of this name was made of."""
    number = str(name).removeprefix(prefix)
    if not number.isdecimal():
        raise unknown_response(name)
    return int(number)


def _function(tool: Json, schema: str) -> dict[str, object]:
    return {"name": tool["name"], "description": tool.get("description") or "", "parameters": tool.get(schema) or {}}


def write_responses(entry: Entry, body: Json, model: str) -> dict[str, object]:
    number, reply = entry.turn.number, entry.reply
    is_cut = entry.turn.finish_reason == "length"
    output: list[dict[str, object]] = []
    if reply.reasoning:
        summary = [{"type": "summary_text", "text": reply.reasoning}]
        output.append({"type": "reasoning", "id": f"rs_{number}", "summary": summary})
    if reply.content or not reply.calls:
        content = [{"type": "output_text", "text": reply.content, "annotations": [], "logprobs": []}]
        message = {"type": "message", "id": f"msg_{number}", "role": "assistant", "content": content}
        output.append({**message, "status": "incomplete" if is_cut else "completed"})
    for place, call in enumerate(reply.calls):
        head = {"type": "function_call", "id": f"fc_{number}_{place}", "call_id": call.id, "status": "completed"}
        output.append({**head, "name": call.name, "arguments": call.arguments})
    prompt, said = _usage(entry)
    return {
        "id": f"resp_{number}",
        "object": "response",
        "created_at": entry.created,
        "model": model,
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "error": None,
        "instructions": body.get("instructions"),
        "metadata": {},
        "output": output,
        "parallel_tool_calls": True,
        "previous_response_id": body.get("previous_response_id"),
        "temperature": None,
        "top_p": None,
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "usage": {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": entry.turn.cached_tokens},
            "output_tokens": said,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + said,
        },
    }


def stream_responses(entry: Entry, body: Json, model: str) -> Iterator[tuple[str, object]]:
    for number, (kind, event) in enumerate(_response_events(write_responses(entry, body, model))):
        yield kind, {"type": kind, "sequence_number": number, **event}


def _response_events(whole: dict[str, object]) -> Iterator[tuple[str, Json]]:
    begun = {**whole, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    yield "response.created", {"response": begun}
    for index, item in enumerate(cast("list[dict[str, object]]", whole["output"])):
        place = {"output_index": index, "item_id": item["id"]}
        if item["type"] == "message":
            (part,) = cast("list[dict[str, object]]", item["content"])
            start = {**item, "content": [], "status": "in_progress"}
            yield "response.output_item.added", {"output_index": index, "item": start}
            place["content_index"] = 0
            yield "response.content_part.added", {**place, "part": {**part, "text": ""}}
            for piece in _pieces(str(part["text"])):
                yield "response.output_text.delta", {**place, "delta": piece, "logprobs": []}
            yield "response.output_text.done", {**place, "text": part["text"], "logprobs": []}
            yield "response.content_part.done", {**place, "part": part}
        elif item["type"] == "function_call":
            start = {**item, "arguments": "", "status": "in_progress"}
            yield "response.output_item.added", {"output_index": index, "item": start}
            yield "response.function_call_arguments.delta", {**place, "delta": item["arguments"]}
            done = {**place, "arguments": item["arguments"], "name": item["name"]}
            yield "response.function_call_arguments.done", done
        else:
            yield "response.output_item.added", {"output_index": index, "item": item}
        yield "response.output_item.done", {"output_index": index, "item": item}
    yield f"response.{whole['status']}", {"response": whole}


# --- Anthropic messages


def read_messages(body: Json) -> Ask:
    messages: list[dict[str, object]] = []
    if body.get("system"):
        messages.append({"role": "system", "content": text_of(body["system"])})
    for given in _list(body.get("messages")):
        content = given.get("content")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else _list(content)
        texts = [block for block in blocks if block.get("type") not in ("tool_use", "tool_result", "thinking")]
        for block in blocks:
            if block.get("type") == "tool_result":
                result = text_of(block.get("content"))
                messages.append({"role": "tool", "tool_call_id": block["tool_use_id"], "content": result})
        calls = [_call(use["id"], use["name"], use["input"]) for use in blocks if use.get("type") == "tool_use"]
        if texts or calls:
            message: dict[str, object] = {"role": given["role"], "content": text_of(texts)}
            messages.append({**message, "tool_calls": calls} if calls else message)
    tools: list[dict[str, object]] = [
        {"type": "function", "function": _function(tool, "input_schema")} for tool in _list(body.get("tools"))
    ]
    thread = cast("Json", body.get("thread") or {})
    goes_on, may_call = thread.get("type") == "continue", _may_call(body)
    return Ask(
        messages=messages,
        tools=tools if may_call else [],
        max_tokens=_limit(body, "max_tokens"),
        stop=_stops(body.get("stop_sequences")),
        follows=_number(thread["previous_message_id"], "msg_") if goes_on else None,
        inherits_tools=goes_on and may_call and "tools" not in body,
    )


def write_messages(entry: Entry, _: Json, model: str) -> dict[str, object]:
    reply = entry.reply
    content: list[Json] = []
    if reply.reasoning:
        content.append({"type": "thinking", "thinking": reply.reasoning, "signature": ""})
    if reply.content or not reply.calls:
        content.append({"type": "text", "text": reply.content})
    for call in reply.calls:
        given = parsed_arguments(call.arguments)
        used = given if isinstance(given, dict) else {"arguments": call.arguments}
        content.append({"type": "tool_use", "id": call.id, "name": call.name, "input": used})
    reason = "max_tokens" if entry.turn.finish_reason == "length" else "tool_use" if reply.calls else "end_turn"
    prompt, said = _usage(entry)
    return {
        "id": f"msg_{entry.turn.number}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        "stop_reason": reason,
        "stop_sequence": None,
        "usage": {"input_tokens": prompt, "output_tokens": said},
    }


def stream_messages(entry: Entry, body: Json, model: str) -> Iterator[tuple[str, object]]:
    for kind, event in _message_events(write_messages(entry, body, model)):
        yield kind, {"type": kind, **event}


def _message_events(whole: dict[str, object]) -> Iterator[tuple[str, Json]]:
    usage = cast("dict[str, int]", whole["usage"])
    begun = {**whole, "content": [], "stop_reason": None, "usage": {**usage, "output_tokens": 0}}
    yield "message_start", {"message": begun}
    for index, block in enumerate(cast("list[dict[str, object]]", whole["content"])):
        if block["type"] == "tool_use":
            start = {**block, "input": {}}
            deltas = [{"type": "input_json_delta", "partial_json": json.dumps(block["input"])}]
        else:
            name = str(block["type"])
            field = "text" if name == "text" else "thinking"
            start = {**block, field: ""}
            deltas = [{"type": f"{name}_delta", field: piece} for piece in _pieces(str(block[field]))]
        yield "content_block_start", {"index": index, "content_block": start}
        for delta in deltas:
            yield "content_block_delta", {"index": index, "delta": delta}
        yield "content_block_stop", {"index": index}
    ended = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
    yield "message_delta", {"delta": ended, "usage": {"output_tokens": usage["output_tokens"]}}
    yield "message_stop", {}


# --- tokens in, tokens out


def read_generate(body: Json) -> Ask:
    try:
        ids = tuple(msgspec.convert(body.get("token_ids"), list[int]))
        params = msgspec.convert(body.get("sampling_params") or {}, dict[str, object])
    except msgspec.ValidationError as error:
        raise Refused(400, "body", f"token_ids and sampling_params: {error}") from error
    if not ids:
        raise Refused(400, "token_ids", "token_ids is empty")
    if params.get("n") not in (None, 1):
        raise Refused(400, "n", "n must be 1: a session is one sample")
    return Ask(token_ids=ids, max_tokens=_limit(params, "max_tokens"), stop=_stops(params.get("stop")))


def write_generate(entry: Entry, body: Json, model: str) -> dict[str, object]:
    choice = {
        "index": 0,
        "token_ids": list(entry.turn.token_ids),
        "finish_reason": entry.turn.finish_reason,
        "logprobs": {"content": _log_probs(entry)},
        "weight_versions": _spans(entry),
    }
    return {"request_id": str(body.get("request_id") or entry.turn.number), "choices": [choice], "model": model}


DIALECTS: dict[str, Dialect] = {
    "/v1/chat/completions": Dialect(read_chat, write_chat, stream_chat),
    "/v1/responses": Dialect(read_responses, write_responses, stream_responses),
    "/v1/messages": Dialect(read_messages, write_messages, stream_messages),
    "/inference/v1/generate": Dialect(read_generate, write_generate, None),
}


def encode_events(events: Iterator[tuple[str, object]]) -> Iterator[bytes]:
    """Return server-sent events."""
    for name, data in events:
        text = data if isinstance(data, str) else json.dumps(data)
        yield (f"event: {name}\n" if name else "").encode() + f"data: {text}\n\n".encode()
