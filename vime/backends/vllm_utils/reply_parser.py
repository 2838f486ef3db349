"""vLLM's own parsers of reasoning and tool calls, used on a tokenizer alone: no engine runs in this process.

Importing them takes about 6 s of CPU time, once, and happens when a parser is made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

from vime.types import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from vllm.tokenizers import TokenizerLike
    from vllm.tool_parsers.abstract_tool_parser import Tool


class Parsed(NamedTuple):
    """What a completion says; `calls` are (id, name, arguments as JSON)."""

    content: str
    reasoning: str
    calls: tuple[tuple[str, str, str], ...]


Parse = Callable[[Sequence[int], Sequence[int], Sequence[Mapping[str, object]]], Parsed]


def make_reply_parser(tokenizer: PreTrainedTokenizerBase, *, tools: str | None, reasoning: str | None) -> Parse:
    """Return a function of (prompt ids, completion ids, tools). `tools` and `reasoning` are names that vLLM's
    --tool-call-parser and --reasoning-parser know; ConfigError for others and for a tokenizer that they cannot use."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.parser.parser_manager import ParserManager

    like = cast("TokenizerLike", tokenizer)  # the two differ in annotations only

    try:
        kind = ParserManager.get_parser(
            tool_parser_name=tools, reasoning_parser_name=reasoning, enable_auto_tools=True, tokenizer=like
        )
    except (TypeError, KeyError) as error:
        raise ConfigError(f"parsers of vLLM: tools {tools!r}, reasoning {reasoning!r}: {error}") from error

    def parse(prompt_ids: Sequence[int], token_ids: Sequence[int], given: Sequence[Mapping[str, object]]) -> Parsed:
        # Families mark calls and reasoning by special tokens, so these stay; the one that ends the turn does not.
        ended = list(token_ids[:-1] if token_ids and token_ids[-1] in _ends(tokenizer) else token_ids)
        text = str(tokenizer.decode(ended, skip_special_tokens=False, clean_up_tokenization_spaces=False))
        if kind is None:
            return Parsed(text, "", ())
        request = ChatCompletionRequest.model_validate(
            {"messages": [{"role": "user", "content": ""}], "tools": list(given) or None, "model": ""}
        )
        parser = kind(like, cast("list[Tool] | None", request.tools))
        parser.set_prompt_token_ids(list(prompt_ids))
        thought, content, calls = parser.parse(
            text, request, enable_auto_tools=bool(given), model_output_token_ids=ended
        )
        found = tuple(
            (call.id or f"call_{len(prompt_ids)}_{place}", call.name, call.arguments)
            for place, call in enumerate(calls or ())
        )
        return Parsed(content or "", thought or "", found)

    return parse


def _ends(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    return {number for number in (tokenizer.eos_token_id, tokenizer.pad_token_id) if isinstance(number, int)}
