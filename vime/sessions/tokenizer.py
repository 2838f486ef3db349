"""A Hugging Face tokenizer as sessions use it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, cast

from vime.sessions.splice import Message
from vime.types import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class HfChatTokenizer:
    """Implements `splice.ChatTokenizer`. DataError for a tokenizer without a chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, object] | None = None) -> None:
        """`arguments`: --apply-chat-template-kwargs."""
        if not tokenizer.chat_template:
            raise DataError("sessions: the tokenizer has no chat template. Add chat_template.jinja beside the model.")
        self._tokenizer, self._arguments = tokenizer, dict(arguments or {})
        added = [number for number, token in tokenizer.added_tokens_decoder.items() if token.special]
        self._special = frozenset(tokenizer.all_special_ids) | frozenset(added)

    @property
    def special_ids(self) -> Collection[int]:
        return self._special

    def render(self, messages: Sequence[Message], tools: Sequence[Message] | None, *, asks: bool) -> str:
        template: Callable[..., object] = self._tokenizer.apply_chat_template  # its own types allow no tool calls
        given = [dict(message) for message in messages]
        return str(template(given, tools=tools or None, tokenize=False, add_generation_prompt=asks, **self._arguments))

    def encode(self, text: str) -> list[int]:
        return cast("list[int]", self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, ids: Sequence[int], *, without_special: bool = False) -> str:
        return str(
            self._tokenizer.decode(list(ids), skip_special_tokens=without_special, clean_up_tokenization_spaces=False)
        )
