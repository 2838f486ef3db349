"""Gather refusals, so that one start names all of them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection, Iterator
from typing import TypeVar, TypeVarTuple

from vime.types import ConfigError

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")


class Problems:
    """The problems found so far. `raise_all` raises one ConfigError: the problem itself, or a numbered list of
    several."""

    def __init__(self) -> None:
        self._found: list[str] = []

    def add(self, *messages: str) -> None:
        """Add each problem once: several checks may refuse the same flag."""
        self._found.extend(message for message in messages if message not in self._found)

    @contextlib.contextmanager
    def gathering(self) -> Iterator[None]:
        """Keep an error raised inside for later; the block ends there."""
        try:
            yield
        except ConfigError as error:
            self.add(*single_problems(error))

    def attempt(self, function: Callable[[*Arguments], Result], *arguments: *Arguments, otherwise: Result) -> Result:
        """Return the result of `function`, or `otherwise` when it refuses, so that later checks still run."""
        with self.gathering():
            return function(*arguments)
        return otherwise

    def not_about(self, flags: Collection[str]) -> list[str]:
        """Return the problems that name none of `flags`."""
        words = [(message, set(re.findall(r"--[a-z0-9-]+", message))) for message in self._found]
        return [message for message, named in words if not named & set(flags)]

    def raise_all(self) -> None:
        """Raise ConfigError when there is a problem."""
        if len(self._found) == 1:
            raise ConfigError(self._found[0])
        if self._found:
            raise SeveralProblems(self._found)

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __bool__(self) -> bool:
        return bool(self._found)


class SeveralProblems(ConfigError):
    """Join several refusals into one message, each numbered on its own line."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__(problems)
        self.problems = tuple(problems)

    def __str__(self) -> str:
        lines = (f"  {number}. {problem}" for number, problem in enumerate(self.problems, start=1))
        return "\n".join([f"{len(self.problems)} problems", *lines])


def single_problems(error: ConfigError) -> tuple[str, ...]:
    """Return the problems that `error` names."""
    return error.problems if isinstance(error, SeveralProblems) else (str(error),)
