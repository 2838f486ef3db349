"""Values of flags that are handed through to a server, checked against what its own parser takes.

The server would refuse them too, but in its own log, after everything has started. `FlagShape` is what a parser says
about one flag; asking vLLM's costs seconds, so it is JSON-ready and remembered (`launch.py`).
"""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from vime.types import ConfigError

PROBES = ("1", "1.5", "1k", "{}", "word", "auto", "none")
"""One value of each kind; which of them the type function of a flag takes says what the flag means."""
_KINDS = (
    (re.compile(r"[+-]?\d+"), ("1",), "a whole number"),
    (re.compile(r"[+-]?(\d+\.\d*|\.\d+|\d+(\.\d*)?[eE][+-]?\d+)"), ("1.5",), "a number"),
    (re.compile(r"\d+(\.\d+)?[kKmMgGtT]i?"), ("1k",), "a number with a unit such as 2k"),
    (re.compile(r"[\[{].*", re.DOTALL), ("{}",), "JSON"),
    (re.compile(r"(?i)auto"), ("word", "auto"), "auto"),
    (re.compile(r"(?i)none"), ("word", "none"), "none"),
    (re.compile(r".*", re.DOTALL), ("word",), "text"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlagShape:
    """How many values a flag takes (as argparse's nargs), which ones, of which kinds (`PROBES`), and how large."""

    nargs: int | str | None = None
    choices: tuple[str, ...] = ()
    kinds: tuple[str, ...] = PROBES
    bounds: Mapping[str, float] | None = None  # gt, ge, lt, le


def shape_of(action: argparse.Action, bounds: Mapping[str, float] | None = None) -> FlagShape:
    """What an action of argparse says. `bounds` it does not know."""

    kind = action.type if callable(action.type) else str

    def takes(probe: str) -> bool:
        try:
            kind(probe)
        except (ValueError, TypeError, ArithmeticError, argparse.ArgumentTypeError):
            return False
        return True

    kinds = () if action.nargs == 0 else tuple(probe for probe in PROBES if takes(probe))
    return FlagShape(
        nargs=action.nargs, choices=tuple(str(choice) for choice in action.choices or ()), kinds=kinds, bounds=bounds
    )


def flag_names(flags: Sequence[str]) -> list[str]:
    return [flag.partition("=")[0] for flag in flags if flag.startswith("--")]


def value_of(flags: Sequence[str], name: str) -> str | None:
    """Return what a flag was given last, which is what counts; None when it was not given."""
    given = [values[0] for each, values in _given(flags) if each == name and values]
    return given[-1] if given else None


def refuse_owned(flags: Sequence[str], owned: Mapping[str, str], *, prefix: str, whose: str) -> None:
    """ConfigError for a flag that the run itself decides. `owned`: by which flag of Vime (empty: by none)."""
    for name in flag_names(flags):
        if name in owned:
            action = f"Use {owned[name]} instead" if owned[name] else "Leave it out"
            raise ConfigError(f"{prefix}{name.lstrip('-')}: Vime decides {whose} {name} itself. {action}.")


def check_values(flags: Sequence[str], known: Mapping[str, FlagShape], *, prefix: str, whose: str) -> None:
    """ConfigError, with every reason, when a flag is unknown to the server or its value impossible.

    `flags` as the server spells them; `prefix` is what the user writes instead of `--`; `whose` names the server.
    """
    faults = [fault for given in _given(flags) for fault in _faults(*given, known, prefix, whose)]
    if faults:
        raise ConfigError(" ".join(faults))


def _given(flags: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Each flag with the values that follow it."""
    current: tuple[str, list[str]] | None = None
    for word in flags:
        if word.startswith("--"):
            if current is not None:
                yield current
            name, separator, value = word.partition("=")
            current = (name, [value] if separator else [])
        elif current is not None:
            current[1].append(word)
    if current is not None:
        yield current


def _faults(name: str, values: list[str], known: Mapping[str, FlagShape], prefix: str, whose: str) -> Iterator[str]:
    shown = prefix + name.removeprefix("--")
    shape = known.get(name) or known.get(name.partition(".")[0])
    if shape is None:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"Did you mean {prefix}{close[0].removeprefix('--')}?" if close else "Remove it."
        yield f"{shown}: {whose} has no flag {name}. {hint}"
        return
    if "." in name:
        return  # an entry of a JSON flag
    wanted = _number_of_values(shape.nargs, len(values))
    if wanted:
        got = f"got {' '.join(values)!r}" if values else "got none"
        yield f"{shown}: {whose} expects {wanted}, {got}. {'Remove it.' if shape.nargs == 0 else 'Change the flag.'}"
        return
    for value in values:
        if shape.choices and value not in shape.choices:
            yield f"{shown}: got {value!r}, expected one of {', '.join(shape.choices)}. Change the flag."
        elif not shape.choices and not _is_of_kind(value, shape.kinds):
            yield f"{shown}: got {value!r}, expected {_said(shape.kinds)}. Change the flag."
        elif shape.bounds and (bound := _broken_bound(value, shape.bounds)):
            yield f"{shown}: got {value}, expected {bound}. Change the flag."


def _number_of_values(nargs: int | str | None, given: int) -> str:
    """What is expected, when that is not what is given."""
    if nargs == 0:
        return "no value" if given else ""
    if nargs is None:
        return "" if given == 1 else "one value"
    if isinstance(nargs, int):
        return "" if given == nargs else f"{nargs} values"
    least, most = {"?": (0, 1), "+": (1, given)}.get(nargs, (0, given))
    return "" if least <= given <= most else "at least one value" if given < least else "at most one value"


def _is_of_kind(value: str, kinds: Sequence[str]) -> bool:
    probes = next(probes for pattern, probes, _ in _KINDS if pattern.fullmatch(value))
    return any(probe in kinds for probe in probes)


def _said(kinds: Sequence[str]) -> str:
    names = [name for _, probes, name in _KINDS if probes[-1] in kinds]
    return " or ".join(names) if names else "another value"


def _broken_bound(value: str, bounds: Mapping[str, float]) -> str:
    try:
        number = float(value)
    except ValueError:
        return ""
    holds = {
        "gt": lambda limit: number > limit,
        "ge": lambda limit: number >= limit,
        "lt": lambda limit: number < limit,
        "le": lambda limit: number <= limit,
    }
    words = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
    if all(holds[kind](limit) for kind, limit in bounds.items()):
        return ""
    return " and ".join(f"{words[kind]} {limit:g}" for kind, limit in bounds.items())
