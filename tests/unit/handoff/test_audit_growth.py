"""The audit runs at the end of every run, however long: what a round costs it does not depend on the rounds before."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from vime.handoff.audit import _check_rounds
from vime.handoff.audit_history import History, Line


class Counted(dict):  # type: ignore[type-arg]
    """Counts what is read of it, key by key."""

    num_reads = 0

    def __getitem__(self, key: object) -> object:
        self.num_reads += 1
        return super().__getitem__(key)

    def __iter__(self) -> Iterator[object]:
        for key in super().__iter__():
            self.num_reads += 1
            yield key

    def items(self) -> Iterator[tuple[object, object]]:  # type: ignore[override]
        for key in self:
            yield key, super().__getitem__(key)


def line(sequence: int, event: str, **values: object) -> Line:
    empty = {"partition": "train", "group": -1, "attempt": 0, "round_id": 0, "tokens": 0, "num_bytes": 0, "note": ""}
    return Line(sequence=sequence, event=event, **(empty | values))  # type: ignore[arg-type]


def read_history(num_rounds: int) -> int:
    """Read a history of rounds of two groups, each saved and released; return how often something was looked up."""
    history = History(rules={"max_slots": 2, "max_staleness": 0})
    groups: Counted = Counted()
    rounds, versions = Counted(), Counted()
    history.groups, history.rounds, history.versions = groups, rounds, versions
    sequence = 0

    def tell(event: str, **values: object) -> None:
        nonlocal sequence
        sequence += 1
        history.read([line(sequence, event, **values)])

    for number in range(num_rounds):
        for group in (2 * number, 2 * number + 1):
            tell("issued", group=group, attempt=1, note="w")
            tell("ready", group=group, attempt=1, tokens=5, num_bytes=5, note="x")
            tell("leased", group=group, attempt=1, round_id=number, note=str(number))
        tell("trained", round_id=number, tokens=10, note="l")
        tell("durable", round_id=number)
        tell("released", round_id=number + 1)
    assert history.findings == []
    assert {trace.state for trace in dict.values(groups)} == {"durable"}
    return groups.num_reads + rounds.num_reads + versions.num_reads


def check_rounds(num_rounds: int) -> int:
    rounds = Counted({number: ("durable", number, 0) for number in range(num_rounds)})
    list(_check_rounds([], rounds, History()))
    return rounds.num_reads


@pytest.mark.parametrize("reads", [read_history, check_rounds])
def test_twice_the_rounds_are_twice_the_work(reads: Callable[[int], int]) -> None:
    assert reads(200) <= 2.1 * reads(100)
