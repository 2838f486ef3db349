"""The line for slots: which producers wait for one, and who gets the next
(docs/decisions/0037-slots-go-to-who-holds-the-fewest.md).

Free slots go one by one to the producer, of all that wait, that holds the fewest groups; of equals, to the one that
waits longest. So whoever is fast cannot take them all, and a producer that waits alone gets every one.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

WAIT_S = 10.0
"""A call that has not come again for so long waits no more. So this is how long a slot can stay free while somebody
else waits: its turn is that of a producer that is silent, or loads weights."""


class Wish(NamedTuple):
    """What a call waits for: so many slots, and until when it counts unless it comes again."""

    until: float
    wanted: int


@dataclass(slots=True)
class SlotLine:
    """Kept in memory alone: after a restart of the ledger whoever waits asks again."""

    _wishes: dict[str, dict[str, Wish]] = field(default_factory=dict)  # producer -> name of the call; first come first

    def wait(self, producer: str, name: str, count: int, now: float) -> None:
        """Note a call that got nothing. The same call again keeps the producer's place."""
        self._wishes.setdefault(producer, {})[name] = Wish(now + WAIT_S, count)

    def serve(self, producer: str, name: str) -> None:
        """Note that a call needs no slot any more. Other calls of the same producer go behind the others."""
        left = self._wishes.pop(producer, {})
        left.pop(name, None)
        if left:
            self._wishes[producer] = left

    def leave(self, producer: str) -> None:
        self._wishes.pop(producer, None)

    def others(self, producer: str, now: float) -> int:
        """Return how many other producers wait."""
        for who, wishes in list(self._wishes.items()):
            for name in [name for name, wish in wishes.items() if wish.until <= now]:
                del wishes[name]
            if not wishes:
                del self._wishes[who]
        return len(self._wishes.keys() - {producer})

    def share(self, producer: str, count: int, *, free: int, held: Callable[[], Mapping[str, int]], now: float) -> int:
        """Return how many of `free` slots a call that wants `count` may take now. `held`: groups by producer.

        What it may not take is the turn of another that waits, and that will get it when it asks. Example: 4 slots are
        free; a holds none and wants 8, b holds 1 and wants 2. One by one they go to a, a (it waits longer), b, a.
        """
        if count < 1 or free < 1:
            return 0
        if not self.others(producer, now):
            return min(count, free)
        wanted = {who: sum(wish.wanted for wish in wishes.values()) for who, wishes in self._wishes.items()}
        wanted[producer] = free  # its place is what counts: it takes no more than `count`
        holds, given = held(), dict.fromkeys(wanted, 0)
        line = [(holds.get(who, 0), place, who) for place, who in enumerate(wanted)]
        heapq.heapify(line)
        for _ in range(free):
            fewest, place, who = line[0]
            given[who] += 1
            if given[who] < wanted[who]:
                heapq.heapreplace(line, (fewest + 1, place, who))
            else:
                heapq.heappop(line)
        return min(count, given[producer])
