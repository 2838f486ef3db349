"""The prompt of an agent's next turn: the recorded tokens as they are, and after them only what is new, rendered.

An agent sends its whole conversation with every request. Rendering it again would not give the tokens that the engine
sampled: text has several tokenisations, templates drop earlier reasoning, and parsed calls are written differently. So
the assistant's recorded message is replaced by a marker, the template renders the conversation, and what stands after
the marker is what the template writes after a message of the assistant. Nothing before the marker is used, therefore a
template may rewrite earlier turns as it likes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol, cast

Message = Mapping[str, object]
"""A message in the form that chat templates read: role, content, and optionally tool_calls, tool_call_id, name."""

MARKER = "vimeqmarkerq"
"""Letters only: no template escapes, strips or splits it."""


class ChatTokenizer(Protocol):
    """What sessions need of a tokenizer with a chat template."""

    @property
    def special_ids(self) -> Collection[int]: ...

    def render(self, messages: Sequence[Message], tools: Sequence[Message] | None, *, asks: bool) -> str:
        """Return the text; `asks`: with the generation prompt at its end. Raises whatever the template raises."""
        ...

    def encode(self, text: str) -> list[int]:
        """Return the ids of the text, nothing added."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text, special tokens included."""
        ...


def continuation(
    tokenizer: ChatTokenizer,
    before: Sequence[Message],
    said: Message,
    new: Sequence[Message],
    tools: Sequence[Message] | None,
    last_id: int | None,
) -> list[int] | None:
    """Return the ids that follow the sampled ids of the message `said`: the rest of its turn, the messages `new`, and
    the generation prompt. None when the template does not allow to tell what follows; the turn is then a branch.

    `last_id` is the last sampled id. If the engine stopped at the token that ends a turn, that token is not written
    twice; a completion that was cut (by length) is closed as the template closes it.
    """
    for stand_in in _stand_ins(said):
        text = _after(tokenizer, before, stand_in, new, tools)
        if text is not None:
            break
    else:
        return None
    ids = tokenizer.encode(text)
    special = tokenizer.special_ids
    is_ended = last_id is not None and bool(ids) and (ids[0] == last_id or (last_id in special and ids[0] in special))
    return ids[1:] if is_ended else ids


def _stand_ins(said: Message) -> list[Message]:
    """Return messages to render in place of the recorded one, the most faithful first: some templates want the calls
    that results of tools belong to, and some of these write no content beside calls, but always a call's name."""
    plain: Message = {"role": "assistant", "content": MARKER}
    calls = cast("Sequence[Mapping[str, Mapping[str, object]]]", said.get("tool_calls") or ())
    if not calls:
        return [plain]
    named = {**calls[-1], "function": {**calls[-1]["function"], "name": MARKER}}
    return [
        {**plain, "tool_calls": list(calls)},
        {"role": "assistant", "content": "", "tool_calls": [*calls[:-1], named]},
        plain,
    ]


def _after(
    tokenizer: ChatTokenizer,
    before: Sequence[Message],
    stand_in: Message,
    new: Sequence[Message],
    tools: Sequence[Message] | None,
) -> str | None:
    """Return the text after the stand-in and its calls: the end of its turn, the new messages, the prompt to answer."""
    plain = {"role": "assistant", "content": MARKER}
    try:
        whole = _tail(tokenizer.render([*before, stand_in, *new], tools, asks=True))
        if not stand_in.get("tool_calls"):
            return whole
        alone = _tail(tokenizer.render([*before, stand_in], tools, asks=False))
        end = _tail(tokenizer.render([*before, plain], tools, asks=False))
    except Exception:  # boundary: templates are programs of others and raise anything; the turn is then a branch
        return None
    if whole is None or alone is None or end is None or not whole.startswith(alone) or not alone.endswith(end):
        return None
    return end + whole[len(alone) :]


def _tail(text: str) -> str | None:
    """Return what stands after the marker; None unless it is there once."""
    _, marker, tail = text.partition(MARKER)
    return tail if marker and MARKER not in tail else None
