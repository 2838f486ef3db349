"""Turn frozen dataclass sections into argparse flags and back, so that every knob is written once.

A knob is one dataclass field made by `flag(default, help, ...)`: its default, its help text with the unit, its choices
and its range stand together. `add_section` makes the argument group, `read_section` builds the section again, and
the range checks run there.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import types
import typing
from collections.abc import Iterator
from enum import Enum, auto
from typing import TypeVar

from vime.config.problems import Problems
from vime.types import ConfigError

Section = TypeVar("Section")
Value = TypeVar("Value")
Knob = dataclasses.Field[object]
"""A knob as its section has it; `metadata` holds the arguments of `flag`."""


BOUNDS = ("clip", "delta", "threshold")
"""Name endings of flags that are bounds: inf is allowed there and means no bound."""


class PathKind(Enum):
    """What a knob that names files looks like."""

    FILE = auto()  # a file or directory, maybe with a suffix: data.jsonl@[0:64], out/{rollout_id}
    PLUGIN = auto()  # file.py:name, or a dotted path, which is none
    PAIRS = auto()  # NAME FILE NAME FILE ...


def flag(
    default: Value,
    help: str,
    *,
    cli: str | None = None,
    aliases: tuple[str, ...] = (),
    choices: tuple[str, ...] | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
    nargs: str | None = None,
    path: PathKind | None = None,
) -> Value:
    """Declare one knob. `cli` names the flag when it differs from the field; `minimum`/`maximum` are inclusive; `path`
    says that it names files, which are made absolute."""
    metadata = {
        "help": help,
        "cli": cli,
        "aliases": aliases,
        "choices": choices,
        "minimum": minimum,
        "maximum": maximum,
        "nargs": nargs,
        "path": path,
    }
    return dataclasses.field(default=default, metadata=metadata)


def flag_name(spec: Knob) -> str:
    return spec.metadata["cli"] or "--" + spec.name.replace("_", "-")


def add_section(parser: argparse.ArgumentParser, section: type) -> None:
    """Add one argument group; its title is the first line of the section's docstring."""
    title, _, description = (section.__doc__ or section.__name__).strip().partition("\n")
    group = parser.add_argument_group(title.rstrip("."), description.strip() or None)
    for kind, spec in knobs(section):
        options = [flag_name(spec), *spec.metadata["aliases"]]
        shown = "none" if spec.default is None else spec.default if spec.default != () else "none"
        text = f"{spec.metadata['help']} (default: {shown})".replace("%", "%%")
        if kind is bool and options[0].startswith("--no-"):
            # argparse's switch would take --no-save-optim for the opposite of --save-optim, and return False
            group.add_argument(*options, dest=spec.name, default=spec.default, help=text, action="store_true")
        elif kind is bool:
            group.add_argument(
                *options, dest=spec.name, default=spec.default, help=text, action=argparse.BooleanOptionalAction
            )
        else:
            group.add_argument(
                *options,
                dest=spec.name,
                default=spec.default,
                help=text,
                type=kind,
                choices=spec.metadata["choices"],
                nargs=spec.metadata["nargs"],
                metavar=None if spec.metadata["choices"] else kind.__name__.upper(),
            )


def read_section(section: type[Section], parsed: argparse.Namespace, problems: Problems, refused: set[str]) -> Section:
    """Build the section from parsed arguments. A value out of its range is added to `problems`, its flag to `refused`,
    and has the default."""
    values: dict[str, object] = {}
    for _, spec in knobs(section):
        value = getattr(parsed, spec.name)
        try:
            _check_range(spec, value)
        except ConfigError as error:
            problems.add(str(error))
            refused.add(flag_name(spec))
            continue
        values[spec.name] = tuple(value) if isinstance(value, list) else value
    return section(**values)


def check_value(section: type, name: str, value: object) -> object:
    """Return `value`, which a file gives to the knob `name`; ConfigError unless the flag accepts it."""
    (kind, spec), *_ = ((kind, spec) for kind, spec in knobs(section) if spec.name == name)
    is_number = kind is float and isinstance(value, int) and not isinstance(value, bool)
    if type(value) is not kind and not is_number:
        raise ConfigError(f"got {value!r}, expected {kind.__name__}.")
    choices = spec.metadata["choices"]
    if choices is not None and value not in choices:
        raise ConfigError(f"got {value!r}, expected one of {', '.join(choices)}.")
    _check_range(spec, value)
    return value


def knobs(section: type) -> Iterator[tuple[type, Knob]]:
    """Yield (scalar type, field) of each knob of a section, in order."""
    hints = typing.get_type_hints(section)
    for spec in dataclasses.fields(section):
        if "cli" in spec.metadata:
            yield _scalar(hints[spec.name]), spec


def _check_range(spec: Knob, value: object) -> None:
    low, high = spec.metadata["minimum"], spec.metadata["maximum"]
    if not isinstance(value, int | float):
        return
    if math.isnan(value) or (math.isinf(value) and not any(word in spec.name for word in BOUNDS)):
        raise ConfigError(f"{flag_name(spec)}: got {value}, expected a number. Change the flag.")
    if (low is not None and value < low) or (high is not None and value > high):
        expected = (
            f"at least {low:g}" if high is None else f"at most {high:g}" if low is None else f"{low:g} to {high:g}"
        )
        raise ConfigError(f"{flag_name(spec)}: got {value}, expected {expected}. Change the flag.")


def _scalar(hint: object) -> type:
    """Map `int | None` to int and `tuple[str, ...]` to str; every other hint is a scalar type already."""
    if isinstance(hint, types.UnionType):
        (hint,) = (member for member in typing.get_args(hint) if member is not types.NoneType)
    if typing.get_origin(hint) is tuple:
        hint = typing.get_args(hint)[0]
    assert isinstance(hint, type), hint
    return hint
