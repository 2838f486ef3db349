"""How long a restart waits for room in a cluster, and when a process that does not respond is taken for hanging."""

import itertools
from types import SimpleNamespace

import pytest

from vime.ray import cluster, waits
from vime.ray.cluster import NO_PATIENCE, Patience
from vime.ray.waits import HANGS_S, Silence
from vime.types import ClusterError


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    now = SimpleNamespace(s=1000.0)

    def sleep(seconds: float) -> None:
        now.s += seconds

    for module in (cluster, waits):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now.s, sleep=sleep))
    return now


def test_a_first_start_says_at_once_what_is_missing(clock: SimpleNamespace) -> None:
    with pytest.raises(ClusterError, match="2 GPU are missing"):
        NO_PATIENCE.wait(lambda: "2 GPU are missing.", lambda: None)
    assert clock.s == 1000


def test_a_restart_waits_until_there_is_room_and_says_so_once(clock: SimpleNamespace) -> None:
    told: list[str] = []
    polls = itertools.count()
    Patience(seconds=300, tell=told.append).wait(lambda: "a node." if clock.s < 1020 else "", lambda: next(polls))
    assert clock.s == 1020
    assert told == ["a node. Waiting 300 s at most (--start-timeout-secs) until it is there."]
    assert next(polls) == 20, "Ctrl-C is looked for every second"


def test_a_restart_that_waits_in_vain_ends_with_what_is_missing_then(clock: SimpleNamespace) -> None:
    with pytest.raises(ClusterError, match="missing at 1300"):
        Patience(seconds=300, tell=lambda _: None).wait(lambda: f"missing at {clock.s:g}", lambda: None)


def test_a_process_hangs_after_half_a_minute_in_which_it_could_have_been_heard(clock: SimpleNamespace) -> None:
    silence = Silence()
    for _ in range(int(HANGS_S)):
        clock.s += 1
        assert not silence.is_too_long()
    clock.s += 1
    assert silence.is_too_long()


def test_who_was_stopped_itself_takes_nobody_for_hanging(clock: SimpleNamespace) -> None:
    silence = Silence()
    clock.s += 3600
    assert not silence.is_too_long()
