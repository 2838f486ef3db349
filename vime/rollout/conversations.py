"""A conversation to imitate: which of its tokens are the prompt, and which of the others the assistant wrote.

It is rendered turn by turn as the model will see it: everything before an assistant's turn ends with the chat
template's generation prompt. So the trained tokens are what the model has to write there, up to the token that ends its
turn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from vime.types import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TURNS = "sft_turns"
"""Key of a sample's metadata: [[token ids, is it trained], ...] after the prompt."""
ASSISTANT = "assistant"


@dataclass(frozen=True, slots=True)
class Conversation:
    """`turns` are the tokens after the prompt, in pieces that are trained or not."""

    text: str
    prompt_ids: tuple[int, ...]
    turns: tuple[tuple[tuple[int, ...], bool], ...]

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + sum(len(ids) for ids, _ in self.turns)


def turns_of(metadata: Mapping[str, object]) -> Sequence[tuple[Sequence[int], bool]]:
    """Return what a prompt's metadata holds under TURNS; empty for a prompt that is no conversation."""
    return cast("Sequence[tuple[Sequence[int], bool]]", metadata.get(TURNS, ()))


def is_conversation(content: object) -> bool:
    """Return whether a record's prompt is a list of messages of which one is the assistant's."""
    return isinstance(content, list) and any(
        isinstance(message, Mapping) and message.get("role") == ASSISTANT for message in content
    )


def chat_text(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, object]],
    tools: Sequence[Mapping[str, object]] | None,
    arguments: Mapping[str, object],
    *,
    asks: bool,
) -> str:
    """Return the messages as the chat template renders them; `asks`: with the generation prompt at the end.
    `arguments`: --apply-chat-template-kwargs. Raises whatever the template raises."""
    template: Callable[..., object] = tokenizer.apply_chat_template  # its own types allow no tool calls or images
    return str(template(list(messages), tools=tools, tokenize=False, add_generation_prompt=asks, **arguments))


def read_conversation(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, object]],
    tools: Sequence[Mapping[str, object]] | None,
    arguments: Mapping[str, object],
    *,
    where: str,
) -> Conversation:
    """Return the conversation. DataError when the tokenizer has no chat template, or one that rewrites earlier
    turns."""
    if not tokenizer.chat_template:
        raise DataError(f"{where}: a list of messages, and the tokenizer has no chat template. Give text and a label.")

    def render(count: int, *, asks: bool) -> str:
        return chat_text(tokenizer, messages[:count], tools, arguments, asks=asks)

    try:
        whole = render(len(messages), asks=False)
        cuts = [
            (render(place, asks=True), render(place + 1, asks=False))
            for place, message in enumerate(messages)
            if message["role"] == ASSISTANT
        ]
    except Exception as error:
        raise DataError(
            f"{where}: the chat template refused the conversation: {type(error).__name__} {error}."
        ) from error
    if any(not whole.startswith(after) or not after.startswith(before) for before, after in cuts):
        raise DataError(
            f"{where}: the chat template writes earlier turns differently when others follow, so they are not what the "
            "model would have said. Give each turn as a record of its own, with --label-key."
        )
    if cuts[0][0] == "":
        raise DataError(f"{where}: the conversation begins with the assistant, so nothing asks for its first turn.")

    def encode(text: str) -> tuple[int, ...]:
        return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])

    turns: list[tuple[tuple[int, ...], bool]] = []
    end = len(cuts[0][0])
    for before, after in cuts:
        if len(before) > end:
            turns.append((encode(before[end:]), False))
        turns += _said(encode(after[len(before) :]), tokenizer.eos_token_id)
        end = len(after)
    return Conversation(whole, encode(cuts[0][0]), tuple(turn for turn in turns if turn[0]))


def _said(ids: tuple[int, ...], eos: int | None) -> list[tuple[tuple[int, ...], bool]]:
    """Split the assistant's turn at the token that ends it; what the template writes after that is context."""
    if eos not in ids:
        return [(ids, True)]
    end = len(ids) - ids[::-1].index(eos)
    return [(ids[:end], True), (ids[end:], False)]
