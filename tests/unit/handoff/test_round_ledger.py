import pytest

from tests.helpers.ledger_cases import (
    TIMEOUT_S,
    checked,
    groups_of,
    has_all,
    issue,
    lease,
    make_ready,
    open_ledger,
    payload,
    train,
)
from vime.handoff.ledger_types import LeaseLostError, LedgerFileError, RoundOrder, StalePolicy, Task, TransitionError
from vime.types import StaleError


def commit(ledger, *tasks, version=0):
    for task in tasks:
        ledger.prompts.commit(task, payload(task.group, version=version))


def pass_time(ledger, clock, seconds):
    for _ in range(int(seconds)):
        clock.time += 1
        ledger.expire()


def test_in_commit_order_the_first_ready_are_trained_first(ledger):
    a, b, c, _ = issue(ledger, 4)
    commit(ledger, c, a, b)
    assert groups_of(lease(ledger, 0)) == [2, 0]


def test_in_index_order_a_round_does_not_depend_on_who_was_faster(tmp_path):
    ledger = open_ledger(tmp_path, round_order=RoundOrder.INDEX)
    a, b, c, d = issue(ledger, 4)
    commit(ledger, d, c, a)
    answer = ledger.rounds.lease(0, version=0, holder="t", count=2)
    assert (answer.lease, answer.waits_for) == (None, "ready groups: 1 of 2; 1 in flight at p")
    ledger.prompts.drop(b, "filter")
    assert groups_of(lease(ledger, 0)) == [0, 2]
    ledger.close()
    checked(tmp_path)


def test_a_lease_waits_for_its_count_unless_a_minimum_or_the_end_allows_less(tmp_path, ledger):
    [a, b, c] = issue(ledger, 3)
    commit(ledger, a)
    ask = {"version": 0, "holder": "t", "count": 4}
    assert "1 of 4; 2 in flight" in ledger.rounds.lease(0, **ask).waits_for
    assert "1 of 2" in ledger.rounds.lease(0, **ask, minimum=2).waits_for
    assert ledger.rounds.lease(0, **ask, drain=True).lease is None  # b and c are still in flight
    commit(ledger, b)
    ledger.prompts.drop(c, "filter")
    found = lease(ledger, 0, 4, drain=True)
    assert groups_of(found) == [0, 1]
    ledger.rounds.trained(0, found.fence)
    answer = ledger.rounds.lease(1, version=1, holder="t", count=4, drain=True)
    assert (answer.lease, answer.is_drained) == (None, True)
    checked(tmp_path)


def test_a_round_that_began_with_its_minimum_grows_to_its_count_and_keeps_its_order(tmp_path, ledger):
    [a, b, c, d] = issue(ledger, 4)
    commit(ledger, b)
    first = lease(ledger, 0, 3, minimum=1)
    commit(ledger, d, a, c)
    second = lease(ledger, 0, 3, minimum=1)
    assert (groups_of(first), groups_of(second)) == ([1], [1, 3, 0])
    with pytest.raises(LeaseLostError, match="under fence 2"):
        ledger.rounds.trained(0, first.fence)
    assert ledger.rounds.trained(0, second.fence)
    checked(tmp_path)


def test_what_is_ready_can_be_seen_before_a_lease_and_is_not_changed_by_looking(tmp_path):
    ledger = open_ledger(tmp_path, round_order=RoundOrder.INDEX, max_staleness=0)
    a, b, c = issue(ledger, 3)
    commit(ledger, c, a)
    assert [found.task for found in ledger.rounds.ready(version=0, count=4)] == [a, c]  # b holds a lease up, not a look
    assert [found.task for found in ledger.rounds.ready(version=0, count=1)] == [a]
    assert [found.task for found in ledger.rounds.ready(version=0, count=2, of_round=True)] == [a]  # c comes after b
    assert ledger.has(round_of=3, at_least=2)
    assert not ledger.has(round_of=2, at_least=2)
    assert ledger.rounds.ready(version=1, count=4) == ()  # a round on version 1 may not train them
    commit(ledger, b)
    assert groups_of(lease(ledger, 0, 2)) == [0, 1]
    assert [found.task for found in ledger.rounds.ready(version=0, count=4)] == [c]
    ledger.close()
    checked(tmp_path)


def test_whoever_waits_can_name_how_many_groups_and_slots_it_needs(ledger):
    """8 slots."""
    make_ready(ledger, 2)
    issue(ledger, 3)
    assert ledger.has(ready=2, slots=3)
    assert not ledger.has(ready=3)
    assert not ledger.has(slots=4)
    lease(ledger, 0)
    assert not ledger.has(ready=1)


@pytest.mark.parametrize(("order", "whole"), [(RoundOrder.INDEX, [0, 1]), (RoundOrder.COMMIT, [1, 2])])
def test_whoever_waits_for_a_round_is_told_when_its_own_order_makes_it_whole(tmp_path, order, whole):
    ledger = open_ledger(tmp_path, round_order=order)
    a, b, c = issue(ledger, 3)
    commit(ledger, b, c)
    assert ledger.has(round_of=2) == (order is RoundOrder.COMMIT)
    if order is RoundOrder.INDEX:
        commit(ledger, a)
    assert ledger.has(round_of=2)
    assert not ledger.has(round_of=4)
    assert groups_of(lease(ledger, 0, 2)) == whole
    ledger.close()


def test_a_late_ack_of_an_expired_lease_is_refused_and_the_groups_go_to_the_next(tmp_path, ledger, clock):
    make_ready(ledger, 2)
    old = lease(ledger, 0, holder="slow")
    with pytest.raises(LeaseLostError, match="slow holds it"):
        lease(ledger, 0, holder="other")
    pass_time(ledger, clock, TIMEOUT_S)
    with pytest.raises(LeaseLostError, match="its groups went back"):
        ledger.rounds.trained(0, old.fence)
    new = lease(ledger, 0, holder="other")
    with pytest.raises(LeaseLostError):
        ledger.rounds.heartbeat(0, old.fence)
    with pytest.raises(LeaseLostError):
        ledger.rounds.trained(0, old.fence)
    assert groups_of(new) == groups_of(old)
    assert ledger.rounds.trained(0, new.fence)
    assert not ledger.rounds.trained(0, new.fence)  # said twice, after a lost answer
    checked(tmp_path)


def test_heartbeats_keep_a_lease_alive(ledger, clock):
    make_ready(ledger, 2)
    found = lease(ledger, 0)
    for _ in range(5):
        pass_time(ledger, clock, TIMEOUT_S - 1)
        ledger.rounds.heartbeat(0, found.fence)
    assert ledger.rounds.trained(0, found.fence)


def test_a_heartbeat_that_was_overtaken_by_the_end_of_its_round_is_no_lost_lease(ledger):
    make_ready(ledger, 2)
    found = lease(ledger, 0)
    ledger.rounds.trained(0, found.fence)
    ledger.rounds.heartbeat(0, found.fence)
    with pytest.raises(LeaseLostError, match="it is trained under fence"):
        ledger.rounds.heartbeat(0, found.fence - 1)


def test_groups_too_old_at_lease_are_dropped_and_counted(tmp_path, ledger):
    train(ledger, 0)
    old = make_ready(ledger, 2, version=0)
    train(ledger, 1)  # takes the old ones: at version 1 they are 1 behind, which is the bound
    assert [ledger.needed_payloads()[task] for task in old]
    make_ready(ledger, 2, version=2)
    found = lease(ledger, 2)  # the groups of version 1 are 1 behind
    ledger.rounds.trained(2, found.fence)
    answer = ledger.rounds.lease(4 - 1, version=4, holder="t", count=2)  # now those of version 2 are 2 behind
    assert answer.lease is None
    assert [task.group for task in answer.too_old] == [6, 7]
    report = checked(tmp_path)
    assert report.groups == {"trained": 6, "dropped": 2}
    assert ledger.status().held_groups == 0


def test_groups_too_old_at_lease_are_generated_again_by_policy(tmp_path):
    ledger = open_ledger(tmp_path, stale_policy=StalePolicy.RETRY)
    tasks = make_ready(ledger, 2, version=0)
    answer = ledger.rounds.lease(0, version=2, holder="t", count=2)
    assert (answer.lease, answer.too_old) == (None, tuple(tasks))
    assert issue(ledger, 2) == [Task("train", task.group, 2) for task in tasks]
    ledger.close()
    checked(tmp_path)


def test_tokens_newer_than_the_weights_are_an_error_that_changes_nothing(ledger):
    make_ready(ledger, 2, version=1)
    before = ledger.status()
    with pytest.raises(StaleError, match="version 1, newer than the weights 0"):
        ledger.rounds.lease(0, version=0, holder="t", count=2)
    assert ledger.status() == before
    assert groups_of(lease(ledger, 0, version=1)) == [0, 1]


def test_rounds_are_leased_and_trained_one_after_the_other(ledger):
    train(ledger, 0)
    make_ready(ledger, 5, version=0)
    for round_id, message in ((2, "the round before it is 0"), (0, "never trained twice")):
        with pytest.raises(TransitionError, match=message):
            lease(ledger, round_id, version=1)
    first, second = lease(ledger, 1), lease(ledger, 2, version=1)
    with pytest.raises(TransitionError, match="round 1 is not trained yet"):
        ledger.rounds.trained(2, second.fence)
    with pytest.raises(TransitionError, match="trains version 1, not 5"):
        lease(ledger, 1, version=5)
    with pytest.raises(TransitionError, match="checkpoint of round 1"):
        ledger.rounds.durable(1)
    with pytest.raises(TransitionError, match="release of version 2"):
        ledger.rounds.release(2)
    assert ledger.rounds.trained(1, first.fence)


def test_payloads_are_unread_until_their_round_is_trained(tmp_path, ledger):
    """Of attempts in progress whatever they store, of those that were sent back nothing."""
    train(ledger, 0)
    leased, [ready] = make_ready(ledger, 2), make_ready(ledger, 1)
    found = lease(ledger, 1, version=0)
    assert groups_of(found) == [task.group for task in leased]
    [given_back] = issue(ledger, 1)
    [in_progress] = issue(ledger, 1)
    ledger.prompts.retry(given_back, "engine was lost")
    checksums = {group.task: group.payload.checksum for group in found.groups}
    of_ready = ledger.needed_payloads()[ready]
    assert ledger.unread_payloads() == {**checksums, ready: of_ready, in_progress: None}
    ledger.rounds.trained(1, found.fence)
    assert ledger.unread_payloads() == {ready: of_ready, in_progress: None}
    checked(tmp_path)


def test_payloads_are_needed_until_their_round_is_durable(tmp_path, ledger):
    train(ledger, 0)
    train(ledger, 1)
    assert sorted(task.group for task in ledger.needed_payloads()) == [0, 1, 2, 3]
    ledger.rounds.durable(0)
    assert sorted(task.group for task in ledger.needed_payloads()) == [2, 3]
    checked(tmp_path, checkpoint_round=0)


def test_after_a_restart_rounds_behind_the_checkpoint_are_the_same_groups_in_the_same_order(tmp_path):
    ledger = open_ledger(tmp_path, max_slots=6)
    seen = [train(ledger, round_id) for round_id in range(3)]
    ledger.rounds.durable(0)
    a, b, c = issue(ledger, 3)
    commit(ledger, c, b, version=3)
    leased = groups_of(lease(ledger, 3))
    ledger.close()
    ledger = open_ledger(tmp_path, max_slots=6)
    report = ledger.rounds.restore(0, has_all)
    assert (report.replayed_rounds, report.reissued, report.regenerated) == ((1, 2, 3), (a,), ())
    # 6 replayed groups hold 6 slots: the retried prompt waits, or weights 1 would sample it for round 4
    assert "6 groups hold one and 1 to be retried" in ledger.prompts.issue("p", 1, request="x").waits_for
    for round_id, expected in ((1, seen[1]), (2, seen[2]), (3, leased)):
        found = lease(ledger, round_id)
        assert groups_of(found) == expected
        assert found.is_replay
        ledger.rounds.trained(round_id, found.fence)
        ledger.rounds.release(round_id + 1)
    assert issue(ledger, 2) == [Task("train", a.group, 2), Task("train", 9, 1)]
    ledger.close()
    checked(tmp_path, checkpoint_round=0)


def test_a_replayed_round_whose_lease_expires_keeps_its_groups(ledger, clock):
    seen = train(ledger, 0)
    ledger.rounds.restore(None, has_all)
    lease(ledger, 0)
    pass_time(ledger, clock, TIMEOUT_S)
    assert groups_of(lease(ledger, 0, 5, holder="other")) == seen


def test_what_the_lost_payload_made_impossible_is_generated_again(tmp_path, ledger):
    first = train(ledger, 0)
    second = train(ledger, 1)
    third = train(ledger, 2, version=1)  # sampled by the weights of round 1, which come again
    fourth = train(ledger, 3, version=2)  # one version too new: round 1 will give other weights
    report = ledger.rounds.restore(None, lambda task, checksum: task.group != second[0])
    assert report.replayed_rounds == (0,)
    lost = Task("train", second[0], 1)
    assert report.regenerated == (lost, *(Task("train", group, 1) for group in fourth))
    found = lease(ledger, 0)
    assert groups_of(found) == first
    ledger.rounds.trained(0, found.fence)
    assert groups_of(lease(ledger, 1)) == [second[1], third[0]]
    checked(tmp_path)


def test_an_older_checkpoint_can_be_loaded_when_newer_rounds_are_durable(tmp_path, ledger):
    for round_id in range(3):
        train(ledger, round_id)
    ledger.rounds.durable(2)
    report = ledger.rounds.restore(0, lambda task, checksum: False)  # the spool was compacted
    assert (report.replayed_rounds, len(report.regenerated)) == ((), 4)
    assert issue(ledger, 9) == [Task("train", group, 2) for group in (2, 3, 4, 5)] + [
        Task("train", group, 1) for group in (6, 7, 8, 9)
    ]
    checked(tmp_path, checkpoint_round=0)


def test_a_late_worker_from_before_a_restart_is_refused(ledger):
    make_ready(ledger, 2)
    found = lease(ledger, 0)
    [task] = issue(ledger, 1)
    ledger.rounds.restore(None, has_all)
    with pytest.raises(LeaseLostError, match="it is replay"):
        ledger.rounds.trained(0, found.fence)
    with pytest.raises(TransitionError):
        ledger.prompts.commit(task, payload())


def test_a_checkpoint_that_the_ledger_does_not_know_is_refused(ledger):
    train(ledger, 0)
    make_ready(ledger, 2, version=1)
    lease(ledger, 1)
    with pytest.raises(LedgerFileError, match=r"checkpoint is of round 1.*newest trained round is 0"):
        ledger.rounds.restore(1, has_all)


def test_an_empty_ledger_accepts_no_checkpoint(tmp_path, ledger):
    """It took any: a run whose ledger was lost trained every prompt a second time."""
    with pytest.raises(LedgerFileError, match=r"checkpoint is of round 6, but this ledger has seen no round trained"):
        ledger.rounds.restore(6, has_all)
    issue(ledger, 2)
    with pytest.raises(LedgerFileError, match=r"checkpoint is of round 0, but this ledger has seen no round trained"):
        ledger.rounds.restore(0, has_all)
    assert ledger.rounds.restore(None, has_all).replayed_rounds == ()
    checked(tmp_path)
