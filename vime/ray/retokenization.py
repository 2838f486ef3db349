"""Other tokens that a row may have had when it was sampled: those that its own text, or a round trip through the
tokenizer, encodes to. Only those with as many response tokens can be compared with the recorded scores."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from vime.config.parse import Config
from vime.data.images import images_of
from vime.data.rows import TrainRow
from vime.ray.rollout_manager import SampleText
from vime.rollout.images import expand_prompt
from vime.rollout.prompts import load_tokenizer
from vime.types import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHOWN_TEXT = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Retokenization:
    """Tokens that row number `row` may have had when it was sampled, with as many response tokens."""

    row: int
    tokens: Sequence[int]
    says: str  # where they come from
    is_contradiction: bool = False  # the sample's own text shows that its tokens are wrong


def retokenizations(
    config: Config, rows: Sequence[TrainRow], texts: Sequence[SampleText | None]
) -> list[Retokenization]:
    """Yield retokenizations that differ from the row's tokens, or contradict them."""
    tokenizer = load_tokenizer(config.model.hf_checkpoint)
    return [
        retokenization
        for number, (row, text) in enumerate(zip(rows, texts, strict=True))
        for retokenization in _of_row(config, tokenizer, number, row, text)
    ]


def _of_row(
    config: Config, tokenizer: PreTrainedTokenizerBase, number: int, row: TrainRow, text: SampleText | None
) -> Iterator[Retokenization]:
    tokens = row.tokens.tolist()
    prompt, response = tokens[: -row.response_length], tokens[-row.response_length :]

    def told(new: list[int], says: str, *, contradicts: bool = False) -> Retokenization:
        return Retokenization(row=number, tokens=new, says=says, is_contradiction=contradicts)

    if text is not None and text.response:  # a plug-in need not keep the text
        decoded = tokenizer.decode(response, skip_special_tokens=True)
        contradicts = decoded != text.response
        says = f"sample {row.sample_index}'s own text {text.response[:SHOWN_TEXT]!r}"
        if contradicts:
            says += f" (they decode to {decoded[:SHOWN_TEXT]!r})"
        again = _encode_response(tokenizer, text.response, response)
        if again is not None and again != response:
            yield told([*prompt, *again], f"{says} ({_first_difference(response, again)})", contradicts=contradicts)
        elif contradicts:
            yield told(tokens, says, contradicts=True)
    if text is not None and text.prompt is not None:
        again = _encode_prompt(config, tokenizer, text, prompt)
        if again != prompt:
            yield told(
                [*again, *response], f"sample {row.sample_index}'s prompt text ({_first_difference(prompt, again)})"
            )
    # an image's places stand for one token of the text: decoded they are not what was encoded
    again = [] if images_of(row) else list(tokenizer.encode(tokenizer.decode(prompt), add_special_tokens=False))
    if again and again != prompt:
        yield told([*again, *response], f"the prompt decoded and encoded ({_first_difference(prompt, again)})")
    round_trip = _encode_response(tokenizer, str(tokenizer.decode(response, skip_special_tokens=True)), response)
    if round_trip is not None and round_trip != response:
        yield told(
            [*prompt, *round_trip], f"the completion decoded and encoded ({_first_difference(response, round_trip)})"
        )
    begin = tokenizer.bos_token_id
    if begin is not None:
        other = prompt[1:] if prompt[0] == begin else [begin, *prompt]
        if other:
            words = "without its begin token" if prompt[0] == begin else "with a begin token before it"
            yield told([*other, *response], f"the prompt {words}")


def _encode_prompt(
    config: Config, tokenizer: PreTrainedTokenizerBase, text: SampleText, prompt: list[int]
) -> list[int]:
    """Return the tokens of a prompt's text, with the places of the sample's images; `prompt`, where it has others."""
    assert text.prompt is not None
    special = not config.data.apply_chat_template
    if not text.images:
        return list(tokenizer(text.prompt, add_special_tokens=special)["input_ids"])
    urls = cast("list[str]", text.images["images"])
    try:
        return expand_prompt(config.flat, text.prompt, urls, "the prompt", special=special)[0]
    except DataError:  # a plug-in changed the text
        return prompt


def _encode_response(tokenizer: PreTrainedTokenizerBase, text: str, response: Sequence[int]) -> list[int] | None:
    """The tokens of `text`, and the special tokens that ended the response; None when they are not as many."""
    special = set(tokenizer.all_special_ids)
    end = len(response)
    while end and response[end - 1] in special:
        end -= 1
    again = [*tokenizer.encode(text, add_special_tokens=False), *response[end:]]
    return again if len(again) == len(response) else None


def _first_difference(tokens: Sequence[int], again: Sequence[int]) -> str:
    """Say where two lists differ first."""
    for position, (one, other) in enumerate(zip(tokens, again, strict=False)):
        if one != other:
            return f"token {position}: the row has {one}, this {other}"
    return f"the row has {len(tokens)} tokens, this {len(again)}"
