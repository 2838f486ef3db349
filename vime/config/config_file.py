"""`--config FILE`: flags in a file, beside those of the command line, which win.

A TOML file names flags without their dashes, `-` or `_` between words, in tables or in none:

    num-rollout = 100
    [rollout]
    rollout_batch_size = 32
    rollout-stop = ["</answer>", "END"]
    vllm-max-num-seqs = 64

The `config.json` that a run leaves in its directory can be given as well, or the directory: the resulting
configuration is the same. Values that the run derived from others are derived again, unless they were edited there.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from vime.config.flags import flag_name, knobs
from vime.config.translate import Item, Word
from vime.types import ConfigError

FLAG = "--config"
HELP = (
    "TOML file of flags (names without the dashes), or the config.json or directory of an earlier run; flags beside it "
    "win; may be given several times, later files win"
)


def split_config_files(argv: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Return the files that --config names, and the command line without them."""
    files: list[Path] = []
    rest: list[str] = []
    arguments = iter(argv)
    for argument in arguments:
        name, has_value, value = argument.partition("=")
        if name != FLAG:
            rest.append(argument)
            continue
        path = value if has_value else next(arguments, "")
        if not path or path.startswith("--"):
            raise ConfigError(f"{FLAG}: got no file. Expected {FLAG} FILE, a TOML file or a run's config.json.")
        files.append(Path(os.path.expanduser(path)))
    return files, rest


def read_config_file(path: Path, sections: dict[str, type]) -> list[Word]:
    """Return the command line that a file stands for; a list is an item, so that none of its values is read as a
    flag."""
    file = path / "config.json" if path.is_dir() else path
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{FLAG} {path}: cannot be read: {error}. Expected a TOML file or a run's config.json."
        ) from (error)
    try:
        record = json.loads(text) if file.suffix == ".json" else tomllib.loads(text)
    except ValueError as error:
        kind = "JSON" if file.suffix == ".json" else "TOML"
        raise ConfigError(f"{FLAG} {path}: is not {kind}: {error}. Fix the file.") from error
    if file.suffix == ".json":
        return list(_of_run(record, path, sections))
    return [word for key, value in _flattened(record, path) for word in _words(f"--{key}", value, path)]


def _flattened(record: Mapping[str, object], path: Path) -> Iterator[tuple[str, object]]:
    """Yield the flags of all tables, which only group them. A flag may be there once."""
    seen: set[str] = set()
    entries = [(key, value) for key, value in record.items() if not isinstance(value, dict)]
    for table in (value for value in record.values() if isinstance(value, dict)):
        entries += table.items()
    for key, value in entries:
        name = key.removeprefix("--").replace("_", "-")
        if f"--{name}" == FLAG:
            raise ConfigError(f"{FLAG} {path}: names a file itself. Give {FLAG} several times on the command line.")
        if isinstance(value, dict):
            raise ConfigError(f"{FLAG} {path}: the table {key!r} lies in a table. Expected flags there.")
        if name in seen:
            raise ConfigError(f"{FLAG} {path}: {key!r} is there twice. Keep one of the two.")
        seen.add(name)
        yield name, value


def _words(flag: str, value: object, path: Path) -> list[Word]:
    """`x = 3` -> --x=3; `x = true` -> --x; `x = false` -> --no-x; a list is the values of the flag."""
    if isinstance(value, bool):
        return [flag if value else f"--no-{flag[2:]}"]
    if isinstance(value, list):
        if not all(isinstance(entry, str | int | float) and not isinstance(entry, bool) for entry in value):
            raise ConfigError(f"{FLAG} {path}: {flag[2:]} is {value!r}. Expected a list of texts or numbers.")
        return [Item(flag, tuple(map(str, value)))] if value else []
    if not isinstance(value, str | int | float):
        raise ConfigError(
            f"{FLAG} {path}: {flag[2:]} is {type(value).__name__} {value!s}. Expected a text, a number, true or false, "
            "or a list."
        )
    return [f"{flag}={value}"]


def _of_run(record: object, path: Path, sections: dict[str, type]) -> Iterator[Word]:
    """Return what was given for a run: every value that is neither the default nor derived from others."""
    if not isinstance(record, dict) or not all(isinstance(record.get(name), dict) for name in sections):
        raise ConfigError(
            f"{FLAG} {path}: is not the configuration of a run of this version. Expected the config.json of a run "
            "directory, or a TOML file."
        )
    derived = {name: _tupled(value) for name, value in record.get("derived", ())}
    for name, section in sections.items():
        specs = {spec.name: spec for _, spec in knobs(section)}
        for knob, saved in record[name].items():
            value = _tupled(saved)
            if knob not in specs:
                raise ConfigError(f"{FLAG} {path}: {name}.{knob} is no flag of this version. Remove it from the file.")
            is_derived = knob in derived and derived[knob] == value
            if value != specs[knob].default and not is_derived:
                yield from _words_of_knob(flag_name(specs[knob]), value, path)
    for prefix in ("vllm", "router"):
        for word in record.get(f"{prefix}_flags", ()):
            yield f"--{prefix}-{word[2:]}" if word.startswith("--") else word


def _words_of_knob(flag: str, value: object, path: Path) -> list[Word]:
    if value is True:
        return [flag]  # also of a switch that is called --no-...
    if value is None or value == ():
        raise ConfigError(
            f"{FLAG} {path}: {flag[2:]} is empty there, which no flag can be. Give it a value, or remove it."
        )
    return _words(flag, list(value) if isinstance(value, tuple) else value, path)


def _tupled(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value
