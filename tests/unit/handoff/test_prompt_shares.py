"""Several producers wait for slots: each gets its share, and none stays free while somebody waits."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from tests.helpers.ledger_cases import Clock, issue, lease, open_ledger, payload
from vime.handoff.ledger import Ledger
from vime.handoff.ledger_types import OwnOutcome, Task
from vime.handoff.slot_line import WAIT_S

NAMES = ("a", "b", "c")


def asks(ledger: Ledger, producer: str, count: int, request: str = "") -> list[Task]:
    """The same call again, until it gets something."""
    grant = ledger.prompts.issue(producer, count, request=request or f"of {producer}")
    return [prompt.task for prompt in grant.prompts]


def passes(ledger: Ledger, clock: Clock, seconds: float) -> None:
    """In small steps: the ledger's clock counts no large one."""
    for _ in range(4):
        clock.time += seconds / 4
        ledger.status()


@pytest.fixture
def full(tmp_path: Path, clock: Clock) -> Iterator[Ledger]:
    """Eight slots, all of which a round holds that is being trained."""
    made = open_ledger(tmp_path, clock, max_slots=8, lease_timeout_s=100 * WAIT_S)
    for task in issue(made, 8, "before"):
        made.prompts.commit(task, payload(task.group))
    yield made
    made.close()


def serve(ledger: Ledger) -> None:
    """Train the round of eight, and serve its weights: all slots are free."""
    found = lease(ledger, 0, 8)
    ledger.rounds.trained(0, found.fence)
    ledger.rounds.release(1)


def test_a_fast_producer_leaves_a_slow_one_its_share_also_of_what_it_has_finished(full: Ledger, clock: Clock) -> None:
    """The slow one loads weights while the fast one asks, finishes, and asks again."""
    assert (asks(full, "slow", 8), asks(full, "fast", 8)) == ([], [])
    serve(full)
    mine = asks(full, "fast", 8)
    for task in mine:
        full.prompts.commit(task, payload(task.group, version=1))
    assert (len(mine), asks(full, "fast", 8)) == (4, []), "a ready group holds its slot"
    passes(full, clock, WAIT_S / 2)
    assert len(asks(full, "slow", 8)) == 4
    assert asks(full, "fast", 8) == []


def test_one_that_wants_few_leaves_the_rest_and_three_share_in_equal_parts(full: Ledger) -> None:
    wanted = {"a": 8, "b": 1, "c": 8}
    assert [asks(full, name, count) for name, count in wanted.items()] == [[]] * 3
    serve(full)
    # one by one: a, b (then it has what it wants), c, a, c, a, c, a
    assert [len(asks(full, name, count)) for name, count in reversed(wanted.items())] == [3, 1, 4]


def test_several_calls_of_one_producer_count_together_and_each_of_them_may_take_its_share(full: Ledger) -> None:
    assert (asks(full, "fast", 8), [asks(full, "slow", 1, name) for name in "stuv"]) == ([], [[]] * 4)
    serve(full)
    assert (len(asks(full, "fast", 8)), asks(full, "fast", 8, "next")) == (4, [])
    assert [len(asks(full, "slow", 1, name)) for name in "vwst"] == [1] * 4, "w is a new name"


def test_a_call_that_is_served_takes_no_turn_from_the_other_calls_of_its_producer(full: Ledger) -> None:
    assert (asks(full, "fast", 8), [asks(full, "slow", 1, name) for name in "stuv"]) == ([], [[]] * 4)
    serve(full)
    assert len(asks(full, "slow", 1, "s")) == 1
    assert len(asks(full, "fast", 8)) == 4, "t, u and v wait"


def test_who_is_silent_or_leaves_keeps_no_slot_from_others_and_a_lone_producer_gets_all(
    full: Ledger, clock: Clock
) -> None:
    for name in ("gone", "left", "fast"):
        assert asks(full, name, 8) == []
    serve(full)
    full.prompts.abandon("left")
    assert (len(asks(full, "fast", 8)), asks(full, "fast", 4, "next")) == (4, [])
    passes(full, clock, WAIT_S - 0.5)
    assert asks(full, "fast", 4, "next") == [], "not yet"
    passes(full, clock, 0.5)
    assert len(asks(full, "fast", 4, "next")) == 4


def test_a_group_to_be_issued_again_goes_to_whoever_asks_because_a_round_waits_for_it(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path, max_slots=4)
    held = issue(ledger, 4, "fast")
    assert asks(ledger, "slow", 2) == []
    ledger.prompts.retry(held[0], "aborted")
    assert asks(ledger, "fast", 1) == [Task("train", 0, 2)]
    ledger.close()


def test_who_finds_no_prompt_left_keeps_no_slot_from_a_job_that_brings_its_own(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path, max_slots=2)
    [first, _] = issue(ledger, 2, "job")
    assert not ledger.prompts.issue("p", 1, request="r", end=2).prompts
    ledger.prompts.drop(first, "filter")
    assert ledger.prompts.issue_own("job", "k", "c").outcome is OwnOutcome.WAITS, "p holds none"
    for _ in range(2):
        assert "groups in flight" in ledger.prompts.issue("p", 1, request="r", end=2).waits_for
        assert ledger.prompts.issue_own("job", "k", "c").outcome is OwnOutcome.ISSUED
    ledger.close()


@settings(max_examples=80, deadline=None)
@given(
    wanted=st.fixed_dictionaries({name: st.integers(1, 12) for name in NAMES}),
    had=st.lists(st.sampled_from(NAMES), min_size=12, max_size=12),
    dropped=st.sets(st.integers(0, 11)),
    finished=st.sets(st.integers(0, 11)),
    order=st.permutations(NAMES),
    brings=st.booleans(),
)  # fmt: skip
def test_in_whatever_order_they_ask_no_slot_is_idle_and_nobody_gets_one_before_who_holds_fewer(
    wanted: dict[str, int], had: list[str], dropped: set[int], finished: set[int], order: list[str], brings: bool
) -> None:
    """Twelve slots are held by a, b and c, who wait for more; some groups finish, some are dropped and free theirs.
    Then each asks again until it gets something. `brings`: b waits with so many groups of its own instead."""
    with tempfile.TemporaryDirectory() as directory:
        ledger = open_ledger(Path(directory), max_slots=12)
        tasks = [task for name in had for task in issue(ledger, 1, name)]
        waits = {name: [f"{name} {number}" for number in range(wanted[name] if brings and name == "b" else 1)]
                 for name in NAMES}  # fmt: skip

        def take(name: str) -> int:
            """Ask once for each call of `name` that waits; return how many groups it got."""
            if not (brings and name == "b"):
                got = len(asks(ledger, name, wanted[name], waits[name][0])) if waits[name] else 0
                waits[name] = [] if got else waits[name]
                return got
            left = [key for key in waits[name] if ledger.prompts.issue_own(name, key, "c").task is None]
            waits[name], before = left, waits[name]
            return len(before) - len(left)

        assert [take(name) for name in order] == [0, 0, 0]
        for place, task in enumerate(tasks):
            if place in dropped:
                ledger.prompts.drop(task, "filter")
            elif place in finished:
                ledger.prompts.commit(task, payload(task.group))
        got: Counter[str] = Counter()
        while any((took := {name: take(name) for name in reversed(order)}).values()):
            got.update(took)
        ledger.close()
    assert got.total() == min(len(dropped), sum(wanted.values())), "a slot is idle while somebody waits"
    kept = Counter(name for place, name in enumerate(had) if place not in dropped)
    for one in NAMES:
        for other in NAMES:
            if got[one] and got[other] < wanted[other]:
                assert kept[one] + got[one] <= kept[other] + got[other] + 1, (kept, got)
