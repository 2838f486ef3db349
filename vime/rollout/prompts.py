"""Read prompts: records of jsonl, parquet or a saved data set -> tokenised prompts; faults name file and line.

Both the training data source and the evaluation use it. Everything is read and checked at construction, so that a bad
record in the last line is refused before the first prompt is sent.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, cast

from vime.config.graders import COMPARE_WITH_LABEL, own_grader, own_grader_fault
from vime.config.hf_config import read_model_shape
from vime.config.model_files import has_tokenizer, no_tokenizer
from vime.config.parse import Args
from vime.config.paths import EXPECTED_PROMPTS, prompt_files
from vime.data.json_values import json_fault, text_fault
from vime.rollout.conversations import TURNS, chat_text, is_conversation, read_conversation, turns_of
from vime.rollout.images import Image, PromptImages, expand_prompt, read_images, refuse_places
from vime.rollout.labels import label_fault
from vime.types import DataError
from vime.utils.imports import without_collector

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

PLAIN_TYPES = ("llama", "qwen3", "qwen3_moe")
"""Model types whose config names a plain tokenizer that is used as it is. For qwen2 `AutoTokenizer` decides."""
_SLICE = re.compile(r"^(?P<path>.*)@\[(?P<start>-?\d*):(?P<stop>-?\d*)\]$")


Record = dict[str, object]
"""One line of a prompt file."""
Placed = tuple[Path, int, Record]
"""A record with its file and its line, from 1 (its row in a table): of a pattern or a directory, that of the part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One problem, tokenised. `where` is for messages: file and line, or generator and number."""

    text: str
    token_ids: tuple[int, ...]
    label: object
    where: str
    metadata: Mapping[str, object] = field(default_factory=dict)
    images: PromptImages | None = None


def decode_response(directory: str, tokens: Sequence[int]) -> str:
    """Return the text of response tokens as `Sample.response` has it, by the tokenizer of `load_tokenizer`."""
    return str(load_tokenizer(directory).decode(list(tokens), skip_special_tokens=True))


@lru_cache(maxsize=4)
def load_tokenizer(directory: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer of --hf-checkpoint; one object per process and directory."""
    path = Path(directory).expanduser()
    if not has_tokenizer(path):  # without files transformers would make a tokenizer with an empty vocabulary
        raise DataError(no_tokenizer(f"--hf-checkpoint {directory}"))
    load: Callable[[str], PreTrainedTokenizerBase]
    with without_collector():
        if is_plain_tokenizer(path):
            from transformers import TokenizersBackend

            load = TokenizersBackend.from_pretrained
        else:
            from transformers import AutoTokenizer

            load = AutoTokenizer.from_pretrained
    try:
        return load(str(path))
    except (OSError, ValueError) as error:
        raise DataError(
            f"--hf-checkpoint {directory}: no tokenizer can be loaded from there: {error}. Expected tokenizer.json or "
            "the files of a transformers tokenizer."
        ) from error


def is_plain_tokenizer(path: Path) -> bool:
    """Return whether `path` declares that its tokenizer is tokenizer.json and nothing else (transformers 5.0 and
    later).

    `AutoTokenizer` takes the same class then, but its import takes 2 CPU s more: it imports the code of generation.
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


def context_limit(args: Args) -> int:
    """Return the longest prompt + completion, tokens: --rollout-max-context-len, else the model's positions."""
    return args.rollout_max_context_len or _positions(args.hf_checkpoint)


@cache
def _positions(hf_checkpoint: str) -> int:
    """Asked once a sample, read once."""
    return read_model_shape(hf_checkpoint).max_position_embeddings


class Prompts(list[Prompt]):
    """The prompts of a file that can be used."""

    num_too_long = 0


def read_prompts(args: Args, path: str, *, flag: str) -> Prompts:
    """Return every record of `path` (given by `flag`; `path@[a:b]` takes a slice), tokenised and checked."""
    file, part = split_slice(path, flag)
    records = list(read_records(file, flag))[part]
    if not records:
        raise no_records(path, flag)
    reader = _RecordReader(args)
    prompts = [reader.prompt(*one) for one in records]
    return check_lengths(args, prompts)


def no_records(path: str, flag: str) -> DataError:
    return DataError(
        f"{flag} {path}: no records there. Expected at least one line with a prompt; check the file and the slice."
    )


def split_slice(path: str, flag: str) -> tuple[Path, slice]:
    """Split `data.jsonl@[10:20]` into the file and the slice; without a suffix it is the whole file."""
    match = _SLICE.match(path)
    if match is None:
        if "@[" in path:
            raise DataError(f"{flag} {path}: the slice cannot be read. Expected path@[start:stop] with whole numbers.")
        return Path(path).expanduser(), slice(None)
    start, stop = (int(text) if text else None for text in match.group("start", "stop"))
    return Path(match["path"]).expanduser(), slice(start, stop)


def check_lengths(args: Args, prompts: list[Prompt]) -> Prompts:
    """Leave out prompts over --rollout-max-prompt-len, or without space for a single response token. They are an error
    with --refuse-long-prompts, or when no prompt is left."""
    context, limit = context_limit(args), args.rollout_max_prompt_len
    kept, faults = Prompts(), []
    for prompt in prompts:
        length = len(prompt.token_ids) + sum(len(ids) for ids, _ in turns_of(prompt.metadata))
        if length == 0:
            raise DataError(
                f"{prompt.where}: the tokenizer of --hf-checkpoint {args.hf_checkpoint} makes no tokens of "
                f"{prompt.text!r:.60}; expected at least one. Is it the model's own? transformers chooses its class by "
                "the model_type of config.json. If it is right, remove the record."
            )
        if limit is not None and length > limit:
            faults.append(f"{prompt.where}: the prompt has {length} tokens, --rollout-max-prompt-len is {limit}.")
        elif length + (TURNS not in prompt.metadata) > context:
            faults.append(
                f"{prompt.where}: the prompt has {length} tokens and the context is {context} "
                "(--rollout-max-context-len or the model's limit): no space for a completion."
            )
        else:
            kept.append(prompt)
    if faults and args.refuse_long_prompts:
        raise DataError(f"{faults[0]} Remove the record, raise the limit, or leave --refuse-long-prompts out.")
    if faults and not kept:
        raise DataError(f"all {len(faults)} prompts are too long, the first: {faults[0]} Raise the limit.")
    if faults:
        kept.num_too_long = len(faults)
        logger.warning("%d of %d prompts are left out, the first: %s", len(faults), len(prompts), faults[0])
    return kept


def read_records(file: Path, flag: str) -> Iterator[Placed]:
    """Yield every record of `file`, a pattern or a directory; blank lines of a jsonl file are skipped."""
    parts = prompt_files(str(file))
    if not parts:
        raise DataError(f"{flag} {file}: no such file. {EXPECTED_PROMPTS}")
    tables = files_of_directory(file, flag) if file.is_dir() else parts
    yield from ((part, number, record) for part in tables for number, record in _read_file(part, flag))


def files_of_directory(directory: Path, flag: str) -> list[Path]:
    """Return the files of a data set that `datasets` saved (`save_to_disk`, in the order of its own list), or else all
    parquet or jsonl files, by name. DataError names the splits when there are several."""
    splits = [str(name) for name in _listed(directory / "dataset_dict.json", "splits", flag)]
    if splits:
        if len(splits) > 1:
            raise DataError(
                f"{flag} {directory}: has the splits {', '.join(splits)}. Name one: {directory / splits[0]}."
            )
        return files_of_directory(directory / splits[0], flag)
    entries = _listed(directory / "state.json", "_data_files", flag)
    saved = [directory / str(entry["filename"]) for entry in entries if isinstance(entry, dict)]
    found = saved or sorted(directory.glob("*.parquet")) or sorted(directory.glob("*.jsonl"))
    if not found:
        raise DataError(f"{flag} {directory}: no data set in this directory. {EXPECTED_PROMPTS}")
    return found


def _listed(path: Path, key: str, flag: str) -> list[object]:
    """Return the list under `key` of the JSON file; empty when there is no such file or key."""
    if not path.is_file():
        return []
    try:
        return list(dict(json.loads(path.read_text())).get(key) or [])
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{flag} {path}: cannot be read: {error}. Save the data set again.") from error


def _read_file(file: Path, flag: str) -> Iterator[tuple[int, Record]]:
    if file.suffix in (".parquet", ".arrow"):
        yield from _read_table(file, flag)
        return
    try:
        with file.open(encoding="utf-8-sig") as lines:  # some editors write a byte order mark first
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield number, _parse_line(file, number, line)
    except UnicodeDecodeError as error:
        raise DataError(
            f"{flag} {file}: not UTF-8 text: {error}. Expected jsonl, or parquet named *.parquet."
        ) from error


def _parse_line(file: Path, number: int, line: str) -> Record:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        shown = line.strip()[:80]
        way_out = "An array over many lines is not read: write each of its objects on a line." if shown == "[" else ""
        raise DataError(
            f"{file}:{number}: not JSON: {error}; got {shown!r}. Expected one JSON object a line. {way_out}".strip()
        ) from error
    if not isinstance(record, dict):
        raise DataError(
            f"{file}:{number}: got a JSON {type(record).__name__}, expected an object with the prompt's keys. Write "
            "one object a line."
        )
    return record


def _read_table(file: Path, flag: str) -> Iterator[tuple[int, Record]]:
    from pyarrow import ArrowException, ipc, memory_map, parquet

    kind = file.suffix.removeprefix(".")
    try:
        is_parquet = kind == "parquet"
        batches = parquet.ParquetFile(file).iter_batches() if is_parquet else ipc.open_stream(memory_map(str(file)))
        number = 0
        for batch in batches:
            for record in batch.to_pylist():
                number += 1
                yield number, record
    except (ArrowException, OSError) as error:
        raise DataError(f"{flag} {file}: cannot be read as {kind}: {error}. Check the file.") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """The values that the key flags name in a record, checked for their type; not tokenised yet."""

    content: str | list[dict[str, object]]
    tools: list[dict[str, object]] | None
    label: object
    metadata: dict[str, object]
    images: tuple[Image, ...] = ()


def read_fields(args: Args, record: Record, where: str, *, directory: Path = Path()) -> Fields:
    """Check everything about a record that needs no tokenizer. DataError says what is wrong with it. `directory`: where
    relative paths of images begin."""
    input_key, label_key, tool_key = args.input_key, args.label_key, args.tool_key
    metadata_key, source_key = args.metadata_key, args.source_key
    content = _value(record, input_key, "--input-key", where)
    _check_content(args, content, where)
    metadata = record.get(metadata_key)
    if metadata is not None and not isinstance(metadata, dict):
        raise DataError(
            f"{where}: {metadata_key!r} is {type(metadata).__name__}, expected an object (--metadata-key). Fix "
            "the record or the flag."
        )
    source = record.get(source_key)
    named = {} if source is None else {source_key: source}
    label = _value(record, label_key, "--label-key", where) if label_key else None
    if fault := own_grader_fault(args.config.reward, metadata or {}):
        raise DataError(f"{where}: {fault}. Fix the record, or score with --custom-rm-path.")
    own = own_grader(args.config.reward, metadata or {})
    if (own or args.rm_type) in COMPARE_WITH_LABEL and (own or label_key) and (fault := label_fault(label)):
        grader = f"rm_type {own} of its metadata" if own else f"--rm-type {args.rm_type}"
        raise DataError(f"{where}: {fault}: {grader} compares the completion with it. Fix the record or --label-key.")
    tools = _value(record, tool_key, "--tool-key", where) if tool_key else None
    for name, value in ((tool_key, tools), (label_key, label), (source_key, source), (metadata_key, metadata)):
        if value is not None and (fault := json_fault(str(name), value)):
            raise DataError(f"{where}: {fault}")
    for name, value in ((input_key, content), (tool_key, tools), (label_key, label)):
        if value is not None and (fault := text_fault(str(name), value)):
            raise DataError(f"{where}: {fault}")
    return Fields(
        content=cast("str | list[dict[str, object]]", content),
        tools=cast("list[dict[str, object]] | None", tools),  # the chat template reports what is wrong with them
        label=label,
        metadata=named | dict(metadata or {}),
        images=read_images(args, record, directory, where),
    )


def _value(record: Record, key: str, flag: str, where: str) -> object:
    outer, _, inner = key.partition(".")
    if key not in record and inner and isinstance(nested := record.get(outer), dict):
        return _value(nested, inner, flag, f"{where}, {outer}")
    if key not in record:
        found = ", ".join(sorted(record)) or "none"
        raise DataError(f"{where}: no key {key!r} ({flag}); the record has: {found}. Fix the record or the flag.")
    return record[key]


def _is_imitated(args: Args, content: object) -> bool:
    """Return whether the record is a conversation that holds the text to imitate (sft_loss without --label-key)."""
    return args.loss_type == "sft_loss" and args.label_key is None and is_conversation(content)


def _check_content(args: Args, content: object, where: str) -> None:
    """Check that it is text, or messages if --apply-chat-template is given."""
    if _is_imitated(args, content):
        return  # read_conversation checks its messages
    if isinstance(content, str):
        if not content:
            raise DataError(f"{where}: the prompt is empty text. Expected a question; remove the record or fill it.")
        return
    if not args.apply_chat_template:
        raise DataError(
            f"{where}: the prompt is {type(content).__name__}, expected text. For a list of chat messages add "
            "--apply-chat-template."
        )
    if not isinstance(content, list) or not content:
        shown = "an empty list" if content == [] else type(content).__name__
        raise DataError(f"{where}: the prompt is {shown}, expected text or a list of chat messages. Fix the record.")
    for number, message in enumerate(content, start=1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise DataError(
                f"{where}: message {number} is {message!r:.80}, expected an object with role and content. Fix the "
                "record."
            )


class _RecordReader:
    """Turns a record into a Prompt, by the key flags and the chat template."""

    def __init__(self, args: Args) -> None:
        self._args = args
        self._tokenizer = load_tokenizer(args.hf_checkpoint)
        self._num_ids = read_model_shape(args.hf_checkpoint).vocab_size  # 0: not given
        self._template_arguments: dict[str, object] = json.loads(args.apply_chat_template_kwargs or "{}")
        if args.apply_chat_template and not self._tokenizer.chat_template:
            raise DataError(
                f"--apply-chat-template: the tokenizer of {args.hf_checkpoint} has no chat template. Remove the flag."
            )

    def prompt(self, file: Path, number: int, record: Record) -> Prompt:
        where = f"{file}:{number}"
        fields = read_fields(self._args, record, where, directory=file.parent)
        if _is_imitated(self._args, fields.content):
            return self._conversation(fields, where)
        text, token_ids, images = self._render(fields, where)
        if self._num_ids and token_ids and (largest := max(token_ids)) >= self._num_ids:
            raise DataError(
                f"{where}: the prompt has token id {largest}, but the embedding of --hf-checkpoint "
                f"has {self._num_ids} rows (vocab_size). Take the tokenizer of this model."
            )
        return Prompt(
            text=text,
            token_ids=tuple(token_ids),
            label=fields.label,
            where=where,
            metadata=fields.metadata | ({"tools": fields.tools} if fields.tools else {}),
            images=images,
        )

    def _conversation(self, fields: Fields, where: str) -> Prompt:
        """Return a prompt of which every turn of the assistant is imitated (--loss-type sft_loss without
        --label-key)."""
        assert not isinstance(fields.content, str)
        if fields.images:
            raise DataError(
                f"{where}: a conversation to imitate with images, which is not read. Give its last answer by "
                "--label-key, or remove the images."
            )
        made = read_conversation(self._tokenizer, fields.content, fields.tools, self._template_arguments, where=where)
        if self._args.multimodal_keys is not None:
            refuse_places(self._args, made.prompt_ids, where)
        turns = [[list(ids), is_trained] for ids, is_trained in made.turns]
        return Prompt(
            text=made.text,
            token_ids=made.prompt_ids,
            label=None,
            where=where,
            metadata={**fields.metadata, TURNS: turns},
        )

    def _render(self, fields: Fields, where: str) -> tuple[str, list[int], PromptImages | None]:
        """Return prompt text, its tokens and its images. Special tokens come from the template, or else from the
        tokenizer."""
        content = fields.content
        if not self._args.apply_chat_template and isinstance(content, str):
            return content, *self._encode(content, fields.images, where, special=True)
        messages: list[dict[str, object]] = (
            [{"role": "user", "content": content}] if isinstance(content, str) else content
        )
        try:
            text = chat_text(self._tokenizer, messages, fields.tools, self._template_arguments, asks=True)
        except Exception as error:
            raise DataError(
                f"{where}: the chat template refused the prompt: {type(error).__name__} {error}."
            ) from error
        return text, *self._encode(text, fields.images, where, special=False)

    def _encode(
        self, text: str, images: tuple[Image, ...], where: str, *, special: bool
    ) -> tuple[list[int], PromptImages | None]:
        if images:
            return expand_prompt(self._args, text, images, where, special=special)
        token_ids: list[int] = self._tokenizer(text, add_special_tokens=special)["input_ids"]
        if self._args.multimodal_keys is not None:
            refuse_places(self._args, token_ids, where)
        return token_ids, None
