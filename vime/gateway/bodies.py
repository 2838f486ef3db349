"""How many bytes of bodies the gateway holds at a time: of all callers together, and of each."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator

from vime.gateway.refusal import Refusal


class Bodies:
    """Bytes that are being read, or were read for a call that has not ended."""

    def __init__(self, *, most: int, most_of_one: int) -> None:
        self._most, self._most_of_one = most, most_of_one
        self._held: Counter[str] = Counter()

    @contextlib.contextmanager
    def held(self, name: str, num_bytes: int) -> Iterator[Callable[[int], None]]:
        """Count so many bytes for this caller until the block ends. Call what is yielded with the number that came,
        which may be fewer. Refusal when it would be too many; the same call fits when others have ended."""
        if self._held[name] + num_bytes > self._most_of_one:
            raise _too_many(429, num_bytes, self._held[name], f"of {name}", self._most_of_one)
        if self._held.total() + num_bytes > self._most:
            raise _too_many(503, num_bytes, self._held.total(), "of all callers", self._most)
        counted = num_bytes
        self._held[name] += counted

        def came(number: int) -> None:
            nonlocal counted
            self._held[name] += number - counted
            counted = number

        try:
            yield came
        finally:
            self._held[name] -= counted
            if not self._held[name]:
                del self._held[name]


def _too_many(status: int, num_bytes: int, held: int, whose: str, most: int) -> Refusal:
    return Refusal(
        status,
        "too_many_calls" if status == 429 else "unavailable",
        "too many bytes of bodies are under way.",
        got=f"{num_bytes} bytes beside {held} {whose}",
        expected=f"at most {most} at a time",
        next_action="Repeat the call after Retry-After; send fewer bodies at the same time.",
        retry_after_s=1,
    )
