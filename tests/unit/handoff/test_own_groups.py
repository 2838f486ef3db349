"""Groups whose prompt a producer brought itself: one group for each key, for the whole life of the run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.ledger_cases import (
    TIMEOUT_S,
    Clock,
    audit,
    checked,
    groups_of,
    has_all,
    issue,
    lease,
    open_ledger,
    payload,
)
from vime.handoff.audit_history import History, Line
from vime.handoff.ledger import Ledger
from vime.handoff.ledger_types import LateAttemptError, OwnGrant, OwnOutcome, StalePolicy, State, Task, TransitionError
from vime.handoff.slot_line import WAIT_S


def own(ledger: Ledger, key: str = "k", content: str = "c", producer: str = "external/job") -> OwnGrant:
    return ledger.prompts.issue_own(producer, key, content)


def outcome(ledger: Ledger, *names: str) -> OwnOutcome:
    return own(ledger, *names).outcome


def committed(ledger: Ledger, key: str = "k", *, version: int = 0) -> Task:
    task = own(ledger, key).task
    assert task is not None
    ledger.prompts.commit(task, payload(task.group, version=version))
    return task


def state(ledger: Ledger, task: Task) -> tuple[str, str | None]:
    sql = "select state, reason from prompt_group where grp = ?"
    [row] = ledger._store.query(sql, task.group)
    return tuple(row)


def test_a_key_means_one_group_and_takes_the_next_number_of_the_run(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path)
    [first] = issue(ledger, 1)
    task = committed(ledger)
    [third] = issue(ledger, 1)
    assert (first.group, task, third.group) == (0, Task("train", 1, 1), 2)
    assert own(ledger) == OwnGrant(outcome=OwnOutcome.COMMITTED, task=task)
    assert outcome(ledger, "k", "other") == OwnOutcome.OTHER_CONTENT
    assert own(ledger, producer="external/other").task == Task("train", 3, 1), "a key is of its producer"
    ledger.prompts.commit(first, payload(0))
    assert groups_of(lease(ledger, 0, 2)) == [1, 0], "in the order in which they were committed"
    ledger.close()
    ledger = open_ledger(tmp_path)
    assert (outcome(ledger), outcome(ledger, "k", "other")) == (OwnOutcome.COMMITTED, OwnOutcome.OTHER_CONTENT)
    ledger.close()
    checked(tmp_path)


def test_a_group_in_flight_is_no_lease_and_ends_when_its_key_is_not_asked_for_again(tmp_path: Path) -> None:
    clock = Clock()
    ledger = open_ledger(tmp_path, clock)
    task = own(ledger).task
    assert ledger.prompts.heartbeat("external/job") == frozenset()
    assert ledger.prompts.issued("external/job", "k").prompts == ()
    for _ in range(3):  # steps of at most half a timeout count whole
        clock.time += TIMEOUT_S * 0.4
        assert own(ledger).task == task, "asking again renews it"
    for _ in range(3):
        clock.time += TIMEOUT_S * 0.4
        ledger.prompts.heartbeat("external/job")
    assert (state(ledger, task), ledger.status().active) == (("dropped", "lease expired"), 0)
    with pytest.raises(TransitionError):
        ledger.prompts.commit(task, payload(task.group))
    assert own(ledger, "k", "other").task == Task("train", 1, 1), "what was never committed frees its key"
    assert ledger.prompts.abandon("external/job") == 1
    assert [task.group for task in issue(ledger, 8)] == list(range(2, 10)), "nobody else gets a group of a job's own"
    ledger.close()
    checked(tmp_path)


def test_a_call_that_is_refused_again_and_again_does_not_renew_what_it_holds(tmp_path: Path) -> None:
    """The gateway looks the key up, and refuses the content. The job repeated it every 4 ms, and no round went on."""
    clock = Clock()
    ledger = open_ledger(tmp_path, clock)
    task = own(ledger).task
    assert task is not None
    for _ in range(3):
        clock.time += TIMEOUT_S * 0.4
        assert (ledger.prompts.known_own("external/job", "k", "c") is None) == (ledger.status().active == 0)
    assert (state(ledger, task), ledger.status().active) == (("dropped", "lease expired"), 0)
    ledger.close()
    checked(tmp_path)


def test_a_gateway_that_dies_gives_back_the_groups_it_was_storing_and_no_prompt(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path, Clock())
    [prompt] = issue(ledger, 1)
    done, task = committed(ledger, "done"), own(ledger, "k").task
    assert task is not None
    assert ledger.prompts.abandon_own() == 1
    assert ledger.prompts.abandon_own() == 0
    assert (state(ledger, task), ledger.status().active) == (("dropped", "gateway lost"), 2)
    with pytest.raises(TransitionError):
        ledger.prompts.commit(task, payload(task.group))
    assert own(ledger, "k").task == Task("train", 3, 1), "the job repeats its call"
    assert own(ledger, "done") == OwnGrant(outcome=OwnOutcome.COMMITTED, task=done)
    ledger.prompts.commit(prompt, payload(0))
    ledger.close()
    checked(tmp_path)


def test_slots_bound_them_and_they_wait_in_the_line_of_those_who_want_prompts(tmp_path: Path) -> None:
    clock = Clock()
    ledger = open_ledger(tmp_path, clock, max_slots=3, lease_timeout_s=100 * WAIT_S)
    tasks = issue(ledger, 3)
    assert [outcome(ledger, key) for key in ("a", "b")] == [OwnOutcome.WAITS] * 2
    assert "3 groups hold one" in own(ledger, "a").waits_for
    ledger.prompts.drop(tasks[0], "filter")
    assert issue(ledger, 1) == [], "p holds 2, and the job none"
    assert outcome(ledger, "a") == OwnOutcome.ISSUED
    ledger.prompts.retry(tasks[1], "aborted")
    assert outcome(ledger, "b") == OwnOutcome.WAITS, "a group that is to be issued again keeps its slot"
    assert issue(ledger, 1) == [Task("train", 1, 2)], "and is not behind those who wait for one: both would for ever"
    ledger.prompts.drop(tasks[2], "filter")
    assert "1 other producers wait" in ledger.prompts.issue("p", 1, request="more").waits_for, "1 each; b came first"
    assert outcome(ledger, "b") == OwnOutcome.ISSUED
    assert (outcome(ledger, "c"), issue(ledger, 1)) == (OwnOutcome.WAITS, [])
    ledger.prompts.drop(Task("train", 1, 2), "filter")
    assert outcome(ledger, "c") == OwnOutcome.WAITS, "the job holds 2, and p none"
    for _ in range(4):
        clock.time += WAIT_S / 3
        ledger.status()  # the clock counts small steps only
    assert outcome(ledger, "c") == OwnOutcome.ISSUED, "who does not ask any more has no place in the line"
    ledger.close()
    checked(tmp_path)


def test_slots_go_to_own_groups_and_to_prompts_in_turn_while_both_are_waited_for(tmp_path: Path) -> None:
    """A job whose own groups cost it no time took every slot, and one beside it brought 1 group of 544."""
    clock = Clock()
    ledger = open_ledger(tmp_path, clock, max_slots=1, lease_timeout_s=100 * WAIT_S)
    [held], given = issue(ledger, 1), []
    for number in range(8):
        key = f"k{sum(kind == 'own' for kind in given)}"
        assert (outcome(ledger, key), issue(ledger, 1)) == (OwnOutcome.WAITS, []), number
        ledger.prompts.drop(held, "filter")
        grant = own(ledger, key)
        if grant.task is not None:
            held, kind = grant.task, "own"
        else:
            [held], kind = issue(ledger, 1), "prompt"
        given.append(kind)
    assert given == ["own", "prompt"] * 4
    ledger.prompts.drop(held, "filter")
    assert own(ledger, key).task is not None
    ledger.close()


def test_who_has_stopped_asking_for_prompts_keeps_no_slot_from_own_groups(tmp_path: Path) -> None:
    clock = Clock()
    ledger = open_ledger(tmp_path, clock, max_slots=1, lease_timeout_s=100 * WAIT_S)
    [held] = issue(ledger, 1)
    assert (outcome(ledger, "a"), issue(ledger, 1)) == (OwnOutcome.WAITS, [])
    ledger.prompts.drop(held, "filter")
    task = own(ledger, "a").task
    assert task is not None
    ledger.prompts.drop(task, "filter")
    assert outcome(ledger, "b") == OwnOutcome.WAITS, "it is the turn of prompts"
    for _ in range(4):
        clock.time += WAIT_S / 3
        ledger.status()
    assert outcome(ledger, "b") == OwnOutcome.ISSUED
    ledger.close()


@pytest.mark.parametrize("policy", list(StalePolicy))
def test_one_that_is_too_old_is_dropped_and_its_key_stays_used(tmp_path: Path, policy: StalePolicy) -> None:
    ledger = open_ledger(tmp_path, stale_policy=policy)
    task = committed(ledger)
    issued = issue(ledger, 4)
    for other in issued[:2]:
        ledger.prompts.commit(other, payload(other.group, version=2))
    assert ledger.rounds.lease(0, version=2, holder="t", count=2).lease is not None
    assert state(ledger, task) == ("dropped", "too old at lease")
    assert (own(ledger).outcome, ledger.status().active, ledger.status().retry) == (OwnOutcome.COMMITTED, 4, 0)
    ledger.close()


def test_after_a_restart_what_was_committed_is_trained_once_and_what_was_in_flight_is_put_again(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path)
    kept, lost = committed(ledger, "kept"), committed(ledger, "lost")
    flying = own(ledger, "flying").task
    report = ledger.rounds.restore(None, lambda task, checksum: task != lost)
    assert (report.reissued, report.regenerated) == ((), ())
    assert [state(ledger, task)[0] for task in (kept, lost, flying)] == [State.READY, State.DROPPED, State.DROPPED]
    assert [outcome(ledger, key) for key in ("kept", "lost")] == [OwnOutcome.COMMITTED] * 2
    again = own(ledger, "flying").task
    assert again == Task("train", 3, 1)
    ledger.prompts.commit(again, payload(3))
    assert groups_of(lease(ledger, 0, 2)) == [0, 3]
    ledger.close()
    checked(tmp_path)


def test_one_that_a_round_trains_stays_known_when_the_run_goes_back_and_ends(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path, num_rounds=1, groups_per_round=1)
    task = committed(ledger)
    found = lease(ledger, 0, 1)
    ledger.rounds.trained(0, found.fence)
    ledger.rounds.restore(None, has_all)
    assert outcome(ledger) == OwnOutcome.COMMITTED
    again = lease(ledger, 0, 1)
    assert [group.task for group in again.groups] == [task]
    ledger.rounds.trained(0, again.fence)
    ledger.rounds.release(1)
    assert [outcome(ledger, key) for key in ("k", "new")] == [OwnOutcome.COMMITTED, OwnOutcome.OVER]
    ledger.close()
    checked(tmp_path)


def test_the_history_finds_a_key_that_counts_twice_and_a_group_that_went_to_somebody_else() -> None:
    def line(event: str, group: int, note: str = "", attempt: int = 1) -> Line:
        return Line(0, event, "train", group, attempt, 0, 0, 0, note)

    note = '{"key": "k", "content": "c"}'
    history = History()
    for group in (0, 1):
        history.read([line("issued", group, "external/job"), line("own", group, note), line("ready", group)])
    assert [str(found) for found in history.findings] == [
        "own: train/1#1: committed under key 'k' of external/job, as was train/0#1"
    ]
    history = History()
    history.read([line("issued", 0, "external/job"), line("own", 0, note), line("retry", 0)])
    history.read([line("issued", 0, "worker", attempt=2)])
    assert [found.check for found in history.findings] == ["own"]


@pytest.mark.parametrize(
    ("sql", "message"),
    [
        ("own_key = 'x'", "key and content ('x', 'c') of external/job; the history says ('k', 'c') of external/job"),
        ("own_content = 'x'", "key and content ('k', 'x')"),
        ("producer = 'external/x'", "of external/x; the history says ('k', 'c') of external/job"),
        ("own_key = null", "key and content None"),
    ],
)
def test_the_audit_finds_a_ledger_whose_own_groups_are_not_those_of_its_history(
    tmp_path: Path, sql: str, message: str
) -> None:
    ledger = open_ledger(tmp_path)
    committed(ledger)
    ledger._store.change(f"update prompt_group set {sql} where grp = 0")
    ledger.close()
    report = audit(tmp_path / "ledger.db", checkpoint_round=None, spool=None)
    assert any(found.check == "own" and message in found.message for found in report.findings), report.findings


def test_a_late_commit_of_a_group_that_was_given_up_is_refused(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path)
    task = own(ledger).task
    ledger.prompts.abandon("external/job")
    with pytest.raises(TransitionError) as error:
        ledger.prompts.commit(task, payload(0))
    assert not isinstance(error.value, LateAttemptError)
    ledger.close()
