"""One control client for N engines: one thread, a kept connection each, one deadline for all of them."""

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence

import pytest

from vime.backends.vllm_utils.control import CALLS_AT_ONCE, FleetControl, _report
from vime.backends.vllm_utils.fake import FakeEngine
from vime.types import EngineAddress, EngineError, EngineLostError, EngineReport

NUM_ENGINES = 12


@pytest.fixture
def engines() -> Iterator[Sequence[FakeEngine]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(FakeEngine(name=f"e{index:02d}")) for index in range(NUM_ENGINES)]


@contextlib.contextmanager
def controlled(engines: Sequence[FakeEngine], timeout_s: float = 20.0) -> Iterator[FleetControl]:
    control = FleetControl([engine.address for engine in engines], timeout_s=timeout_s)
    try:
        yield control
    finally:
        control.close()


def control_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "vime-fleet-control"]


def test_twelve_engines_are_controlled_by_one_thread_over_one_connection_each(engines):
    with controlled(engines) as control:
        for _ in range(5):
            assert control.is_paused() == [False] * NUM_ENGINES
            control.resume()
        assert control_threads() == ["vime-fleet-control"]
        assert [engine.num_connections for engine in engines] == [1] * NUM_ENGINES
    assert control_threads() == []


@pytest.mark.parametrize(
    ("held", "said"),
    [
        (["a"], "e: 1 workers say what they hold, expected 2, those of all its nodes"),
        (["a", "b"], r"e: its 2 workers hold different weights: \[\('a', 3\), \('b', 3\)\]"),
    ],
)
def test_an_engine_confirms_with_all_its_workers_or_not_at_all(held, said):
    address = EngineAddress(name="e", url="http://e", num_workers=2)

    def reported(hashes):
        workers = [{"content_hash": each, "num_tensors": 3} for each in hashes]
        return _report(address, {"weight_version": "7", "workers": workers})

    assert reported(["a", "a"]) == EngineReport(engine="e", version=7, content_hash="a", num_tensors=3)
    with pytest.raises(EngineError, match=said):
        reported(held)


def test_every_response_is_that_of_its_engine_and_row(engines):
    with controlled(engines) as control:
        engines[4].faults.status["/is_paused"] = 200  # a response of another form
        with pytest.raises(EngineError, match=r"e04 \(http.*\) /is_paused: the response cannot be read: .*is_paused"):
            control.is_paused()
        rows = [[1] * (2 + row) for row in range(3)]
        assert control.prompt_log_probs(rows) == [[[-1.0] * (1 + row) for row in range(3)]] * NUM_ENGINES


def test_the_one_engine_of_twelve_that_hangs_is_named_at_the_deadline(engines):
    engines[7].faults.stall["/resume"] = threading.Event()
    with controlled(engines, timeout_s=0.5) as control:
        with pytest.raises(EngineLostError, match=r"^e07 /resume: no response within 0\.5 s\. See the engine's log"):
            control.resume()
        assert control.is_paused() == [False] * NUM_ENGINES  # of all the others' connections none was given up
    assert [engine.num_connections for engine in engines] == [1] * 7 + [2] + [1] * 4


def test_an_engine_that_refuses_ends_the_call_before_the_deadline_of_one_that_hangs(engines):
    engines[2].faults.stall["/resume"] = threading.Event()
    engines[9].faults.status["/resume"] = 500
    began = time.monotonic()
    with (
        controlled(engines, timeout_s=60) as control,
        pytest.raises(EngineError, match=r"e09 .* /resume: HTTP 500: .*; no response yet from e02\."),
    ):
        control.resume()
    assert time.monotonic() - began < 30


def test_the_deadline_is_of_all_calls_together_also_of_those_that_wait_for_a_connection(engines):
    engines[0].faults.stall["/inference/v1/generate"] = threading.Event()
    rows = [[1, 2]] * (4 * CALLS_AT_ONCE)  # one after the other they would take four deadlines
    began = time.monotonic()
    with (
        controlled(engines[:1], timeout_s=1.0) as control,
        pytest.raises(EngineLostError, match="e00 /inference/v1/generate: no response within 1 s"),
    ):
        control.prompt_log_probs(rows)
    assert 1.0 <= time.monotonic() - began < 3.0
    assert engines[0].num_connections <= CALLS_AT_ONCE


def test_an_engine_that_started_again_at_its_address_is_reached_by_the_next_call():
    with FakeEngine(name="e0") as first:
        control = FleetControl([first.address], timeout_s=20)
        assert control.is_paused() == [False]
    port = int(first.address.url.rpartition(":")[2])
    with FakeEngine(name="e0", port=port) as second:
        # The kept connection still leads to the first, which ends it at the next request: a GET is asked again.
        assert control.is_paused() == [False]
        assert second.num_connections == 1
        control.close()


def test_an_engine_that_is_lost_is_left_out_only_where_that_is_allowed() -> None:
    with contextlib.ExitStack() as stack:
        first, second, third = (stack.enter_context(FakeEngine(name=f"e{number}")) for number in range(3))
        addresses = [engine.address for engine in (first, second, third)]
        strict = FleetControl(addresses, timeout_s=20)
        stack.callback(strict.close)
        lenient = FleetControl(addresses, timeout_s=20, lose_after_s=20)
        stack.callback(lenient.close)
        second.faults.status["/is_paused"] = 500  # of the statuses that count as a loss
        with pytest.raises(EngineLostError, match="e1"):
            strict.is_paused()
        assert lenient.is_paused() == [False, False]
        assert [address.name for address in lenient.addresses] == ["e0", "e2"]
        second.faults.status.clear()
        assert lenient.world_sizes() == [1, 1]  # it stays out: what it missed nobody sends again
        third.faults.status["/is_paused"] = 400
        with pytest.raises(EngineError, match=r"e2.*HTTP 400"):  # refused, which is no loss
            lenient.is_paused()
        assert [address.name for address in lenient.addresses] == ["e0", "e2"]
        third.faults.status["/is_paused"] = first.faults.status["/is_paused"] = 503
        with pytest.raises(EngineLostError, match=r"e0.*e2"):  # nobody is left
            lenient.is_paused()


def test_one_straggler_is_left_out_before_the_deadline_and_engines_that_are_all_slow_are_not() -> None:
    with contextlib.ExitStack() as stack:
        first, second, dead = (stack.enter_context(FakeEngine(name=f"e{number}")) for number in range(3))
        control = FleetControl([first.address, second.address, dead.address], timeout_s=40, lose_after_s=0.5)
        stack.callback(control.close)
        go_on = first.faults.stall["/is_paused"] = second.faults.stall["/is_paused"] = threading.Event()
        dead.faults.status["/is_paused"] = 500  # one that is lost has not responded
        timer = threading.Timer(3.0, go_on.set)
        timer.start()
        assert control.is_paused() == [False, False]
        timer.join()
        second.faults.stall["/is_paused"] = threading.Event()
        first.faults.stall.clear()
        began = time.monotonic()
        assert control.is_paused() == [False]
        assert time.monotonic() - began < 30
        second.faults.stall["/is_paused"].set()
        assert [address.name for address in control.addresses] == ["e0"]
