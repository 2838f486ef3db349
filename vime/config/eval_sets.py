"""--eval-prompt-data and --eval-config: which sets are evaluated, each with the configuration that holds for it.

    [defaults]                      # for every set below; the command line's flags give the rest
    max_response_len = 16384
    [[datasets]]
    name = "aime"
    path = "aime-2024.jsonl"        # relative to this file
    n_samples_per_eval_prompt = 16
    [[datasets]]
    name = "gpqa"
    path = "gpqa.jsonl"
    rm_type = "gpqa"
    label_key = "answer"

The same as YAML; a table `eval` around both, as slime writes it, may be there.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from vime.config.flags import check_value
from vime.config.parse import SECTIONS, Config, section_of
from vime.types import ConfigError

KNOBS = {
    **{name: name for name in ("input_key", "label_key", "metadata_key", "tool_key", "apply_chat_template")},
    **{name: name for name in ("rm_type", "custom_rm_path", "reward_key", "custom_generate_function_path")},
    "n_samples_per_eval_prompt": "n_samples_per_eval_prompt",
    "temperature": "eval_temperature",
    "top_p": "eval_top_p",
    "top_k": "eval_top_k",
    "max_response_len": "eval_max_response_len",
}
"""Key of a set -> the knob that it sets."""
REWARDS = ("rm_type", "custom_rm_path")
NAME = re.compile(r"(?!\.)[^/\x00-\x1f\x7f]{1,100}")
"""What a set can be called: its name is a part of metrics' names and of a path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSet:
    """One set; `config` is the run's with the changes of the set."""

    name: str
    path: str
    flag: str  # the flag that named it
    config: Config
    rm_type: str | None = None  # named by the set itself


def eval_sets(config: Config) -> list[EvalSet]:
    """Return every set in the order of evaluation. ConfigError for a file that cannot be used."""
    pairs = config.eval.eval_prompt_data
    sets = [
        EvalSet(name=name, path=path, flag="--eval-prompt-data", config=config)
        for name, path in zip(pairs[::2], pairs[1::2], strict=False)
    ]
    if config.eval.eval_config is not None:
        sets += _of_file(config, Path(config.eval.eval_config))
    names = [one.name for one in sets]
    for one in sets:
        if not NAME.fullmatch(one.name):
            raise ConfigError(
                f"{one.flag}: a set is called {one.name!r}, and files are named by it. Expected 1 to 100 characters "
                "without / and control characters, not beginning with a dot. Rename it."
            )
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"--eval-prompt-data, --eval-config: names must differ, got {', '.join(twice)} twice.")
    return sets


def _of_file(config: Config, file: Path) -> Iterator[EvalSet]:
    where = f"--eval-config {file}"
    whole = _read(file, where)
    record = whole.get("eval", whole)
    sets = record.get("datasets") if isinstance(record, Mapping) else None
    if not isinstance(record, Mapping) or not isinstance(sets, list) or not sets:
        raise ConfigError(f"{where}: no datasets there. Expected a list `datasets`, each with name and path.")
    defaults = record.get("defaults") or {}
    for number, one in enumerate(sets, start=1):
        here = f"{where}, set {number}"
        if not isinstance(one, Mapping) or not isinstance(defaults, Mapping):
            raise ConfigError(f"{here}: expected a table of keys and values.")
        merged = {**defaults, **one}
        name, (path, mark, part) = _text(merged, "name", here), _text(merged, "path", here).partition("@[")
        changes = _changes(merged, here)
        rm_type = changes.get("rm_type")
        yield EvalSet(
            name=name,
            path=f"{(file.parent / Path(os.path.expanduser(path))).resolve()}{mark}{part}",
            flag="--eval-config",
            config=config.replace(**changes),
            rm_type=None if rm_type is None else str(rm_type),
        )


def _text(merged: Mapping[str, object], key: str, where: str) -> str:
    value = merged.get(key)
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{where}: {key} is {value!r}, expected text. Add it.")
    return value


def _read(file: Path, where: str) -> Mapping[str, object]:
    import yaml

    try:
        text = file.read_text()
        record = tomllib.loads(text) if file.suffix == ".toml" else yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{where}: cannot be read: {error}. Expected YAML, or TOML named *.toml.") from error
    if not isinstance(record, Mapping):
        raise ConfigError(f"{where}: got {type(record).__name__}, expected a table with `datasets`.")
    return record


def _changes(merged: Mapping[str, object], where: str) -> dict[str, object]:
    """Return the knobs that the set changes; a reward of its own replaces the run's."""
    changes: dict[str, object] = {}
    for key, value in merged.items():
        if key in ("name", "path") or value is None:
            continue
        if key not in KNOBS:
            close = difflib.get_close_matches(key, KNOBS, n=1)
            hint = f"Did you mean {close[0]}?" if close else f"Expected name, path, {', '.join(KNOBS)}."
            raise ConfigError(f"{where}: unknown key {key}. {hint}")
        changes[KNOBS[key]] = _checked(KNOBS[key], value, f"{where}: {key}")
    given = [name for name in REWARDS if name in changes]
    if len(given) == 2:
        raise ConfigError(f"{where}: rm_type and custom_rm_path are both given. Keep one of the two.")
    return {**dict.fromkeys(REWARDS, None), **changes} if given else changes


def _checked(knob: str, value: object, where: str) -> object:
    try:
        return check_value(SECTIONS[section_of(knob)], knob, value)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
