import sqlite3
from contextlib import closing
from dataclasses import replace

import pytest

from tests.helpers.ledger_cases import (
    TIMEOUT_S,
    checked,
    groups_of,
    has_all,
    issue,
    lease,
    make_ready,
    numbers,
    open_ledger,
    payload,
    train,
)
from vime.handoff.ledger_types import (
    CapacityError,
    CommitOutcome,
    LateAttemptError,
    PartitionError,
    Task,
    TransitionError,
)
from vime.types import HandoffError


@pytest.fixture(autouse=True)
def audited(request, tmp_path):
    """Whatever a test here does to the ledger, the audit must find nothing when it is closed."""
    yield
    if "ledger" in request.fixturenames:
        checked(tmp_path)


def test_prompts_are_issued_in_order_and_never_more_than_the_slots(ledger):
    first = ledger.prompts.issue("a", 5, request="1")
    second = ledger.prompts.issue("b", 5, request="1")
    third = ledger.prompts.issue("b", 5, request="2")
    assert numbers(first.prompts) == [(group, 1) for group in range(5)]
    assert numbers(second.prompts) == [(5, 1), (6, 1), (7, 1)]  # 8 slots
    assert third.prompts == ()
    assert "8 groups hold one" in third.waits_for


def test_a_repeated_request_gets_the_same_prompts(ledger):
    first = ledger.prompts.issue("a", 3, request="1")
    assert ledger.prompts.issue("a", 3, request="1") == first
    assert ledger.status().active == 3


def test_a_dropped_group_gives_its_slot_back_at_once(ledger):
    tasks = issue(ledger, 8)
    assert issue(ledger, 1) == []
    assert ledger.prompts.drop(tasks[3], "all rewards equal")
    assert not ledger.prompts.drop(tasks[3], "all rewards equal")  # delivered twice
    assert issue(ledger, 2) == [Task("train", 8, 1)]


def test_slots_of_a_trained_round_are_free_when_its_weights_are_served(ledger):
    make_ready(ledger, 8)
    found = lease(ledger, 0, 8)
    ledger.rounds.trained(0, found.fence)
    assert issue(ledger, 1) == []
    ledger.rounds.release(1)
    assert len(issue(ledger, 9)) == 8


def test_a_second_delivery_is_answered_as_such_and_changes_nothing(ledger):
    [task] = issue(ledger, 1)
    assert ledger.prompts.commit(task, payload(tokens=10)) is CommitOutcome.COMMITTED
    assert ledger.prompts.commit(task, payload(tokens=99)) is CommitOutcome.DUPLICATE
    found = lease(ledger, 0, 1)
    assert ledger.prompts.commit(task, payload(tokens=99)) is CommitOutcome.DUPLICATE
    assert found.groups[0].payload == payload(tokens=10)
    assert ledger.status().held_tokens == 10


def test_the_facts_of_a_group_are_leased_with_it_and_go_when_it_is_sent_back(tmp_path, ledger):
    tasks = issue(ledger, 2)
    for task in tasks:
        ledger.prompts.commit(task, replace(payload(task.group), facts=bytes([task.group, 0, 255])))
    found = lease(ledger, 0, 2)
    assert [group.payload.facts for group in found.groups] == [b"\0\0\xff", b"\1\0\xff"]
    assert lease(ledger, 0, 2).groups == found.groups  # asked again: the same
    ledger.rounds.restore(None, lambda task, _: task.group == 1)  # the spool has lost group 0
    with closing(sqlite3.connect(tmp_path / "ledger.db")) as connection:
        rows = connection.execute("select state, facts is null from prompt_group order by grp").fetchall()
    assert rows[0] == ("retry", 1)
    assert rows[1][1] == 0


def test_an_expired_attempt_is_issued_again_and_its_late_commit_refused(ledger, clock):
    [task] = issue(ledger, 1)
    for _ in range(3):  # one step of the clock counts as half a timeout at most
        clock.time += TIMEOUT_S / 2
        ledger.expire()
    with pytest.raises(LateAttemptError, match=r"train/0#1: it is retry.*lease expired.*too late"):
        ledger.prompts.commit(task, payload())
    [again] = issue(ledger, 1, "other")
    assert again == Task("train", 0, 2)
    with pytest.raises(LateAttemptError, match="issued at attempt 2"):
        ledger.prompts.commit(task, payload())
    with pytest.raises(LateAttemptError):
        ledger.prompts.drop(task, "late")
    with pytest.raises(LateAttemptError):
        ledger.prompts.retry(task, "late")
    assert ledger.prompts.commit(again, payload()) is CommitOutcome.COMMITTED


def test_heartbeats_keep_an_attempt_alive(ledger, clock):
    tasks = issue(ledger, 2, "a") + issue(ledger, 1, "b")
    for _ in range(10):
        clock.time += TIMEOUT_S / 2 - 0.1
        assert ledger.prompts.heartbeat("a") == frozenset(tasks[:2])
    assert ledger.prompts.heartbeat("b") == frozenset()
    assert ledger.prompts.commit(tasks[0], payload()) is CommitOutcome.COMMITTED


@pytest.mark.parametrize("jump", [1e9, -1e9])
def test_a_jump_of_the_clock_neither_expires_nor_prolongs_a_lease(ledger, clock, jump):
    issue(ledger, 1)
    clock.time += jump
    assert len(ledger.prompts.heartbeat("p")) == 1  # not expired
    for _ in range(2):  # and from here on the usual time: 2 * 5 s
        assert ledger.status().active == 1
        clock.time += TIMEOUT_S / 2
    assert ledger.status().active == 0


def test_prompts_of_a_dead_producer_go_to_others_at_once(ledger):
    tasks = issue(ledger, 2, "dead")
    issue(ledger, 1, "alive")
    assert ledger.prompts.abandon("dead") == 2
    assert ledger.status().producers == {"alive": 1}
    assert issue(ledger, 2, "alive") == [Task("train", task.group, 2) for task in tasks]


def test_a_retried_group_is_issued_first_with_its_tokens(ledger):
    first, second = issue(ledger, 2)
    assert ledger.prompts.retry(second, "aborted", partial=0xABC)
    assert not ledger.prompts.retry(second, "aborted", partial=0xABC)  # delivered twice
    again, new = ledger.prompts.issue("p", 2, request="next").prompts
    assert (again.task, again.partial) == (Task("train", 1, 2), (Task("train", 1, 1), 0xABC))
    assert (new.task.group, new.partial) == (2, None)
    ledger.prompts.abandon("p")  # the second attempt dies: the tokens of the first are still there
    prompts = ledger.prompts.issue("q", 3, request="1").prompts
    assert [(p.task.attempt, p.partial) for p in prompts] == [(2, None), (3, (Task("train", 1, 1), 0xABC)), (2, None)]
    assert ledger.needed_payloads()[Task("train", 1, 1)] == 0xABC
    ledger.prompts.commit(prompts[1].task, payload(1))
    assert Task("train", 1, 1) not in ledger.needed_payloads()
    assert first.group == 0


def test_a_grant_says_which_weights_are_served_also_when_it_is_delivered_twice(ledger):
    for round_id in range(2):
        tasks = issue(ledger, 2)
        for task in tasks:
            ledger.prompts.commit(task, payload(task.group, version=round_id))
        ledger.rounds.trained(round_id, lease(ledger, round_id).fence)
        ledger.rounds.release(round_id + 1)
    assert [ledger.prompts.issue("p", 1, request="r").serving for _ in range(2)] == [2, 2]


def test_prompts_come_to_an_end_only_when_none_can_come_back(ledger):
    def ask():
        return ledger.prompts.issue("p", 9, request=str(len(answers)), end=2)

    answers = []
    answers.append(ask())
    assert [prompt.task.group for prompt in answers[0].prompts] == [0, 1]
    answers.append(ask())
    assert (answers[1].prompts, answers[1].is_exhausted) == ((), False)
    assert "in flight" in answers[1].waits_for
    for prompt in answers[0].prompts:
        ledger.prompts.commit(prompt.task, payload())
    assert ask().is_exhausted


@pytest.mark.parametrize(
    ("bound", "name"), [({"max_groups": 2}, "groups"), ({"max_tokens": 20}, "tokens"), ({"max_bytes": 80}, "bytes")]
)
def test_payloads_wait_for_room_in_the_order_in_which_they_asked(tmp_path, bound, name):
    ledger = open_ledger(tmp_path, **bound)  # room for 2 payloads of 10 tokens, 40 bytes
    tasks = issue(ledger, 4)
    size = {"num_tokens": 10, "num_bytes": 40}
    assert ledger.prompts.admit(tasks[3], **size).granted
    assert ledger.prompts.admit(tasks[0], **size).granted
    answer = ledger.prompts.admit(tasks[2], **size)
    assert not answer.granted
    assert name in answer.waits_for
    assert "behind 1 others" in ledger.prompts.admit(tasks[1], **size).waits_for
    with pytest.raises(CapacityError, match="not admitted"):
        ledger.prompts.commit(tasks[1], payload())
    ledger.prompts.drop(tasks[0], "filter")  # makes room for one
    assert not ledger.prompts.admit(tasks[1], **size).granted
    assert ledger.prompts.admit(tasks[2], **size).granted
    with pytest.raises(CapacityError, match="11 tokens, 44 bytes; admitted were 10 and 40"):
        ledger.prompts.commit(tasks[2], payload(tokens=11))
    for task in (tasks[2], tasks[3]):
        ledger.prompts.commit(task, payload(task.group))
    found = lease(ledger, 0)
    assert not ledger.prompts.admit(tasks[1], **size).granted
    ledger.rounds.trained(0, found.fence)
    assert ledger.prompts.admit(tasks[1], **size).granted
    assert ledger.status().held_groups == 1
    ledger.close()
    checked(tmp_path)


def test_a_late_attempt_gets_no_room(tmp_path):
    ledger = open_ledger(tmp_path, max_groups=1)
    [old] = issue(ledger, 1)
    ledger.prompts.abandon("p")
    issue(ledger, 1)
    with pytest.raises(LateAttemptError, match="issued at attempt 2"):
        ledger.prompts.admit(old, num_tokens=1, num_bytes=1)
    assert ledger.status().held_groups == 0
    ledger.close()


def test_a_payload_larger_than_the_queue_is_refused_at_once(tmp_path):
    ledger = open_ledger(tmp_path, max_tokens=100)
    [task] = issue(ledger, 1)
    with pytest.raises(CapacityError, match=r"101 tokens.*--transferqueue-max-tokens"):
        ledger.prompts.admit(task, num_tokens=101, num_bytes=1)
    ledger.close()


def test_a_round_larger_than_what_may_be_under_way_is_refused_at_once(tmp_path):
    ledger = open_ledger(tmp_path, max_groups=4)  # and 8 slots
    for count in (5, 9):
        with pytest.raises(CapacityError, match=rf"{count} groups, but at most 4"):
            lease(ledger, 0, count)
    ledger.close()


def test_a_producer_that_dies_while_it_waits_leaves_the_line(tmp_path):
    ledger = open_ledger(tmp_path, max_groups=1)
    held, dead, alive = issue(ledger, 1, "a") + issue(ledger, 1, "dead") + issue(ledger, 1, "b")
    size = {"num_tokens": 1, "num_bytes": 1}
    assert ledger.prompts.admit(held, **size).granted
    assert not ledger.prompts.admit(dead, **size).granted
    assert not ledger.prompts.admit(alive, **size).granted
    ledger.prompts.abandon("dead")
    ledger.prompts.drop(held, "filter")
    assert ledger.prompts.admit(alive, **size).granted
    ledger.close()


def test_eval_groups_live_apart_and_end_when_they_were_looked_at(ledger):
    train(ledger, 0)
    tasks = issue(ledger, 20, partition="eval/gsm8k")  # no slots needed
    assert len(tasks) == 20
    for task in tasks:
        ledger.prompts.commit(task, payload(version=1))
    with pytest.raises(PartitionError, match="'eval/gsm8k'"):
        ledger.rounds.lease(1, version=1, holder="t", count=2, partition="eval/gsm8k")
    assert ledger.rounds.lease(1, version=1, holder="t", count=2).lease is None
    assert ledger.prompts.drop(tasks[0], "evaluated")
    [task] = make_ready(ledger, 1, version=1)
    with pytest.raises(TransitionError, match="it is ready"):
        ledger.prompts.drop(task, "evaluated")  # a training group is not dropped by its producer once it is ready


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda ledger: ledger.prompts.commit(Task("train", 99, 1), payload()), "never issued"),
        (lambda ledger: ledger.prompts.commit(Task("eval/x", 0, 1), payload()), "never issued"),
        (lambda ledger: ledger.prompts.commit(Task("train", 0, 2), payload()), "issued at attempt 1"),
        (lambda ledger: ledger.prompts.commit(Task("train", 0, 1), payload(version=2, newest=1)), "versions in order"),
        (lambda ledger: ledger.prompts.drop(Task("train", 0, 1), ""), "without a reason"),
        (lambda ledger: ledger.prompts.issue("p", 0, request="x"), "issue of 0"),
        (lambda ledger: ledger.prompts.issue("p", 1, request="x", partition=" "), "partition ' '"),
    ],
)
def test_what_is_not_allowed_is_refused_by_name_and_changes_nothing(ledger, call, message):
    issue(ledger, 1)
    before = ledger.status()
    with pytest.raises(HandoffError, match=message):
        call(ledger)
    assert ledger.status() == before


def test_a_reopened_ledger_knows_what_is_in_flight_and_gives_it_a_full_timeout(tmp_path, clock):
    ledger = open_ledger(tmp_path, clock)
    first = ledger.prompts.issue("p", 3, request="1")
    make_ready(ledger, 2)
    before = ledger.status()
    ledger.close()
    clock.time = 5.0  # another boot
    ledger = open_ledger(tmp_path, clock)
    assert ledger.status() == before
    assert ledger.prompts.issue("p", 3, request="1") == first
    clock.time += TIMEOUT_S / 2
    assert ledger.prompts.heartbeat("p") == frozenset(prompt.task for prompt in first.prompts)
    assert groups_of(lease(ledger, 0)) == [3, 4]
    ledger.close()
    checked(tmp_path)


def test_a_run_that_ended_normally_is_not_changed_by_a_restore(tmp_path):
    ledger = open_ledger(tmp_path)
    train(ledger, 0)
    train(ledger, 1)
    ledger.rounds.durable(1)
    before = ledger.status(), ledger.needed_payloads()
    report = ledger.rounds.restore(1, has_all)
    assert (report.replayed_rounds, report.reissued, report.regenerated) == ((), (), ())
    assert (ledger.status(), ledger.needed_payloads()) == before
    ledger.close()
    assert checked(tmp_path, checkpoint_round=1).groups == {"durable": 4}


def test_what_each_producer_makes_and_since_when_it_is_silent(ledger, clock):
    issue(ledger, 2, "external/a")
    clock.time += 4.0
    issue(ledger, 1, "external/a")
    [evaluated, kept] = [*issue(ledger, 1, "b", "eval/x"), *issue(ledger, 1, "b")]
    clock.time += 1.0
    lent = {each.producer: (each.groups, each.silent_s) for each in ledger.lent()}
    assert lent == {"external/a": ((0, 1, 2), 1.0), "b": ((3,), 1.0)}, "heard of by its newest call; eval is no lease"
    ledger.prompts.heartbeat("external/a")
    ledger.prompts.commit(kept, payload(3))
    assert [(each.producer, each.silent_s) for each in ledger.lent()] == [("external/a", 0.0)]
    assert evaluated.partition == "eval/x"
