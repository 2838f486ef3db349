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
    """What is wrong so far. `raise_all` raises one ConfigError: the problem itself, or a numbered list of several."""

    def __init__(self) -> None:
        self._found: list[str] = []

    def add(self, *messages: str) -> None:
        """Each problem once: several checks may stumble over the same flag."""
        self._found.extend(message for message in messages if message not in self._found)

    @contextlib.contextmanager
    def gathering(self) -> Iterator[None]:
        """What is raised inside is kept for later, and the block is left there."""
        try:
            yield
        except ConfigError as error:
            self.add(*single_problems(error))

    def attempt(self, function: Callable[[*Arguments], Result], *arguments: *Arguments, otherwise: Result) -> Result:
        """What `function` answers, or `otherwise` when it refuses: what comes after it is still looked at."""
        with self.gathering():
            return function(*arguments)
        return otherwise

    def not_about(self, flags: Collection[str]) -> list[str]:
        """Those that name none of `flags`."""
        words = [(message, set(re.findall(r"--[a-z0-9-]+", message))) for message in self._found]
        return [message for message, named in words if not named & set(flags)]

    def raise_all(self) -> None:
        """ConfigError when there is something wrong."""
        if len(self._found) == 1:
            raise ConfigError(self._found[0])
        if self._found:
            raise SeveralProblems(self._found)

    def __bool__(self) -> bool:
        return bool(self._found)


class SeveralProblems(ConfigError):
    """Several refusals in one message, each numbered on its own line."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__(problems)
        self.problems = tuple(problems)

    def __str__(self) -> str:
        lines = (f"  {number}. {problem}" for number, problem in enumerate(self.problems, start=1))
        return "\n".join([f"{len(self.problems)} problems", *lines])


def single_problems(error: ConfigError) -> tuple[str, ...]:
    """The problems that `error` names."""
    return error.problems if isinstance(error, SeveralProblems) else (str(error),)
