"""Prompt files as far as they can be checked before any process starts, and without transformers (2 s to import).

Every line is read by the rules of `prompts.py`. What only the tokenizer can tell (lengths, what a template does with a
record) the RolloutManager says, when it tokenises them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vime.config.paths import prompt_files
from vime.rollout.labels import COMPARE_WITH_LABEL
from vime.rollout.prompts import no_records, read_fields, read_records, split_slice
from vime.types import DataError

Record = tuple[int, dict[str, Any]]  # line number from 1
MAX_NAMED = 3
LIMIT_S = 3.0  # of one file: some 500,000 records


def data_faults(args: Any) -> Iterator[str]:
    """What is wrong with --prompt-data, --eval-prompt-data and how they are to be read, a sentence each."""
    if not str(args.data_source_path).startswith("vime."):
        files = []  # somebody else's records
    else:
        files = [("--prompt-data", args.prompt_data)] if args.prompt_data else []
    pairs = args.eval_prompt_data
    files += [("--eval-prompt-data", path) for path in pairs[1::2]]
    if files and args.apply_chat_template:
        yield from _template_faults(args)
    for flag, path in files:
        yield from _file_faults(args, path, flag)


def _file_faults(args: Any, path: str, flag: str) -> Iterator[str]:
    """The first MAX_NAMED faults, and how many more records have one."""
    try:
        file, part = split_slice(path, flag)
        if not prompt_files(str(file)):
            return  # said where the flags are checked
        found, is_whole = _read_within(LIMIT_S, read_records(file, flag))
        records = found[part] if is_whole else found
        if not records:
            raise no_records(path, flag)
    except DataError as error:
        yield str(error)
        return
    if args.rm_type in COMPARE_WITH_LABEL and args.label_key is None:
        keys = ", ".join(sorted(records[0][1]))
        yield (
            f"--rm-type {args.rm_type} compares the answer with a label, and no --label-key is given; the records of "
            f"{file} have: {keys}. Name the key of the right answer."
        )
    faults = []
    for number, record in records:
        try:
            read_fields(args, record, f"{file}:{number}")
        except DataError as error:
            faults.append(str(error))
    yield from faults[:MAX_NAMED]
    if len(faults) > MAX_NAMED:
        more = len(faults) - MAX_NAMED
        yield f"{flag} {path}: {more} more of its {len(records)} records are like these. Correct them too."


def _read_within(limit_s: float, records: Iterator[Record]) -> tuple[list[Record], bool]:
    """As many as can be read in time, and whether those are all."""
    ends, found = time.monotonic() + limit_s, []
    for record in records:
        found.append(record)
        if time.monotonic() > ends:
            return found, False
    return found, True


def _template_faults(args: Any) -> Iterator[str]:
    """--apply-chat-template where no file of the tokenizer has a template."""
    directory = Path(args.hf_checkpoint).expanduser()
    if any(directory.glob("chat_template.*")) or (directory / "additional_chat_templates").is_dir():
        return
    try:
        settings = json.loads((directory / "tokenizer_config.json").read_text())
        has_template = "chat_template" in settings or "auto_map" in settings
    except (OSError, ValueError, TypeError):
        has_template = False
    if not has_template:
        yield (
            f"--apply-chat-template: --hf-checkpoint {args.hf_checkpoint} has no chat template (tokenizer_config.json "
            "or chat_template.jinja). Remove the flag, or take a model that has one."
        )
