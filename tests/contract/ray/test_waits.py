"""`wait_for` against a real Ray: one failure ends the wait, a deadline has a name, nothing hides behind a peer."""

import logging
import time
from argparse import Namespace

import pytest
import ray

from benchmarks.unit_costs import tickets
from vime.ray.waits import Interrupted, _raise_named, said_meanwhile, wait_for
from vime.types import CheckpointError, ClusterError, PartError, StaleError, WaitTimeoutError

pytestmark = pytest.mark.usefixtures("ray_cluster")


@ray.remote(num_cpus=0)
class Rank:
    def answer_late(self, value: int) -> int:
        time.sleep(0.6)  # longer than a poll of the wait
        return value

    def answer(self, value: int) -> int:
        return value

    def fail(self) -> None:
        raise StaleError("sample 7: too old")

    def fail_to_save(self) -> None:
        raise CheckpointError("the checkpoint could not be written: connection closed by peer. Check free space")

    def crash(self) -> None:
        raise ZeroDivisionError("no such shard")

    def break_down(self) -> None:
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered")

    def hang(self) -> None:
        time.sleep(600)

    def die(self) -> None:
        import os

        os._exit(1)

    def die_later(self) -> None:
        time.sleep(0.5)
        self.die()


@pytest.fixture
def ranks():
    actors = [Rank.remote() for _ in range(2)]
    ray.get([actor.answer.remote(0) for actor in actors])  # one that starts seconds after its peer fails after it
    yield actors
    for actor in actors:
        ray.kill(actor)


def wait(refs, deadline_s=60.0, on_poll=None):
    return wait_for(refs, name="ranks to train", owner="trainer", deadline_s=deadline_s, on_poll=on_poll)


def test_answers_come_in_the_order_of_the_question(ranks) -> None:
    """Also when the first one returns last."""
    assert wait([ranks[0].answer_late.remote(0), ranks[1].answer.remote(1)]) == [0, 1]


def test_a_failing_rank_ends_the_wait_while_its_peer_hangs(ranks) -> None:
    with pytest.raises(StaleError, match="sample 7: too old"):
        wait([ranks[0].hang.remote(), ranks[1].fail.remote()])


def test_a_rank_that_died_while_the_others_saved_is_what_is_said(ranks) -> None:
    """And the run starts again: what its peers say of their checkpoint would end it."""
    for refs in (
        lambda: [ranks[0].fail_to_save.remote(), ranks[1].die_later.remote()],
        lambda: [ranks[1].die.remote(), ranks[0].fail_to_save.remote()],
    ):
        with pytest.raises(ClusterError, match=r"trainer [01] died"):
            wait(refs())
    with pytest.raises(CheckpointError, match="Check free space"):
        wait([ranks[0].fail_to_save.remote(), ranks[0].fail_to_save.remote()])


def test_an_unforeseen_error_names_the_wait_the_owner_and_the_cause(ranks) -> None:
    # it would raise it again: no restart
    with pytest.raises(
        PartError, match=r"trainer 1 failed with ZeroDivisionError: no such shard \(at .*test_waits.py:"
    ):
        wait([ranks[0].hang.remote(), ranks[1].crash.remote()])


def test_a_fault_of_the_machine_inside_an_actor_is_the_clusters_failure(ranks) -> None:
    with pytest.raises(ClusterError, match="trainer 1 failed with RuntimeError: CUDA error: uncorrectable ECC"):
        wait([ranks[0].hang.remote(), ranks[1].break_down.remote()])


def test_what_raised_by_itself_comes_before_what_failed_with_it(ranks) -> None:
    with pytest.raises(PartError, match="trainer 1 failed with ZeroDivisionError"):
        wait([ranks[0].break_down.remote(), ranks[1].crash.remote()])


def test_the_traceback_of_an_actor_is_in_the_log(ranks, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), pytest.raises(PartError):
        wait([ranks[1].crash.remote()])
    assert "in crash" in caplog.text
    assert "ZeroDivisionError: no such shard" in caplog.text


def test_a_dead_rank_ends_the_wait_while_its_peer_hangs(ranks) -> None:
    with pytest.raises(ClusterError, match="trainer 1 died"):
        wait([ranks[0].hang.remote(), ranks[1].die.remote()])


def test_a_death_says_more_than_the_broken_connection_of_a_peer(ranks) -> None:
    """The peer notices first."""
    with pytest.raises(ClusterError, match="trainer 1 died"):
        wait([ranks[0].crash.remote(), ranks[1].die_later.remote()])


def test_the_deadline_names_wait_and_owner_and_counts_who_is_missing(ranks) -> None:
    answered = ranks[1].answer.remote(1)
    wait([answered])
    with pytest.raises(WaitTimeoutError, match=r"ranks to train \(owner: trainer\).* 1 of 2 have not returned"):
        wait([ranks[0].hang.remote(), answered], deadline_s=0.5)


def test_the_poll_may_end_the_wait(ranks) -> None:
    def poll() -> None:
        raise Interrupted("Ctrl-C")

    with pytest.raises(Interrupted):
        wait([ranks[0].hang.remote()], on_poll=poll)


def test_a_death_is_said_by_the_wait_and_not_by_who_looks_aside_meanwhile(ranks) -> None:
    # a RolloutManager died between two looks at its progress, and the run ended instead of starting again
    def look() -> None:
        assert said_meanwhile(ranks[0].answer.remote(1), within_s=0.2) is None

    assert said_meanwhile(ranks[1].answer.remote(1), within_s=20.0) == 1
    wait_for([ranks[0].answer.remote(0)], name="a rank", owner="trainer", deadline_s=60.0)
    ranks[0].die.remote()
    with pytest.raises(ClusterError, match="ranks to train: trainer died"):
        wait([ranks[0].hang.remote()], on_poll=look)


def test_what_ray_lost_is_the_clusters_failure() -> None:
    # whatever Ray says of a lost object may not happen again: a run starts again after a ClusterError
    class Lost(ray.exceptions.RayError):
        pass

    with pytest.raises(ClusterError, match="a column: trainer: Lost: its owner died"):
        _raise_named(Lost("its owner died"), "a column", "trainer")
    with pytest.raises(ClusterError, match="a column: trainer: Lost: Lost"):
        _raise_named(Lost(), "a column", "trainer")  # an error of Ray without a text


def test_the_benchmark_of_tickets_prints_what_a_rank_costs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    tickets(Namespace(repeats=1, doublings=1))
    said = capsys.readouterr().out
    assert "| 128 |" in said
    assert "| 256 |" in said
    assert ray.is_initialized()  # it leaves a Ray that it did not start
