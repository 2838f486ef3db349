"""Reads argv flag by flag: flags of other trainers are translated, and all problems are reported at once.

`read` is what `parse` calls. A flag of Vime is parsed alone, so that one bad value does not hide the next; any other is
looked up in `migration.py`; what is in no table is unknown.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import json
import re
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from vime.config.hf_config import read_record, text_entries
from vime.config.migration import (
    ALWAYS,
    DIFFERENT,
    ENGINE,
    FROM_MODEL,
    MISSING,
    OF_VLLM_TOO,
    RENAMED,
    SAME_NAME,
    SECRETS,
    TO_ENVIRONMENT,
    ULYSSES,
    VALUES,
    Always,
    FromModel,
    Missing,
    Renamed,
)
from vime.config.problems import Problems
from vime.types import ConfigError

PASSTHROUGH = ("--vllm-", "--router-")
DASHES = ("--", "\u2013", "\u2014")
NEARLY_THE_SAME = 0.9
"""Share of equal letters above which an unknown flag is taken for a typing mistake: `--rollout-batchsize`."""
TOLERANCE = 1e-9
WANDB_PAGES = "https://wandb.ai"
"""Slime's default for --wandb-host, which wandb no longer takes for the address of a server."""
_OF_VERL = re.compile(r"\+?[a-z_]+(\.[a-z_0-9]+)+=")
"""A setting as Hydra takes it: `data.train_batch_size=64`."""


@dataclass(frozen=True, slots=True)
class Item:
    """One flag with the values after it; `flag` is empty for words before the first flag."""

    flag: str
    values: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " ".join((self.flag, *self.values))

    @property
    def words(self) -> list[str]:
        """Return the words as a parser reads them. `--flag=value` keeps a value that begins with a dash in one
        piece."""
        return [self.flag, *self.values]


Word = str | Item
"""A word of a command line, or a flag whose values are known already."""


@dataclass(slots=True)
class Reading:
    """A command line in Vime's own flags, and the notes about it."""

    namespace: argparse.Namespace
    passthrough: dict[str, list[str]] = field(default_factory=lambda: {prefix: [] for prefix in PASSTHROUGH})
    notes: list[str] = field(default_factory=list)
    refused_flags: set[str] = field(default_factory=set)
    environment: dict[str, str] = field(default_factory=dict)  # variables that flags stand for


def read(argv: Sequence[Word], parser: argparse.ArgumentParser, problems: Problems) -> Reading:
    """Parse every flag of `argv`; problems are added to `problems`."""
    actions = parser._actions  # noqa: SLF001 - argparse has no public list of its flags
    options = {option: action for action in actions for option in action.option_strings}
    items = _split(argv, options)
    translated = _Translator(items, set(options), problems)
    reading = Reading(parser.parse_args([]))
    for item in items:
        for own in translated.own(item):
            _take(own, parser, options, reading, problems)
    reading.notes = translated.notes()
    reading.refused_flags |= translated.refused_flags
    reading.environment = translated.environment
    return reading


def _split(argv: Sequence[Word], known: Collection[str] = ()) -> list[Item]:
    """Whether a word is meant as a flag: it begins with two hyphens, with the dash that an editor makes of them, or
    with one hyphen where two would make a flag."""
    items: list[Item] = []
    for word in argv:
        if isinstance(word, Item):
            items.append(word)
        elif word.startswith(DASHES) or "-" + word in known:
            flag, is_joined, value = word.partition("=")
            items.append(Item(flag, (value,) if is_joined else ()))
        elif items:
            items[-1] = Item(items[-1].flag, (*items[-1].values, word))
        else:
            items.append(Item("", (word,)))
    return items


def _take(
    item: Item,
    parser: argparse.ArgumentParser,
    options: dict[str, argparse.Action],
    reading: Reading,
    problems: Problems,
) -> None:
    """Parse one flag of Vime, or pass on one of vLLM or the router. `options`: what argparse does with each flag."""
    if item.flag in options:
        try:
            unread = _parse(item, options[item.flag], parser, reading.namespace)
        except ConfigError as error:
            problems.add(str(error))
            reading.refused_flags.add(item.flag)
            return
        if unread and all(_OF_VERL.match(word) for word in unread):
            problems.add(_of_verl(unread))
        elif unread:
            problems.add(f"{item}: {' '.join(unread)} is too much after {item.flag}. See train.py --help.")
        return
    prefix = next((prefix for prefix in PASSTHROUGH if item.flag.startswith(prefix)), None)
    if prefix is not None:
        reading.passthrough[prefix] += ["--" + item.flag.removeprefix(prefix), *item.values]
        return
    if not item.flag and all(_OF_VERL.match(word) for word in item.values):
        problems.add(_of_verl(item.values))
        return
    if "ulysses" in item.flag.lower():
        problems.add(f"{item}: {ULYSSES}")
        return
    what = f"unknown flag {item.flag}" if item.flag else f"{' '.join(item.values)}: expected a flag in front"
    problems.add(f"{what}. {_nearest(item.flag, set(options))}See train.py --help.")


def _parse(
    item: Item, action: argparse.Action, parser: argparse.ArgumentParser, namespace: argparse.Namespace
) -> list[str]:
    """Set the values of a flag; return those that are too much. A value that begins with a dash is read joined to the
    flag, or argparse would take it for another one."""
    if action.nargs == "+" and item.values:
        alone = [parser.parse_known_args([f"{item.flag}={value}"])[0] for value in item.values]
        setattr(namespace, action.dest, [value for one in alone for value in getattr(one, action.dest)])
        return []
    is_joined = len(item.values) == 1 and action.nargs != 0
    words = [f"{item.flag}={item.values[0]}"] if is_joined else item.words
    return parser.parse_known_args(words, namespace)[1]


def _of_verl(words: Sequence[str]) -> str:
    more = f" {ULYSSES}" if any("ulysses" in word for word in words) else ""
    return f"{' '.join(words)}: settings of verl. docs/migrating.md says which flags mean the same.{more}"


def _nearest(flag: str, options: set[str]) -> str:
    """A guess only where the two are nearly the same word; case, underscores and the kind of dash do not count."""
    plain = "--" + flag.lower().replace("_", "-").lstrip("-\u2013\u2014")
    close = difflib.get_close_matches(plain, sorted(options), n=1, cutoff=NEARLY_THE_SAME)
    return f"Did you mean {close[0]}? " if close else ""


class _Translator:
    """Looks flags up in the tables of `migration.py`."""

    def __init__(self, items: Sequence[Item], options: set[str], problems: Problems) -> None:
        self._options, self._problems = options, problems
        self._given = {item.flag: item for item in items}
        self._model = _read_config(self._given.get("--hf-checkpoint"))
        self._equal: list[str] = []
        self._uncompared: list[str] = []
        self._always: dict[str, list[str]] = defaultdict(list)
        self._taken: list[str] = []
        self.refused_flags: set[str] = set()
        self.environment: dict[str, str] = {}

    def own(self, item: Item) -> list[Item]:
        """Return `item` in Vime's flags; nothing when nothing of it is left to parse."""
        engine = _engine_flag(item.flag)
        if item.flag in self._options:
            return self._own_values(item)
        if item.flag in FROM_MODEL:
            self._compare(item, FROM_MODEL[item.flag])
        elif item.flag in ALWAYS:
            self._is_always(item, ALWAYS[item.flag])
        elif item.flag in RENAMED:
            return self._renamed(item, RENAMED[item.flag])
        elif item.flag in TO_ENVIRONMENT or item.flag in SECRETS:
            self._to_environment(item, {**TO_ENVIRONMENT, **SECRETS}[item.flag])
        elif item.flag in MISSING:
            self._refuse(item, MISSING[item.flag])
        elif engine is not None and engine in ENGINE:
            match ENGINE[engine]:
                case Renamed() as renamed:
                    return self._renamed(item, renamed)
                case Always() as always:
                    self._is_always(item, always)
                case Missing() as missing:
                    self._refuse(item, missing)
        elif engine is not None and item.flag.startswith("--sglang-"):
            self._refuse(item, Missing(f"Remove it; vLLM's own flags are given as --vllm-<flag>, {_VLLM_HELP}."))
        else:
            return [item]
        return []

    def notes(self) -> list[str]:
        """Return the notes for the user, one line per kind."""
        lines = list(self._taken)
        if self._equal:
            lines.append(f"{', '.join(self._equal)}: as config.json of the model says; Vime reads it there.")
        if self._uncompared:
            lines.append(f"{', '.join(self._uncompared)}: not compared, the layers are those of config.json.")
        lines += self._differences() if lines or self._always else []
        lines += [f"{', '.join(flags)}: always so here ({why})." for why, flags in self._always.items()]
        return lines

    def _differences(self) -> list[str]:
        """Add notes about flags of the same name with another meaning or default."""
        defaults = [
            f"{flag}: {text}."
            for flag, (reader, text) in DIFFERENT.items()
            if flag not in self._given
            and (not reader or reader in self._given)
            and not (flag == "--micro-batch-size" and "--use-dynamic-batch-size" in self._given)
        ]
        meanings = [
            f"{flag} {value}: {text}"
            for (flag, value), text in SAME_NAME.items()
            if flag in self._given and self._given[flag].values == (value,)
        ]
        return defaults + meanings

    def _own_values(self, item: Item) -> list[Item]:
        known = VALUES.get(item.flag, {})
        value = known.get(item.values[0]) if len(item.values) == 1 else None
        if isinstance(value, Missing):
            self._problems.add(f"{item}: {value.instead}")
            return []
        if value is None:
            return [item]
        self._taken.append(f"{item}: taken as {item.flag} {value}.")
        return [Item(item.flag, (value,))]

    def _renamed(self, item: Item, renamed: Renamed) -> list[Item]:
        words = [word for part in renamed.to for word in (item.values if part in ("{}", "{}...") else (part,))]
        own = _split(words)
        takes = renamed.num_values
        if (takes is not None and len(item.values) != takes) or (takes is None and not item.values):
            wanted = {None: "at least one value", 0: "no value", 1: "one value"}[takes]
            self._problems.add(f"{item}: expected {wanted} behind {item.flag}.")
            return []
        both = [new for new in own if new.flag in self._given and self._given[new.flag] != new]
        if both:
            self._problems.add(f"{item} is {both[0]} here, and {self._given[both[0].flag]} is given too. Keep one.")
            self.refused_flags.add(both[0].flag)
            return []
        as_what = f"taken as {' '.join(words)}" if words else "left out"
        self._taken.append(f"{item}: {as_what}{f' ({renamed.note})' if renamed.note else ''}.")
        return own

    def _to_environment(self, item: Item, variable: str) -> None:
        """Without the value in any message."""
        if len(item.values) != 1:
            self._problems.add(f"{item.flag}: expected one value after it.")
            return
        if item.flag == "--wandb-host" and item.values[0].rstrip("/") == WANDB_PAGES:
            self._taken.append(f"{item}: those are wandb's pages; its own server is the default. Left out.")
            return
        self.environment[variable] = item.values[0]
        self._taken.append(f"{item.flag}: taken as {variable} of the environment.")

    def _refuse(self, item: Item, missing: Missing) -> None:
        self._problems.add(f"{item.flag}: not here. {missing.instead}")

    def _is_always(self, item: Item, always: Always) -> None:
        is_said = any(_is_same(word, value) for word in item.values[:1] for value in always.values)
        if always.values and (len(item.values) != 1 or not is_said):
            says = " or ".join(f"{value:g}" if isinstance(value, float) else str(value) for value in always.values)
            self._problems.add(f"{item}: {always.why}, so only {says} is accepted. Remove it.")
        else:
            self._always[always.why].append(str(item) if always.values else item.flag)

    def _compare(self, item: Item, where: FromModel) -> None:
        found = next((value for key in where.keys if (value := _entry(self._model, key)) is not None), None)
        if found is None:
            self._uncompared.append(item.flag)
        elif where.means and item.values:
            self._problems.add(f"{item}: expected no value after {item.flag}.")
        elif found in where.means or (not where.means and any(_is_same(word, found) for word in item.values[:1])):
            self._equal.append(item.flag)
        else:
            self._contradicts(item, where.keys, found)

    def _contradicts(self, item: Item, keys: tuple[str, ...], found: object) -> None:
        self._problems.add(
            f"{item}: config.json of --hf-checkpoint says {keys[0]} is {json.dumps(found)}, and that is "
            "trained. Remove the flag, or name the model that you mean."
        )


def _engine_flag(flag: str) -> str | None:
    """SGLang's name of `flag`, which may have been rewritten to --vllm-<name>; None for any other."""
    if flag.startswith("--sglang-"):
        return flag.removeprefix("--sglang-")
    name = flag.removeprefix("--vllm-")
    return name if flag.startswith("--vllm-") and name not in OF_VLLM_TOO else None


_VLLM_HELP = "listed by `python -m vllm.entrypoints.launchers.api_server.entry --help`"


def _read_config(given: Item | None) -> dict[str, object]:
    """Return config.json of --hf-checkpoint; empty when it cannot be read, which other checks report."""
    if given is None or len(given.values) != 1:
        return {}
    try:
        return text_entries(read_record(given.values[0]))
    except ConfigError:
        return {}


def _entry(record: dict[str, object], key: str) -> object:
    """`rope_scaling.factor` goes into the object `rope_scaling`; None where there is none."""
    value: object = record
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _is_same(text: str, expected: object) -> bool:
    """Whether a word of the command line equals `expected`: 1e6 and 1000000 are the same number."""
    if isinstance(expected, str | int | float):
        with contextlib.suppress(ValueError):
            return abs(float(text) - float(expected)) <= TOLERANCE * max(1.0, abs(float(expected)))
    return text.lower() == str(expected).lower()
