"""One line of the table of `vime conformance`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Check:
    """`found`: what was seen; empty when the promise was kept. `action`: what whoever writes the program does then."""

    name: str
    found: str = ""
    action: str = ""

    @property
    def is_good(self) -> bool:
        return not self.found
