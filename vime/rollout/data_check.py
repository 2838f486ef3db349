"""Checks of prompt files that need no process and no transformers (2 s to import).

Every line is read by the rules of `prompts.py`. Faults that only the tokenizer can find (lengths, what a template makes
of a record) are reported by the RolloutManager when it tokenises the records.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path

from vime.config.eval_sets import eval_sets
from vime.config.graders import COMPARE_WITH_LABEL, is_unscored, own_grader
from vime.config.parse import Args
from vime.config.paths import prompt_files
from vime.rollout.prompts import Placed, no_records, read_fields, read_records, split_slice
from vime.types import ConfigError, DataError

MAX_NAMED = 3
LIMIT_S = 3.0  # for one file: some 500,000 records


def data_faults(args: Args) -> Iterator[str]:
    """Yield one sentence for each fault in the files of --prompt-data, --eval-prompt-data and --eval-config and in the
    flags that say how to read them."""
    is_ours = str(args.data_source_path).startswith("vime.")  # a user's own data source has its own records
    files = [(args, "--prompt-data", args.prompt_data)] if is_ours and args.prompt_data else []
    with contextlib.suppress(ConfigError):  # reported where the flags are checked
        files += [(one.config.flat, one.flag, one.path) for one in eval_sets(args.config)]
    if any(own.apply_chat_template for own, _, _ in files):
        yield from _template_faults(args)
    for own, flag, path in files:
        yield from _file_faults(own, path, flag)


def _file_faults(args: Args, path: str, flag: str) -> Iterator[str]:
    """Yield the first MAX_NAMED faults, and how many more records have one."""
    try:
        file, part = split_slice(path, flag)
        if not prompt_files(str(file)):
            return  # reported where the flags are checked
        found, is_whole = _read_within(LIMIT_S, read_records(file, flag))
        counts_from_end = min(part.start or 0, part.stop or 0) < 0
        records = found[part] if is_whole or not counts_from_end else []  # the end of the file was not reached
        if not records and is_whole:
            raise no_records(path, flag)
    except DataError as error:
        yield str(error)
        return
    if is_unscored(args.config):
        yield from _unscored(args, records)
    if args.rm_type in COMPARE_WITH_LABEL and args.label_key is None:
        keys = ", ".join(sorted((records or found)[0][-1]))
        yield (
            f"--rm-type {args.rm_type} compares the completion with a label, and no --label-key is given; the records "
            f"of {file} have: {keys}. Name the key of the label."
        )
    faults = []
    for part_file, number, record in records:
        try:
            read_fields(args, record, f"{part_file}:{number}", directory=part_file.parent)
        except DataError as error:
            faults.append(str(error))
    yield from faults[:MAX_NAMED]
    if len(faults) > MAX_NAMED:
        more = len(faults) - MAX_NAMED
        yield f"{flag} {path}: {more} more of its {len(records)} records are like these. Correct them too."


def _unscored(args: Args, records: list[Placed]) -> Iterator[str]:
    """Yield records that name no reward, when no flag does either."""
    silent = []
    for file, number, record in records:
        metadata = record.get(args.metadata_key)
        if not isinstance(metadata, dict) or own_grader(args.config.reward, metadata) is None:
            silent.append(f"{file}:{number}")
    if silent:
        yield (
            f"no reward: give --rm-type or --custom-rm-path. ({len(silent)} of {len(records)} records do not name "
            f"their own in metadata['rm_type'], the first is {silent[0]}.)"
        )


def _read_within(limit_s: float, records: Iterator[Placed]) -> tuple[list[Placed], bool]:
    """Return as many records as can be read in time, and whether those are all."""
    ends, found = time.monotonic() + limit_s, []
    for record in records:
        found.append(record)
        if time.monotonic() > ends:
            return found, False
    return found, True


def _template_faults(args: Args) -> Iterator[str]:
    """Yield a fault for --apply-chat-template when no file of the tokenizer has a template."""
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
