"""Read prompt files: jsonl or parquet records -> tokenised prompts, every fault said with its file and line.

Both the training data source and the evaluation use it. Everything is read and checked at construction, so that a bad
record in the last line is refused before the first prompt is sent.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vime.config.hf_config import read_model_shape
from vime.types import DataError
from vime.utils.imports import without_collector

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PLAIN_TYPES = ("llama", "qwen3", "qwen3_moe")
"""Models whose directory is believed when it names a plain tokenizer. For qwen2 `AutoTokenizer` knows better."""
_SLICE = re.compile(r"^(?P<path>.*)@\[(?P<start>-?\d*):(?P<stop>-?\d*)\]$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One problem, ready to be asked. `where` is for messages: file and line, or generator and number."""

    text: str
    token_ids: tuple[int, ...]
    label: Any
    where: str
    metadata: Mapping[str, Any] = field(default_factory=dict)


@lru_cache(maxsize=4)
def load_tokenizer(directory: str) -> PreTrainedTokenizerBase:
    """The tokenizer of --hf-checkpoint; one object per process and directory."""
    path = Path(directory).expanduser()
    with without_collector():
        if is_plain_tokenizer(path):
            from transformers import TokenizersBackend as Loader
        else:
            from transformers import AutoTokenizer as Loader
    try:
        return Loader.from_pretrained(str(path))
    except (OSError, ValueError) as error:
        raise DataError(
            f"--hf-checkpoint {directory}: no tokenizer can be loaded from there: {error}. Expected tokenizer.json or "
            "the files of a transformers tokenizer."
        ) from error


def is_plain_tokenizer(path: Path) -> bool:
    """Whether `path` says that its tokenizer is tokenizer.json and nothing else, as transformers writes it since 5.0.

    `AutoTokenizer` takes the same class then, but its import takes 2 CPU s more: it brings the code of generation.
    """
    try:
        settings, model = (json.loads((path / name).read_text()) for name in ("tokenizer_config.json", "config.json"))
        return (
            settings["tokenizer_class"] == "TokenizersBackend"
            and "auto_map" not in settings
            and model["model_type"] in PLAIN_TYPES
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


def context_limit(args: Any) -> int:
    """Longest prompt + answer, tokens: --rollout-max-context-len, else the model's positions."""
    return args.rollout_max_context_len or read_model_shape(args.hf_checkpoint).max_position_embeddings


def read_prompts(args: Any, path: str, *, flag: str) -> list[Prompt]:
    """Every record of `path` (given by `flag`; `path@[a:b]` takes a slice), tokenised and checked."""
    file, part = split_slice(path, flag)
    records = list(_read_records(file, flag))[part]
    if not records:
        raise DataError(f"{flag} {path}: no records there. Expected at least one line with a prompt.")
    reader = _RecordReader(args, file)
    prompts = [reader.prompt(number, record) for number, record in records]
    check_lengths(args, prompts)
    return prompts


def split_slice(path: str, flag: str) -> tuple[Path, slice]:
    """`data.jsonl@[10:20]` -> the file and the slice; without a suffix the whole file."""
    match = _SLICE.match(path)
    if match is None:
        if "@[" in path:
            raise DataError(f"{flag} {path}: the slice cannot be read. Expected path@[start:stop] with whole numbers.")
        return Path(path).expanduser(), slice(None)
    start, stop = (int(text) if text else None for text in match.group("start", "stop"))
    return Path(match["path"]).expanduser(), slice(start, stop)


def check_lengths(args: Any, prompts: list[Prompt]) -> None:
    """Refuse a prompt over --rollout-max-prompt-len, or one that leaves no room for a single answer token."""
    context, limit = context_limit(args), args.rollout_max_prompt_len
    for prompt in prompts:
        length = len(prompt.token_ids)
        if limit is not None and length > limit:
            raise DataError(
                f"{prompt.where}: the prompt has {length} tokens, --rollout-max-prompt-len is {limit}. Remove the "
                "record or raise the flag."
            )
        if length + 1 > context:
            raise DataError(
                f"{prompt.where}: the prompt has {length} tokens and the context is {context} "
                "(--rollout-max-context-len or the model's limit): no room for an answer. Remove the record."
            )
        if length == 0:
            raise DataError(f"{prompt.where}: the prompt has no tokens. Remove the record.")


def _read_records(file: Path, flag: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number from 1, record); blank lines of a jsonl file are passed over."""
    if not file.is_file():
        raise DataError(f"{flag} {file}: no such file. Expected a jsonl or parquet file.")
    if file.suffix == ".parquet":
        yield from _read_parquet(file, flag)
        return
    try:
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield number, _parse_line(file, number, line)
    except UnicodeDecodeError as error:
        raise DataError(
            f"{flag} {file}: not UTF-8 text: {error}. Expected jsonl, or parquet named *.parquet."
        ) from error


def _parse_line(file: Path, number: int, line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        shown = line.strip()[:80]
        raise DataError(
            f"{file}:{number}: not JSON: {error}; got {shown!r}. Expected one JSON object a line."
        ) from error
    if not isinstance(record, dict):
        raise DataError(
            f"{file}:{number}: got a JSON {type(record).__name__}, expected an object with the prompt's keys."
        )
    return record


def _read_parquet(file: Path, flag: str) -> Iterator[tuple[int, dict[str, Any]]]:
    from pyarrow import ArrowException, parquet

    try:
        table = parquet.ParquetFile(file)
        number = 0
        for batch in table.iter_batches():
            for record in batch.to_pylist():
                number += 1
                yield number, record
    except (ArrowException, OSError) as error:
        raise DataError(f"{flag} {file}: cannot be read as parquet: {error}. Check the file.") from error


class _RecordReader:
    """Record -> Prompt, by the key flags and the chat template."""

    def __init__(self, args: Any, file: Path) -> None:
        self._args, self._file = args, file
        self._tokenizer = load_tokenizer(args.hf_checkpoint)
        self._template_arguments: dict[str, Any] = json.loads(args.apply_chat_template_kwargs or "{}")
        if args.apply_chat_template and not self._tokenizer.chat_template:
            raise DataError(
                f"--apply-chat-template: the tokenizer of {args.hf_checkpoint} has no chat template. Remove the flag."
            )

    def prompt(self, number: int, record: dict[str, Any]) -> Prompt:
        args, where = self._args, f"{self._file}:{number}"
        content = self._value(record, args.input_key, "--input-key", where)
        tools = self._value(record, args.tool_key, "--tool-key", where) if args.tool_key else None
        metadata = record.get(args.metadata_key)
        if metadata is not None and not isinstance(metadata, dict):
            raise DataError(f"{where}: {args.metadata_key!r} is {type(metadata).__name__}, expected an object.")
        text, token_ids = self._render(content, tools, where)
        return Prompt(
            text=text,
            token_ids=tuple(token_ids),
            label=self._value(record, args.label_key, "--label-key", where) if args.label_key else None,
            where=where,
            metadata=dict(metadata or {}) | ({"tools": tools} if tools else {}),
        )

    def _value(self, record: dict[str, Any], key: str, flag: str, where: str) -> Any:
        if key not in record:
            found = ", ".join(sorted(record)) or "none"
            raise DataError(f"{where}: no key {key!r} ({flag}); the record has: {found}. Fix the record or the flag.")
        return record[key]

    def _render(self, content: Any, tools: Any, where: str) -> tuple[str, list[int]]:
        """Prompt text and its tokens. Special tokens come from the template, or else from the tokenizer."""
        if not self._args.apply_chat_template:
            if not isinstance(content, str):
                raise DataError(
                    f"{where}: the prompt is {type(content).__name__}, expected text. For a list of chat messages add "
                    "--apply-chat-template."
                )
            return content, self._tokenizer(content)["input_ids"]
        messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
        try:
            text = self._tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=True, **self._template_arguments
            )
        except Exception as error:
            raise DataError(
                f"{where}: the chat template refused the prompt: {type(error).__name__} {error}."
            ) from error
        return str(text), self._tokenizer(text, add_special_tokens=False)["input_ids"]
